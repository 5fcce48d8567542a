import contextlib
import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from llamatool.checkpoint import files
from llamatool.checkpoint.locate import locate, read_tensors
from llamatool.errors import InputError, LlamatoolError

from .builders import gguf_bytes, gguf_tensor, write

CONFIG = {"model_type": "llama", "hidden_size": 64}
PARAMS = {"dim": 64, "n_layers": 2}


def put(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("name", ["config.json", "params.json", "whatever.safetensors"])
def test_content_decides_not_the_name(tmp_path: Path, name: str) -> None:
    path = put(tmp_path / name, CONFIG)
    found = locate(str(path))
    assert (found.kind, found.config_format) == ("hf_config", "huggingface")
    assert found.config == CONFIG
    assert found.config_path == path
    assert locate(str(put(path, PARAMS))).kind == "meta_params"
    assert locate(str(put(path, {"model": PARAMS}))).config_format == "meta"


def test_hugging_face_folder(tmp_path: Path) -> None:
    put(tmp_path / "config.json", CONFIG)
    put(tmp_path / "original" / "params.json", PARAMS)
    found = locate(str(tmp_path))
    assert (found.kind, found.path) == ("hf_folder", tmp_path)
    assert read_tensors(found) == ()
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert set(read_tensors(found)[0].tensors) == {"a"}


def test_meta_folder(tmp_path: Path) -> None:
    put(tmp_path / "params.json", PARAMS)
    for rank in range(2):
        torch.save({"a": torch.ones(rank + 1)}, tmp_path / f"consolidated.{rank:02d}.pth")
    found = locate(str(tmp_path))
    assert (found.kind, found.config_format) == ("meta_folder", "meta")
    assert [table.tensors["a"].shape for table in read_tensors(found)] == [(1,), (2,)]


def test_meta_folder_inside_a_download(tmp_path: Path) -> None:
    put(tmp_path / "original" / "params.json", PARAMS)
    found = locate(str(tmp_path))
    assert (found.kind, found.path) == ("meta_folder", tmp_path / "original")


def test_safetensors_takes_the_configuration_beside_it(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x")
    found = locate(str(tmp_path / "x"))
    assert (found.kind, found.config) == ("safetensors", None)
    put(tmp_path / "config.json", CONFIG)
    found = locate(str(tmp_path / "x"))
    assert found.config == CONFIG
    assert read_tensors(found)[0].tensors["a"].shape == (2,)


def test_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    content = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    path = put(tmp_path / "model.safetensors.index.json", content)
    assert locate(str(path)).kind == "index"
    # A folder without configuration is what its one checkpoint is.
    found = locate(str(tmp_path))
    assert (found.kind, found.path) == ("index", path)
    assert read_tensors(found)[0].tensors["a"].shape == (2,)


def test_gguf(tmp_path: Path) -> None:
    data = gguf_bytes([], [gguf_tensor("a", [4], 0, 0)], b"\0" * 16)
    path = write(tmp_path / "x.json", data)
    found = locate(str(path))
    assert found.kind == "gguf"
    assert read_tensors(found)[0].tensors["a"].shape == (4,)


def test_standard_input() -> None:
    found = locate("-", stdin=io.BytesIO(json.dumps(PARAMS).encode()))
    assert (found.kind, found.config_format, found.where) == ("stdin", "meta", "standard input")
    with pytest.raises(LlamatoolError, match="a shard index in a pipe"):
        locate("-", stdin=io.BytesIO(b'{"weight_map": {"a": "b.bin"}}'))
    with pytest.raises(LlamatoolError, match="found an empty file"):
        locate("-", stdin=io.BytesIO(b""))
    with pytest.raises(LlamatoolError, match="which is closed"):
        locate("-")


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = locate("Llama 3.1 8B")
    assert (found.kind, found.catalog_name) == ("catalog", "llama-3.1-8b")
    # The catalogue comes before the hub, a path before both.
    assert locate("meta-llama/Llama-3.1-8B").kind == "catalog"
    found = locate("someone/some-llama@main")
    assert found.kind == "hub"
    assert found.hub_id is not None
    assert (found.hub_id.repository, found.hub_id.revision) == ("someone/some-llama", "main")
    put(tmp_path / "llama-3.1-8b", CONFIG)
    assert locate("llama-3.1-8b").kind == "hf_config"


@pytest.mark.parametrize(
    "source",
    ["nothing-of-that-name", "./absent", "absent/config.json", "a/b/c", "", " ", "a\0b", "~/x"],
)
def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LlamatoolError, match=r"no (such )?file or folder") as error:
        locate(source)
    assert error.value.exit_code == 3
    assert error.value.hint


NOT_UNDERSTOOD = {
    "empty": (b"", "the file is empty"),
    "html": (b"<!DOCTYPE html><html>", "found HTML or XML"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid", "git-lfs pointer"),
    "text": (b"hello world", "found text that begins `hello world`"),
    "binary": (b"\x7fELF\x02\x01\x01\x00\x00\x00", "found binary data"),
    "pth": (b"PK\3\4" + b"\0" * 40, "a file of torch.save"),
    "pickle": (b"\x80\x02}.", "a file of torch.save"),
    "list": (b"[1, 2]", "found a JSON list instead of an object"),
    "other object": (b'{"a": 1}', "found a JSON object with `a`"),
    "empty object": (b"{}", "an empty JSON object"),
    "adapter": (b'{"peft_type": "LORA"}', "an adapter"),
    "generation": (b'{"eos_token_id": 2}', "a generation_config.json"),
    "broken": (b'{"model_type": "llama",', "found JSON that ends early"),
    "twice": (b'{"dim": 1, "n_layers": 1, "dim": 2}', "`dim` occurs twice"),
    "nan": (b'{"model_type": "llama", "rms_norm_eps": NaN}', "NaN is not a JSON number"),
    "huge integer": (b'{"dim": 1' + b"0" * 5000 + b"}", "an integer of 5001 digits"),
    "deep": (b'{"a":' + b"[" * 100_000, "nests too deeply"),
    "header length": ((2**60).to_bytes(8, "little") + b"{}" + b"\0" * 20, "header claims"),
    "header length without NUL": (b"\xff" * 8 + b"{}" + b"\0" * 20, "header claims"),
}


@pytest.mark.parametrize("case", NOT_UNDERSTOOD)
def test_what_was_found_is_said(tmp_path: Path, case: str) -> None:
    data, expected = NOT_UNDERSTOOD[case]
    path = write(tmp_path / "config.json", data)
    with pytest.raises(LlamatoolError, match=expected) as error:
        read_tensors(locate(str(path)))
    assert error.value.exit_code == 3
    assert "config.json" in str(error.value)


def test_folders_that_hold_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(LlamatoolError, match="the folder is empty"):
        locate(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(LlamatoolError, match=r"it holds `notes\.txt`"):
        locate(str(tmp_path))
    (tmp_path / "consolidated.00.pth").touch()
    with pytest.raises(LlamatoolError, match=r"weights, but neither config\.json nor"):
        locate(str(tmp_path))
    (tmp_path / "consolidated.00.pth").unlink()
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(LlamatoolError, match=r"an adapter \(LoRA\), not a model"):
        locate(str(tmp_path))
    (tmp_path / "adapter_config.json").unlink()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(LlamatoolError, match=r"holds 2 \.gguf files"):
        locate(str(tmp_path))


def test_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(LlamatoolError, match="links form a circle"):
        locate(str(tmp_path / "a"))
    (tmp_path / "c").symlink_to("absent")
    with pytest.raises(LlamatoolError, match="a symbolic link to `absent`, which does not exist"):
        locate(str(tmp_path / "c"))
    put(tmp_path / "d", CONFIG)
    (tmp_path / "e").symlink_to("d")
    assert locate(str(tmp_path / "e")).kind == "hf_config"


def test_pipes_and_devices_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LlamatoolError, match="found a named pipe"):
        locate(str(tmp_path / "pipe"))
    with pytest.raises(LlamatoolError, match="found a device"):
        locate("/dev/zero")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "config.json")
    with pytest.raises(LlamatoolError, match="found a named pipe"):
        locate(str(tmp_path / "folder"))


def test_a_pipe_put_there_after_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    regular = os.stat_result((stat.S_IFREG | 0o644, *([0] * 9)))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", lambda self: regular)
        with pytest.raises(LlamatoolError, match="found a named pipe"):
            files.open_regular(tmp_path / "pipe")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "config.json", CONFIG)

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # root may read everything
    with pytest.raises(LlamatoolError, match="no permission to read"):
        locate(str(path))
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(LlamatoolError, match="no permission to read"):
        locate(str(tmp_path))


@given(st.binary(max_size=200))
def test_any_content_is_understood_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = write(tmp_path_factory.mktemp("x") / "x", data)
    with contextlib.suppress(InputError):
        read_tensors(locate(str(path)))


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, llamatool.checkpoint.locate, llamatool.checkpoint.safetensors;"
        "print(*sorted(m for m in sys.modules if m.partition('.')[0] in"
        " {'zipfile', 'pickle', 'torch', 'numpy', 'gguf', 'huggingface_hub', 'rich'}"
        " or m in {'llamatool.config.catalog', 'llamatool.checkpoint.hub'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""
