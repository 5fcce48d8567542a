"""What ranks allocate is what is counted beforehand, to the byte; and what loading takes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from llamatool.config.catalog import entries
from llamatool.config.huggingface import parse_huggingface
from llamatool.config.layers import plan_layers, possible_splits
from llamatool.config.model import ModelConfig
from llamatool.model.decoder import Decoder
from llamatool.model.load import runnable
from llamatool.model.parallel import parallelize
from llamatool.sizing.ranks import rank_memory, rank_parameters
from llamatool.source import load_source
from tests.config.helpers import llama
from tests.model import vision_models
from tests.model.layouts import save_gguf, save_meta, save_meta_llama4
from tests.model.test_vision_load import meta_folder
from tests.model.tiny_models import BY_NAME, DENSE, MIXED, Tiny
from tests.parallel import memory_worker
from tests.parallel.conftest import Group

Job = dict[str, Any]
Found = dict[str, Any]

SIZES = (2, 4)
MESSAGE_BYTES = 256  # of what ranks tell each other while they load
# A vocabulary of 97 rows everywhere; 4 key/value heads in `gqa` and most others, 2 in Llama 4.
TEXT = [
    *("gqa", "mqa", "explicit-head-dim", "biases", "tied", "qwen2", "qwen3", "mistral-sliding"),
    *("scout", "maverick"),
]
# With as many tiles as there may be of 3.2 Vision, whose cache is counted with those.
IMAGES = {
    "mllama": {"grid": (2, 2), "side": vision_models.SIDE, "extra": 0},
    "llama4": {"grid": (1, 2), "side": vision_models.LLAMA4_VISION["image_size"], "extra": 1},
}
SEEING = ["mllama", "llama4", "three-tower-heads"]
LAYOUTS = [
    *("safetensors", "safetensors-llama4", "meta-1", "meta-2", "meta-4", "meta-llama4"),
    *("gguf", "gguf-q8"),
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Checkpoints and what the ranks shall do with them, by name."""
    folder = tmp_path_factory.mktemp("models")
    found: dict[str, Job] = {}

    def add(name: str, path: Path, dtype: str = "float32", **more: Any) -> None:
        job = {"name": name, "path": str(path), "dtype": dtype, "num_tokens": 60, **more}
        found[name] = job

    for name in TEXT:
        BY_NAME[name].build()[0].save_pretrained(folder / name)
        add(name, folder / name, batch_size=3)
    add("bfloat16", folder / "scout", "bfloat16")
    for kind, theirs in _seeing():
        theirs.save_pretrained(folder / kind)
        images = [IMAGES[kind if kind in IMAGES else "llama4"]] * 2
        add(f"{kind}-text", folder / kind, batch_size=2)
        add(kind, folder / kind, images=images)
        add(f"{kind}-float64", folder / kind, "float64", images=images)
    # Meta's files have the image token of the published tokenizer, which no tiny model has.
    more: dict[str, Any] = {"images": [IMAGES["llama4"]], "logits": False}
    add("llama4-meta-images", _seeing_meta(folder), **more)
    for name, path in _layouts(folder):
        add(name, path)
        add(f"{name}-converted", path, "bfloat16")
    return found


@pytest.fixture(scope="module", params=SIZES)
def ranks(
    request: pytest.FixtureRequest,
    jobs: dict[str, Job],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Found]]:
    """What each of 2, and of 4, gloo processes found out."""
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    file = folder / "jobs.json"
    file.write_text(json.dumps(list(jobs.values())), encoding="utf-8")
    module = "tests.parallel.memory_worker"
    group = Group(size, ["-m", module, str(file), str(folder / "out")], {})
    try:
        for rank, ended in group.start().wait().items():
            assert ended.code == 0, f"rank {rank}: {ended.err}"
    finally:
        group.kill()
    return [torch.load(folder / f"out.{rank}") for rank in range(size)]


