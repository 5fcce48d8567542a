"""Interruptions, full disks, wrong results, hostile sources: nothing half done, nothing hidden."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from llamatool import conversion
from llamatool.checkpoint import convert as engine
from llamatool.checkpoint import folder, journal, rawio
from llamatool.conversion import ConvertOptions
from llamatool.errors import LlamatoolError, ResourceError, UsageError

from .models import convert, rewrite, save_llama, tensors

PARTIAL = journal.FOLDER


def digests(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    save_llama(tmp_path / "hf")
    return tmp_path / "hf"


def prepared(source: Path, **options: Any) -> tuple[conversion.Conversion, ConvertOptions]:
    chosen = ConvertOptions(**({"with_tokenizer": False} | options))
    return conversion.prepare(conversion.load_weights(str(source)), chosen), chosen


@pytest.mark.parametrize("to", ["hf", "meta"])
def test_output_is_the_same_for_any_threads_and_chunks(
    tmp_path: Path, source: Path, to: str
) -> None:
    found = []
    for number, (threads, memory) in enumerate([(1, 1 << 20), (4, 1 << 28), (3, 1 << 22)]):
        out = tmp_path / f"out{number}"
        options = {"num_threads": threads, "max_memory_bytes": memory}
        convert(source, out, to=to, num_shards=4 if to == "meta" else None, **options)
        found.append(digests(out))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("to", ["hf", "meta"])
def test_resuming_after_an_interruption(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    shards = 4 if to == "meta" else None
    convert(source, tmp_path / "expected", to=to, num_shards=shards)
    monkeypatch.setattr(engine, "SYNC_BYTES", 1)
    options = {"to": to, "num_shards": shards, "max_memory_bytes": 1 << 20, "num_threads": 1}
    made, chosen = prepared(source, **options)
    for stop_at in (1, 100_000, 300_000):
        resume = stop_at > 1

        def interrupt(step: str, done: int, *_: object, limit: int = stop_at) -> None:
            if done >= limit:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            conversion.run(
                made,
                tmp_path / "out",
                ConvertOptions(**(chosen_values(chosen) | {"resume": resume})),
                progress=interrupt,
            )
        assert [path.name for path in (tmp_path / "out").iterdir()] == [PARTIAL]
    with pytest.raises(UsageError, match="unfinished conversion lies there"):
        conversion.run(made, tmp_path / "out", chosen)
    convert(source, tmp_path / "out", **(options | {"resume": True}))
    monkeypatch.undo()
    assert weights(tmp_path / "out") == weights(tmp_path / "expected")
    assert not (tmp_path / "out" / PARTIAL).exists()


def chosen_values(options: ConvertOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


def weights(path: Path) -> dict[str, str]:
    found = digests(path)
    return {name: digest for name, digest in found.items() if name != "conversion.json"}


DRIVER = """
    import sys, time
    from pathlib import Path
    from llamatool import conversion
    from llamatool.checkpoint import convert as engine, rawio

    engine.SYNC_BYTES = 1
    into = rawio.Sources.into
    def slowly(*arguments):
        time.sleep(0.004)
        into(*arguments)
    rawio.Sources.into = slowly
    options = conversion.ConvertOptions(
        to="meta", num_shards=4, with_tokenizer=False, max_memory_bytes=1 << 20, resume=True
    )
    made = conversion.prepare(conversion.load_weights(sys.argv[1]), options)
    print("ready", flush=True)
    conversion.run(made, Path(sys.argv[2]), options)
