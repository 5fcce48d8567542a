import struct
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamatool.checkpoint import gguf
from llamatool.errors import LlamatoolError

from .builders import gguf_bytes, gguf_key, gguf_tensor, gguf_text, smollm2, write


def written_by_the_library(path: Path, order: oracle.GGUFEndian) -> None:
    writer = oracle.GGUFWriter(path, "llama", endianess=order)
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 5e5)
    writer.add_bool("flag", True)
    writer.add_uint64("big", 2**40)
    writer.add_int8("small", -3)
    writer.add_array("few", [3, 1, 2])
    writer.add_array("texts", [f"piece {i}" for i in range(10_000)])
    writer.add_array("many", list(range(5000)))
    writer.add_tensor("a.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b.weight", np.arange(64, dtype=np.float16).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("order", [oracle.GGUFEndian.LITTLE, oracle.GGUFEndian.BIG])
def test_agrees_with_the_library(tmp_path: Path, order: oracle.GGUFEndian) -> None:
    path = tmp_path / "model"
    written_by_the_library(path, order)
    file = gguf.read_file(path)
    assert file.version == 3
    assert file.architecture == "llama"
    assert file.num_parts == 1
    assert file.byte_order == ("<" if order is oracle.GGUFEndian.LITTLE else ">")
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["llama.rope.freq_base"] == 5e5
    assert file.metadata["flag"] is True
    assert file.metadata["big"] == 2**40
    assert file.metadata["small"] == -3
    assert file.metadata["few"] == (3, 1, 2)
    texts, many = file.metadata["texts"], file.metadata["many"]
    assert isinstance(texts, gguf.GgufArray)
    assert isinstance(many, gguf.GgufArray)
    assert len(texts) == 10_000
    assert texts.read()[9_999] == "piece 9999"
    assert many.read() == tuple(range(5000))
    for tensor in oracle.GGUFReader(path).tensors:
        info = file.table.tensors[tensor.name]
        assert info.offset == tensor.data_offset
        assert info.num_bytes == tensor.n_bytes
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
    raw = path.read_bytes()
    info = file.table.tensors["a.weight"]
    stored = struct.unpack(f"{file.byte_order}12f", raw[info.offset : info.offset + 48])
    assert stored == tuple(range(12))


def test_real_file() -> None:
    path = smollm2()
    file = gguf.read_file(path)
    # 134,515,008 parameters: the tied output table is not stored.
    assert sum(info.num_elements for info in file.table.tensors.values()) == 134_515_008
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, gguf.GgufArray)
    reference = oracle.GGUFReader(path)
    assert list(tokens.read()) == reference.get_field("tokenizer.ggml.tokens").contents()
    for tensor in reference.tensors:
        info = file.table.tensors[tensor.name]
        assert (info.offset, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert info.dtype.name == tensor.tensor_type.name.lower().replace("f32", "float32")


ONE = [gguf_tensor("a", [4], 0, 0)]

DAMAGED = {
    "other magic": (b"GGML" + b"\0" * 60, "begin b'GGML'"),
    "short": (b"GGUF", "found 4 bytes"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + b"\0" * 60, "version 1"),
    "version 77": (b"GGUF" + struct.pack("<I", 77) + b"\0" * 60, "version 77"),
    "huge counts": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "claims"),
    "many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 5) + b"\0" * 70, "twice|near byte|ends"),
    "huge text": (
        gguf_bytes([gguf_key("k", 8, struct.pack("<Q", 2**62))], [], b""),
        "a text of 4,611,686,018,427,387,904 bytes",
    ),
    "text beyond the end": (
        gguf_bytes([gguf_key("k", 8, struct.pack("<Q", 4000))], [], b""),
        "more bytes where the file has",
    ),
    "huge array": (
        gguf_bytes([gguf_key("k", 9, struct.pack("<IQ", 4, 2**61))], [], b""),
        "an array of",
    ),
    "array of arrays": (
        gguf_bytes([gguf_key("k", 9, struct.pack("<IQ", 9, 1))], [], b""),
        "an array of type 9",
    ),
    "lying texts": (
        gguf_bytes([gguf_key("k", 9, struct.pack("<IQ", 8, 5000) + b"\xff" * 48000)], [], b""),
        "more bytes where the file has",
    ),
    "unknown value": (gguf_bytes([gguf_key("k", 99, b"")], [], b""), "unknown type 99"),
    "key twice": (gguf_bytes([gguf_key("k", 0, b"\1")] * 2, [], b""), "`k` twice"),
    "alignment": (
        gguf_bytes([gguf_key("general.alignment", 4, struct.pack("<I", 0))], ONE, b"\0" * 16),
        "`general.alignment` is 0",
    ),
    "tensor type": (gguf_bytes([], [gguf_tensor("a", [4], 99, 0)], b"\0" * 16), "tensor type 99"),
    "dimensions": (gguf_bytes([], [gguf_tensor("a", [1] * 9, 0, 0)], b""), "9 dimensions"),
    "overflow": (gguf_bytes([], [gguf_tensor("a", [2**40] * 3, 0, 0)], b""), "cannot be stored"),
    "broken block": (
        gguf_bytes([], [gguf_tensor("a", [33], 2, 0)], b"\0" * 64),
        "cannot be stored as q4_0",
    ),
    "cut data": (gguf_bytes([], ONE, b"\0" * 15), "the file has"),
    "far offset": (gguf_bytes([], [gguf_tensor("a", [4], 0, 2**63)], b"\0" * 16), "the file has"),
    "odd offset": (gguf_bytes([], [gguf_tensor("a", [4], 0, 4)], b"\0" * 20), "no multiple"),
    "overlap": (
        gguf_bytes([], [*ONE, gguf_tensor("b", [4], 0, 0)], b"\0" * 16),
        "`b` overlaps",
    ),
    "name twice": (gguf_bytes([], ONE * 2, b"\0" * 16), "`a` occurs twice"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named(tmp_path: Path, case: str) -> None:
    data, expected = DAMAGED[case]
    with pytest.raises(LlamatoolError, match=expected) as error:
        gguf.read_file(write(tmp_path / "x.gguf", data))
    assert error.value.exit_code == 3
    assert "x.gguf" in str(error.value)


@given(st.data())
def test_any_damage_gives_a_table_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    metadata = [
        gguf_key("general.architecture", 8, gguf_text("llama")),
        gguf_key("k", 9, struct.pack("<IQ", 8, 2) + gguf_text("a") + gguf_text("bc")),
    ]
    raw = bytearray(gguf_bytes(metadata, ONE, b"\0" * 16))
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = write(tmp_path_factory.mktemp("x") / "x", bytes(raw[: data.draw(st.integers(0, 300))]))
    try:
        file = gguf.read_file(path)
    except LlamatoolError:
        return
    assert all(t.offset + t.num_bytes <= len(raw) for t in file.table.tensors.values())