def test_weights_and_cache_are_as_counted(
    jobs: dict[str, Job], ranks: list[dict[str, Found]]
) -> None:
    for name, job in jobs.items():
        config, _ = runnable(load_source(job["path"], with_tensors=True))
        images = job.get("images", [])
        counted = rank_memory(
            config,
            len(ranks),
            dtype=job["dtype"],
            kv_dtype=job["dtype"],
            num_tokens=job["num_tokens"],
            batch_size=job.get("batch_size", 1),
            num_images=len(images),
        )
        itemsize = getattr(torch, job["dtype"]).itemsize
        for rank, found in enumerate(ranks):
            parameters = rank_parameters(config, len(ranks), rank=rank, images=bool(images))
            assert found[name]["weight_bytes"] == itemsize * parameters, (name, rank)
            assert found[name]["kv_bytes"] == counted.kv_bytes, (name, rank)
        assert ranks[0][name]["weight_bytes"] == counted.weight_bytes, name
        assert max(found[name]["weight_bytes"] for found in ranks) == counted.weight_bytes


def test_images_on_ranks_are_those_of_one_process(
    jobs: dict[str, Job], ranks: list[dict[str, Found]]
) -> None:
    for kind in SEEING:
        one = {name: memory_worker.work(jobs[name], None) for name in (kind, f"{kind}-float64")}
        exact = one[f"{kind}-float64"]
        own_error = _distance(one[kind], exact, "logits")
        for found in ranks:
            # Sums in another order; the bound of fp32 where the model itself keeps it.
            assert _distance(found[kind], one[kind], "features") <= 1e-5, kind
            limit = 1e-5 if kind == "mllama" else max(1e-5, 2 * own_error)
            assert _distance(found[kind], exact, "logits") <= limit, kind
            assert _distance(found[f"{kind}-float64"], exact, "features") <= 1e-12, kind
            assert _distance(found[f"{kind}-float64"], exact, "logits") <= 1e-6, kind
            assert torch.equal(found[kind]["logits"], ranks[0][kind]["logits"])


def test_towers_of_metas_files_are_shared(
    jobs: dict[str, Job], ranks: list[dict[str, Found]]
) -> None:
    name = "llama4-meta-images"
    one = memory_worker.work(jobs[name], None)
    for found in ranks:
        assert _distance(found[name], one, "features") <= 1e-5
        assert found[name]["heads"] == {4 // len(ranks)}


def test_a_tower_is_shared_where_its_heads_divide(ranks: list[dict[str, Found]]) -> None:
    for found in ranks:
        assert found["mllama"]["heads"] == found["llama4"]["heads"] == {4 // len(ranks)}
        assert found["three-tower-heads"]["heads"] == {3}


def test_loading_takes_the_part_and_one_tensor(
    jobs: dict[str, Job], ranks: list[dict[str, Found]]
) -> None:
    """Host memory beside mapped files, which cost none: while loading, and afterwards."""
    for layout in LAYOUTS:
        for name in (layout, f"{layout}-converted"):
            for found in ranks:
                loading, weight_bytes = found[name]["loading"], found[name]["weight_bytes"]
                mapped = loading["mapped"]
                itemsize = getattr(torch, jobs[name]["dtype"]).itemsize
                mapped_bytes = itemsize * sum(count for count, _, _ in mapped.values())
                assert loading["copied_bytes"] == weight_bytes - mapped_bytes, name
                # Blocks are unpacked in float32, whatever follows.
                largest = max(found[name]["matrices"].values()) * max(itemsize, 4)
                most = loading["copied_bytes"] + largest + MESSAGE_BYTES
                assert loading["peak_bytes"] <= most, name
                assert (not mapped) == (name != layout), name


def test_rows_of_a_matrix_are_a_view_of_the_file(ranks: list[dict[str, Found]]) -> None:
    size = len(ranks)
    rows = {"self_attn.q_proj": 64, "self_attn.v_proj": 32, "mlp.up_proj": 128}
    tables = dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), 96)
    whole = {f"layers.2.{name}.weight": count for name, count in rows.items()} | tables
    for rank, found in enumerate(ranks):
        mapped = found["safetensors"]["loading"]["mapped"]
        for name, num_rows in whole.items():
            part = num_rows * 64 // size
            assert mapped[name] == (part, rank * part, 4 * num_rows * 64), name


