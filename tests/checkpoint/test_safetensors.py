import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from llamatool.checkpoint import safetensors
from llamatool.errors import LlamatoolError

from .builders import entry, message, safetensors_bytes, write


def folder_with_index(folder: Path) -> dict[str, torch.Tensor]:
    """Two shards and their index, written by the safetensors library."""
    tensors = {f"layer.{i}.weight": torch.randn(4, 3) for i in range(4)}
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[:1], names[1:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    content = {"metadata": {"total_size": 4 * 48}, "weight_map": weight_map}
    (folder / safetensors.INDEX_NAME).write_text(json.dumps(content))
    return tensors


def test_agrees_with_the_library(tmp_path: Path) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool)
    tensors = {str(d): torch.randn(3, 5).to(d) for d in dtypes}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    path = tmp_path / "renamed.bin"
    save_file(tensors, path, metadata={"format": "pt"})
    table = safetensors.read_file(path)
    assert table.tensors.keys() == tensors.keys()
    assert table.metadata == {"format": "pt"}
    raw = path.read_bytes()
    for name, tensor in tensors.items():
        info = table.tensors[name]
        assert info.shape == tuple(tensor.shape)
        assert f"torch.{info.dtype.name}" == str(tensor.dtype)
        stored = raw[info.offset : info.offset + info.num_bytes]
        assert stored == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_index_joins_the_shards(tmp_path: Path) -> None:
    tensors = folder_with_index(tmp_path)
    table = safetensors.read_folder(tmp_path)
    assert table is not None
    assert table.tensors.keys() == tensors.keys()
    assert [path.name for path in table.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert table.num_bytes == 4 * 48


def test_bin_shards_are_read_through_their_index(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00001.bin")
    content = {"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    (tmp_path / safetensors.BIN_INDEX_NAME).write_text(json.dumps(content))
    table = safetensors.read_folder(tmp_path)
    assert table is not None
    assert table.tensors["a"].shape == (2,)


def test_folder_without_weights(tmp_path: Path) -> None:
    assert safetensors.read_folder(tmp_path) is None


def test_several_files_without_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "two.safetensors")
    table = safetensors.read_folder(tmp_path)
    assert table is not None
    assert set(table.tensors) == {"a", "b"}
    save_file({"a": torch.ones(2)}, tmp_path / "three.safetensors")
    with pytest.raises(LlamatoolError, match=r"in `one\.safetensors` and in `three\.safe"):
        safetensors.read_folder(tmp_path)


def test_missing_number_without_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(LlamatoolError, match="shard 2 of 2 is missing"):
        safetensors.read_folder(tmp_path)


GOOD = {"a": entry("F32", [2], 0, 8)}

DAMAGED = {
    "length 2^60": ((2**60).to_bytes(8, "little") + b"{}", "claims 1,152,921,504,606,846,976"),
    "shorter than a length": (b"\x08\0\0", "found 3 bytes"),
    "cut data": (safetensors_bytes(GOOD, b"\0" * 7), "describes .* bytes, the file has"),
    "cut header": (safetensors_bytes(GOOD, b"")[:20], "claims"),
    "trailing bytes": (safetensors_bytes(GOOD, b"\0" * 9), "1 bytes follow the last tensor"),
    "no object": (safetensors_bytes("[1]", b""), "list instead of an object"),
    "not UTF-8": ((4).to_bytes(8, "little") + b'{"\xff}', "not UTF-8"),
    "duplicate names": (
        safetensors_bytes('{"a":%s,"a":%s}' % ((json.dumps(GOOD["a"]),) * 2), b"\0" * 8),
        "`a` occurs twice",
    ),
    "unknown dtype": (
        safetensors_bytes({"a": entry("Q8", [2], 0, 8)}, b"\0" * 8),
        "unknown dtype `Q8`",
    ),
    "overlap": (
        safetensors_bytes(
            {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, b"\0" * 12
        ),
        "`b` overlaps the one before it",
    ),
    "hole": (
        safetensors_bytes(
            {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, b"\0" * 12
        ),
        "`b` leaves a hole",
    ),
    "size and shape": (
        safetensors_bytes({"a": entry("F32", [3], 0, 8)}, b"\0" * 8),
        r"shape \[3\] of float32 takes 12 bytes, `data_offsets` gives it 8",
    ),
    "negative size": (safetensors_bytes({"a": entry("F32", [-1], 0, 8)}, b""), "`shape` is"),
    "true as size": (safetensors_bytes({"a": entry("F32", [True], 0, 4)}, b""), "`shape` is"),
    "overflow": (
        safetensors_bytes({"a": entry("F32", [2**40, 2**40], 0, 8)}, b"\0" * 8),
        "too many elements",
    ),
    "backward range": (safetensors_bytes({"a": entry("F32", [2], 8, 0)}, b""), "`data_offsets`"),
    "missing key": (safetensors_bytes({"a": {"dtype": "F32"}}, b""), "expected `dtype`"),
    "metadata": (safetensors_bytes({"__metadata__": {"a": 1}}, b""), "no object of strings"),
    "too many values": (safetensors_bytes('{"a":[%s]}' % ("0," * 2_000_000), b""), "too large"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named(tmp_path: Path, case: str) -> None:
    data, expected = DAMAGED[case]
    with pytest.raises(LlamatoolError, match=expected) as error:
        safetensors.read_file(write(tmp_path / "x.safetensors", data))
    assert error.value.exit_code == 3
    assert "x.safetensors" in message(error)


@given(st.data())
def test_any_damage_gives_a_table_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    header = {"a": entry("F32", [2], 0, 8), "b": entry("BF16", [2, 2], 8, 16)}
    raw = bytearray(safetensors_bytes(header, b"\0" * 16))
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    path = write(tmp_path_factory.mktemp("x") / "x.safetensors", bytes(raw[: cut or None]))
    try:
        table = safetensors.read_file(path)
    except LlamatoolError:
        return
    assert all(info.offset + info.num_bytes <= len(raw) for info in table.tensors.values())


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\0.bin", "x.pth", 3]
)
def test_index_may_not_lead_out(tmp_path: Path, name: object) -> None:
    path = tmp_path / safetensors.INDEX_NAME
    path.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(LlamatoolError, match="no plain name"):
        safetensors.read_index(path)


def test_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder, outside = tmp_path / "model", tmp_path / "secret.safetensors"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, outside)
    (folder / "model.safetensors").symlink_to(outside)
    content = {"weight_map": {"a": "model.safetensors"}}
    (folder / safetensors.INDEX_NAME).write_text(json.dumps(content))
    with pytest.raises(LlamatoolError, match="outside its folder"):
        safetensors.read_folder(folder)


def test_hub_cache_links_are_accepted(tmp_path: Path) -> None:
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, blobs / "5ba1")
    content = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (blobs / "1dex").write_text(json.dumps(content))
    (snapshot / safetensors.INDEX_NAME).symlink_to("../../blobs/1dex")
    (snapshot / "model-00001-of-00001.safetensors").symlink_to("../../blobs/5ba1")
    table = safetensors.read_folder(snapshot)
    assert table is not None
    assert table.tensors["a"].shape == (2,)


def test_missing_shard(tmp_path: Path) -> None:
    folder_with_index(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    index = safetensors.read_index(tmp_path / safetensors.INDEX_NAME)
    assert index.missing_files == ("model-00002-of-00002.safetensors",)
    with pytest.raises(LlamatoolError, match=r"00002\.safetensors`: no such file"):
        safetensors.read_indexed(index)


@pytest.mark.parametrize(("drop", "expected"), [(True, "does not put there"), (False, "lacks")])
def test_index_and_shards_must_agree(tmp_path: Path, drop: bool, expected: str) -> None:
    folder_with_index(tmp_path)
    path = tmp_path / safetensors.INDEX_NAME
    content = json.loads(path.read_text())
    if drop:
        del content["weight_map"]["layer.2.weight"]
    else:
        content["weight_map"]["layer.9.weight"] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(content))
    with pytest.raises(LlamatoolError, match=expected):
        safetensors.read_folder(tmp_path)


def test_cyclic_link(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.symlink_to("other.safetensors")
    (tmp_path / "other.safetensors").symlink_to("model.safetensors")
    with pytest.raises(LlamatoolError, match="links form a circle"):
        safetensors.read_file(path)


def test_pipe_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    with pytest.raises(LlamatoolError, match="found a named pipe"):
        safetensors.read_file(path)