"""


def test_killed_at_any_point(tmp_path: Path, source: Path) -> None:
    """SIGKILL again and again: never a folder that looks whole, at last the same bytes."""
    convert(source, tmp_path / "expected", to="meta", num_shards=4)
    out = tmp_path / "out"
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), str(source), str(out)]
    kills = 0
    for delay in (0.02, 0.1, 0.2, 0.3, 0.3, None):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        assert process.stdout is not None
        process.stdout.readline()
        if delay is not None:
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        code = process.wait()
        process.stdout.close()
        if code == -signal.SIGKILL:
            kills += 1
            assert not (out / "params.json").exists()
        else:
            assert code == 0
            break
    assert kills
    assert weights(out) == weights(tmp_path / "expected")


def test_killed_while_files_get_their_names(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "expected", to="hf", shard_bytes=100_000)
    replace = os.replace
    for stop_after in range(6):
        out = tmp_path / f"out{stop_after}"
        count = 0

        def failing(a: Any, b: Any, limit: int = stop_after) -> None:
            nonlocal count
            count += 1
            if count > limit:
                raise KeyboardInterrupt
            replace(a, b)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing)
            with pytest.raises(KeyboardInterrupt):
                convert(source, out, to="hf", shard_bytes=100_000)
        assert not (out / "config.json").exists()
        convert(source, out, to="hf", shard_bytes=100_000, resume=True)
        assert digests(out) == digests(tmp_path / "expected")


def test_a_changed_source_is_not_resumed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, chosen = prepared(source)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversion.run(made, tmp_path / "out", chosen, progress=interrupt)
    rewrite(source, tensors(source))
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(UsageError, match="was another one"):
        convert(source, tmp_path / "out", resume=True)


def test_a_second_run_is_kept_out(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out").mkdir()
    with journal.Journal(tmp_path / "out") as log:
        log.begin("x", resume=False)
        with pytest.raises(ResourceError, match="another conversion is writing there"):
            convert(source, tmp_path / "out", resume=True)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_full_disk(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    original = getattr(os, call)
    count = 0

    def full(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if call != "pwrite" or count > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(ResourceError, match="no space left") as error:
            convert(source, tmp_path / "out")
    assert error.value.exit_code == 4
    assert not (tmp_path / "out" / "params.json").exists()
    convert(source, tmp_path / "out", resume=True)


def test_space_is_checked_first(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 900, 100))
    with pytest.raises(ResourceError, match=r"needs .* 100 B free"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("mode", ["hash", "full"])
@pytest.mark.parametrize("fault", ["permutation", "columns", "flipped bit", "swapped rows"])
def test_verification_finds_wrong_results(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, fault: str
) -> None:
    """An engine that goes wrong in a plausible way is found out, and nothing gets its name."""
    convert(source, tmp_path / "meta", num_shards=4)
    if fault == "permutation":
        monkeypatch.setattr(engine, "reordered", lambda values, *_: values)
    elif fault == "columns":
        from llamatool.checkpoint import plan

        original = plan.overlay

        def turned(*arguments: Any) -> Any:
            for block in original(*arguments):
                if len(block.reads) > 1 and block.reads[0].num_columns < block.num_columns:
                    first, *others = (read.column for read in block.reads)
                    columns = (*others, first)
                    reads = tuple(
                        plan.Place(r.stored, r.row, r.num_rows, c, r.num_columns, r.first, r.pitch)
                        for r, c in zip(block.reads, columns, strict=True)
                    )
                    block = plan.replace(block, reads=reads)
                yield block

        monkeypatch.setattr(plan, "overlay", turned)
    else:
        write = rawio.Sink.write
        count = 0

        def wrong(self: Any, view: memoryview, offset: int) -> None:
            nonlocal count
            count += 1
            content = bytearray(view)
            if count == 7:
                if fault == "flipped bit":
                    content[len(content) // 2] ^= 1
                else:
                    half = len(content) // 2
                    content = content[half:] + content[:half]
            write(self, memoryview(bytes(content)), offset)

        monkeypatch.setattr(rawio.Sink, "write", wrong)
    made, chosen = prepared(tmp_path / "meta", verify=mode, num_threads=1)
    report = conversion.run(made, tmp_path / "out", chosen)
    assert report.written.problem is not None
    assert list((tmp_path / "out").iterdir()) == []


def test_record_of_the_conversion(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "meta", num_shards=2)
    record = json.loads((tmp_path / "meta" / "conversion.json").read_text())
    assert (record["from"], record["to"], record["verify"]) == ("huggingface", "meta", "hash")
    for file in record["files"]:
        path = tmp_path / "meta" / file["name"]
        assert path.stat().st_size == file["bytes"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]
    assert record["source_files"][0]["name"] == "model.safetensors"


def test_where_the_output_may_lie(tmp_path: Path, source: Path) -> None:
    for place in (source, source / "new", source / "a" / "b"):
        with pytest.raises(UsageError, match="inside the source"):
            convert(source, place)
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(UsageError, match="inside the source"):
        convert(source, tmp_path / "link" / "new")
    (tmp_path / "file").touch()
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / PARTIAL).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="symbolic link stands in the way"):
        convert(source, tmp_path / "trap", resume=True)
    with pytest.raises(UsageError, match="is to be a folder"):
        convert(source, tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        convert(source, tmp_path / "full")
    convert(source, tmp_path / "full", overwrite=True, num_shards=2)
    convert(source, tmp_path / "full", overwrite=True, num_shards=2)
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"


def test_new_weights_are_not_mixed_with_old_ones(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "out", num_shards=4)
    (tmp_path / "out" / "notes.txt").touch()
    convert(source, tmp_path / "out", num_shards=2, overwrite=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("consolidated.00.pth", "consolidated.01.pth"),
        *("conversion.json", "notes.txt", "params.json"),
    ]
    (tmp_path / "out" / "stray.safetensors").touch()
    with pytest.raises(UsageError, match=r"`stray\.safetensors` was not written by llamatool"):
        convert(source, tmp_path / "out", num_shards=4, overwrite=True)


def test_files_are_as_readable_as_others(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "out", to="hf")
    (tmp_path / "plain").touch()
    mode = (tmp_path / "plain").stat().st_mode
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {mode}


def test_hub_cache_as_source(tmp_path: Path, source: Path) -> None:
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    convert(snapshot, tmp_path / "out", num_shards=2)


class Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/llamatool-attack",)


def test_hostile_sources(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "meta", num_shards=1)
    path = tmp_path / "meta" / "consolidated.00.pth"
    content = torch.load(path, weights_only=True)
    torch.save(content | {"norm.weight": Attack()}, path)
    with pytest.raises(LlamatoolError, match=r"names `posix\.system`") as error:
        convert(tmp_path / "meta", tmp_path / "out")
    assert error.value.exit_code == 3
    assert not Path("/tmp/llamatool-attack").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("missing", "1 missing tensor: `model.norm.weight`"),
        ("extra", "1 tensor that this model does not have: `model.layers.7.mlp.up_proj.weight`"),
        ("shape", r"`model.norm.weight` has the shape \[64\], the configuration gives \[128\]"),
        ("adapter", r"`base_model.model.x.lora_A.weight` is an adapter \(LoRA\)"),
        ("gptq", "is a GPTQ or AWQ weight"),
        ("int8", "is stored as int8"),
    ],
)
def test_sources_that_do_not_fit(tmp_path: Path, source: Path, change: str, expected: str) -> None:
    content = tensors(source)
    match change:
        case "missing":
            del content["model.norm.weight"]
        case "extra":
            content["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
        case "shape":
            content["model.norm.weight"] = torch.zeros(64)
        case "adapter":
            content["base_model.model.x.lora_A.weight"] = torch.zeros(2, 2)
        case "gptq":
            content["model.layers.0.mlp.up_proj.qweight"] = torch.zeros(2, 2)
        case "int8":
            name = "model.layers.0.mlp.up_proj.weight"
            content[name] = content[name].to(torch.int8)
    rewrite(source, content)
    with pytest.raises(LlamatoolError, match=expected) as error:
        convert(source, tmp_path / "out")
    assert error.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_quantised_configurations_are_refused(tmp_path: Path, source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(LlamatoolError, match=r"the weights are quantised \(fp8\)"):
        convert(source, tmp_path / "out")


def test_checklist(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "meta", num_shards=1)
    path = tmp_path / "meta" / "consolidated.00.pth"
    digest = hashlib.md5(path.read_bytes()).hexdigest()
    lines = f"{digest}  {path.name}\r\n{'0' * 32}  absent.pth\r\nnonsense\r\n"
    (tmp_path / "meta" / "checklist.chk").write_text(lines)
    convert(tmp_path / "meta", tmp_path / "good", verify_input=True)
    (tmp_path / "meta" / "checklist.chk").write_text(lines.replace(digest, "0" * 32))
    with pytest.raises(LlamatoolError, match=r"not the one in checklist\.chk"):
        convert(tmp_path / "meta", tmp_path / "bad", verify_input=True)


def test_reading_back_goes_through_the_strict_readers(tmp_path: Path, source: Path) -> None:
    made, _ = prepared(source, num_shards=2)
    convert(source, tmp_path / "out", num_shards=2)
    found = folder.open_output(made.plan, tmp_path / "out")
    assert found.holdings.keys() == made.plan.resolved.holdings.keys()