def test_blocks_of_other_ranks_stay_packed(ranks: list[dict[str, Found]]) -> None:
    for found in ranks:
        own = sum(found["gguf-q8"]["matrices"].values())
        unpacked = found["gguf-q8"]["loading"]["num_unpacked"]
        if len(ranks) == 2:
            assert unpacked == own
        else:  # 16 of 64 columns are half a block of 32
            assert own < unpacked <= own + 3 * 64 * 16


PUBLISHED = [
    *("llama-3.1-8b", "llama-3.1-405b", "llama-3.2-1b", "llama-3.2-11b-vision-instruct"),
    *("llama-4-scout-17b-16e", "llama-4-maverick-17b-128e"),
]


@pytest.mark.parametrize("name", [*PUBLISHED, "heads-by-layer", "odd-biases"])
def test_published_models_have_the_parameters_of_the_count(name: str) -> None:
    """The first and the last rank of those that can share it, on the meta device: no weights."""
    config = _config(name)
    for size in {2, 3, 8, 16} & set(possible_splits(plan_layers(config))):
        for rank in (0, size - 1):
            with _fake_rank(rank, size):
                for images in {False, config.vision is not None}:
                    with torch.device("meta"):
                        model = Decoder(config, images=images)
                    parallelize(model, init_device_mesh("cpu", (size,)))
                    held = sum(parameter.numel() for parameter in model.parameters())
                    assert held == rank_parameters(config, size, rank=rank, images=images)


def _config(name: str) -> ModelConfig:
    if name == "heads-by-layer":
        values = llama(num_key_value_heads=[8, 2, 4, 1])
    elif name == "odd-biases":
        values = llama(vocab_size=1001, attention_bias=True, mlp_bias=True)
    else:
        return next(entry.config for entry in entries() if entry.id == name)
    return parse_huggingface(values, where="a test")


@contextmanager
def _fake_rank(rank: int, size: int) -> Iterator[None]:
    """A process group of which only one rank is there, and nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _seeing() -> Iterator[tuple[str, Any]]:
    yield "mllama", vision_models.build_mllama()[0]
    yield "llama4", vision_models.build_llama4()[0]
    uneven = {"hidden_size": 48, "intermediate_size": 192, "num_attention_heads": 3}
    with patch.dict(vision_models.LLAMA4_VISION, uneven):
        yield "three-tower-heads", vision_models.build_llama4()[0]


def _seeing_meta(folder: Path) -> Path:
    """A Llama 4 with its tower as two files of Meta's."""
    theirs, _ = vision_models.build_llama4(use_qk_norm=True, num_hidden_layers=4, vocab_size=96)
    theirs.save_pretrained(folder / "whole")
    return meta_folder("llama4", (theirs, folder / "whole"), folder / "llama4-meta-images", 2)


def _layouts(folder: Path) -> Iterator[tuple[str, Path]]:
    dense = {**DENSE, "vocab_size": 96, "intermediate_size": 128}
    theirs, _ = Tiny("", "Llama", dense).build()
    theirs.save_pretrained(folder / "two-files", max_shard_size="300KB")
    assert len(list((folder / "two-files").glob("*.safetensors"))) == 2
    yield "safetensors", folder / "two-files"
    for count in (1, 2, 4):
        path = folder / f"meta-{count}"
        yield f"meta-{count}", save_meta(theirs, path, count, by_columns=count == 2)
    yield "gguf", save_gguf(theirs, folder / "f32.gguf")
    yield "gguf-q8", save_gguf(theirs, folder / "q8.gguf", dtype="Q8_0")
    mixed = {**MIXED, "use_qk_norm": True, "vocab_size": 96}
    theirs, _ = Tiny("", "Llama4", mixed).build()
    theirs.save_pretrained(folder / "llama4-files", max_shard_size="800KB")
    yield "safetensors-llama4", folder / "llama4-files"
    yield "meta-llama4", save_meta_llama4(theirs, folder / "llama4-meta", 2)


def _distance(found: Found, expected: Found, what: str) -> float:
    pairs = zip(_tensors(found[what]), _tensors(expected[what]), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def _tensors(value: Any) -> list[torch.Tensor]:
    return value if isinstance(value, list) else [value]
