import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamatool.checkpoint import pth
from llamatool.checkpoint.tensors import TensorTable
from llamatool.errors import LlamatoolError

from .builders import torch_zip, write


def stored(table: TensorTable, name: str) -> torch.Tensor:
    """The tensor that the table's place, shape and stride describe."""
    info = table.tensors[name]
    raw = bytearray(info.file.read_bytes()[info.offset :])
    dtype: torch.dtype = getattr(torch, info.dtype.name)
    flat = torch.frombuffer(raw, dtype=dtype, count=len(raw) // dtype.itemsize)
    assert info.stride is not None
    return flat.as_strided(info.shape, info.stride)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_agrees_with_torch(tmp_path: Path, legacy: bool) -> None:
    base = torch.randn(6, 8)
    flat = torch.randn(64).bfloat16()
    value = OrderedDict(
        plain=base,
        transposed=base.t(),
        row=base[3],
        view=flat[8:40].view(4, 8),
        half=torch.randn(3).half(),
        empty=torch.zeros(0, 5),
        scalar=torch.tensor(2.0),
        parameter=torch.nn.Parameter(torch.randn(2, 2)),
        extra=io.BytesIO(b"\x00\xff training state"),
    )
    path = tmp_path / "anything"
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    table = pth.read_file(path)
    assert table.other == {"extra": "io.BytesIO"}
    tensors = {name: t for name, t in value.items() if name != "extra"}
    assert table.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if tensor.numel():
            assert torch.equal(stored(table, name), tensor), name
        assert table.tensors[name].shape == tuple(tensor.shape)
    assert not table.tensors["transposed"].is_contiguous
    assert table.tensors["view"].is_contiguous


def test_state_dict_with_metadata(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "x.bin")
    assert set(pth.read_file(tmp_path / "x.bin").tensors) == {"weight", "bias"}


class Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/llamatool-attack",)


def tensor_pickle(
    *,
    storage: str = "FloatStorage",
    key: str = "0",
    numel: int = 4,
    offset: int = 0,
    shape: tuple[int, ...] = (4,),
    stride: tuple[int, ...] = (1,),
) -> bytes:
    """{'a': tensor} as torch.save writes it, with sizes of our choice."""

    def number(value: int) -> bytes:
        raw = value.to_bytes(9, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    place = b"(" + text("storage") + b"ctorch\n" + storage.encode() + b"\n"
    place += text(key) + text("cpu") + number(numel) + b"tQ"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + place + number(offset)
    call += numbers(shape) + numbers(stride) + b"\x89ccollections\nOrderedDict\n)RtR"
    return b"\x80\x02}" + text("a") + call + b"s."


def test_the_pickle_builder_is_right(tmp_path: Path) -> None:
    data = torch_zip(tensor_pickle(), {"data/0": struct.pack("<4f", 1, 2, 3, 4)})
    path = write(tmp_path / "x.pth", data)
    assert stored(pth.read_file(path), "a").tolist() == [1, 2, 3, 4]


HOSTILE = {
    "code": (torch_zip(pickle.dumps({"a": Attack()}, 2), {}), r"names `posix\.system`"),
    "code, new protocol": (torch_zip(pickle.dumps({"a": Attack()}, 4), {}), "names `posix.system"),
    "builtin": (torch_zip(b"\x80\x02c__builtin__\neval\nX\1\0\0\01\x85R.", {}), "eval"),
    "attribute of torch": (torch_zip(b"\x80\x02ctorch\nload\n.", {}), r"names `torch\.load`"),
    "items on a list": (torch_zip(b"\x80\x02]K\1K\2s.", {}), "no dictionary"),
    "nested key": (torch_zip(b"\x80\x02})" + b"\x85" * 90000 + b"Ns.", {}), "no plain value"),
    "deep nesting": (
        torch_zip(b"\x80\x02" + b"(" * 90000 + b"t" * 90000 + b".", {}),
        "found tuple",
    ),
    "huge memo": (torch_zip(b"\x80\x02}r\xff\xff\xff\xff.", {}), "no tensors"),
    "huge text": (torch_zip(b"\x80\x02X\xff\xff\xff\xff.", {}), "ends early"),
    "never stops": (torch_zip(b"\x80\x02" + b"N0" * 1_000_000, {}), "steps"),
    "empty stack": (torch_zip(b"\x80\x02s.", {}), "damaged"),
    "inst": (torch_zip(b"(ios\nsystem\n.", {}), "operation 'i'"),
    "extension": (torch_zip(b"\x80\x02\x82\x01.", {}), "operation"),
    "no pickle": (torch_zip(b"", {}), "ends early"),
    "lying storage": (torch_zip(tensor_pickle(), {"data/0": b"\0" * 12}), "record has 12"),
    "missing storage": (torch_zip(tensor_pickle(key="../1"), {}), "is missing"),
    "beyond the storage": (
        torch_zip(tensor_pickle(shape=(5,)), {"data/0": b"\0" * 16}),
        "leaves its storage of 4",
    ),
    "stride beyond the storage": (
        torch_zip(tensor_pickle(shape=(2,), stride=(4,)), {"data/0": b"\0" * 16}),
        "leaves its storage",
    ),
    "negative stride": (torch_zip(tensor_pickle(stride=(-1,)), {}), "something else than sizes"),
    "negative offset": (torch_zip(tensor_pickle(offset=-1), {}), "something else than sizes"),
    "overflow": (
        torch_zip(tensor_pickle(shape=(2**40, 2**40), stride=(0, 0)), {}),
        "of shape",
    ),
    "unknown storage": (torch_zip(tensor_pickle(storage="EvilStorage"), {}), "EvilStorage"),
    "big endian": (torch_zip(tensor_pickle(), {"byteorder": b"big"}), "big-endian"),
    "script": (torch_zip(b".", {"constants.pkl": b""}), "TorchScript"),
    "a list": (torch_zip(b"\x80\x02].", {}), "found list"),
    "plain pickle": (pickle.dumps({"a": 1}, 2), "not one of torch.save"),
    "other file": (b"hello", "neither a zip archive nor a pickle"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(tmp_path: Path, case: str) -> None:
    data, expected = HOSTILE[case]
    with pytest.raises(LlamatoolError, match=expected) as error:
        pth.read_file(write(tmp_path / "x.pth", data))
    assert error.value.exit_code == 3
    assert not Path("/tmp/llamatool-attack").exists()


def good_zip() -> bytes:
    return torch_zip(tensor_pickle(), {"data/0": b"\0" * 16, "version": b"3\n"})


def deflated() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", tensor_pickle(numel=2**26, shape=(2**26,)))
        archive.writestr("x/data/0", bytes(2**20))
    return buffer.getvalue()


def two_pickles() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data.pkl", b".")
        archive.writestr("b/data.pkl", b".")
    return buffer.getvalue()


def patched(old: bytes, new: bytes, *, last: bool = False) -> bytes:
    data = good_zip()
    at = data.rfind(old) if last else data.find(old)
    assert at >= 0
    return data[:at] + new + data[at + len(old) :]


def overlapping() -> bytes:
    """The directory sends `version` to the local header of `data/0`."""
    data = bytearray(good_zip())
    entries = [at for at in range(len(data) - 4) if data[at : at + 4] == b"PK\1\2"]
    data[entries[2] + 42 : entries[2] + 46] = data[entries[1] + 42 : entries[1] + 46]
    return bytes(data)


ZIPS = {
    "deflated": (deflated(), "is compressed"),
    "cut": (good_zip()[:-30], "no end record"),
    "cut in the middle": (good_zip()[:120], "no end record"),
    "bytes behind": (good_zip() + b"x", "bytes follow the end record"),
    "two pickles": (two_pickles(), "found 2"),
    "names disagree": (patched(b"archive/data/0", b"archive/data/1"), "disagree"),
    "encrypted": (patched(b"PK\1\2\x14\x03\x14\0\0\0", b"PK\1\2\x14\x03\x14\0\1\0"), "encrypted"),
    "overlapping": (overlapping(), "overlaps|disagree"),
    "doubled name": (
        torch_zip(b".", {"data/0": b"", "data/1": b""}).replace(b"data/1", b"data/0"),
        "occurs twice",
    ),
    "an image": (b"PK\3\4" + b"\0" * 100, "no end record"),
}


@pytest.mark.parametrize("case", ZIPS)
def test_zip_is_read_strictly(tmp_path: Path, case: str) -> None:
    data, expected = ZIPS[case]
    with pytest.raises(LlamatoolError, match=expected):
        pth.read_file(write(tmp_path / "x.pth", data))


@pytest.mark.parametrize("kind", ["zip", "legacy"])
@given(data=st.data())
def test_any_damage_gives_a_table_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3)}, buffer, _use_new_zipfile_serialization=kind == "zip")
    raw = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(raw), len(raw) - 1, len(raw) // 2]))
    path = write(tmp_path_factory.mktemp("x") / "x.pth", bytes(raw[:cut]))
    try:
        table = pth.read_file(path)
    except LlamatoolError:
        return
    assert all(t.offset + t.num_bytes <= cut for t in table.tensors.values())


def test_legacy_with_a_false_count(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    raw = path.read_bytes()
    write(path, raw[:-20] + (2**40).to_bytes(8, "little") + raw[-12:])
    with pytest.raises(LlamatoolError, match="has 1,099,511,627,776 elements"):
        pth.read_file(path)
    write(path, raw[:-1])
    with pytest.raises(LlamatoolError, match="ends 1 bytes early"):
        pth.read_file(path)


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def test_shards_are_sorted_by_number(tmp_path: Path) -> None:
    names = [f"consolidated.{rank}.pth" for rank in range(12)]
    touch(tmp_path, *reversed(names), "optimizer.pth", "consolidated.pth.tmp", "params.json")
    assert [path.name for path in pth.shard_paths(tmp_path)] == names


def test_single_file_without_number(tmp_path: Path) -> None:
    touch(tmp_path, "consolidated.pth")
    assert [path.name for path in pth.shard_paths(tmp_path)] == ["consolidated.pth"]


def test_no_shards(tmp_path: Path) -> None:
    touch(tmp_path, "model.pth")
    assert pth.shard_paths(tmp_path) == ()


def test_missing_shard(tmp_path: Path) -> None:
    touch(tmp_path, "consolidated.00.pth", "consolidated.02.pth")
    with pytest.raises(LlamatoolError, match="shard 1 is missing"):
        pth.shard_paths(tmp_path)


def test_two_spellings_of_a_rank(tmp_path: Path) -> None:
    touch(tmp_path, "consolidated.00.pth", "consolidated.0.pth")
    with pytest.raises(LlamatoolError, match=r"consolidated\.0\.pth` and `consolidated\.00\.pth"):
        pth.shard_paths(tmp_path)


def test_side_files(tmp_path: Path) -> None:
    touch(tmp_path, "fp8_scales_0.pt", "fp8_scales_1.pt", "notes.pt")
    assert [path.name for path in pth.side_files(tmp_path)] == [
        "fp8_scales_0.pt",
        "fp8_scales_1.pt",
    ]
