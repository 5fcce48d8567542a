"""Two and four ranks compute what one process computes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.layouts import save_gguf, save_meta, save_meta_llama4
from tests.model.tiny_models import BY_NAME, DENSE, MIXED, Tiny
from tests.parallel import worker
from tests.parallel.conftest import run_jobs

# K = 4 unless said: more key/value heads than ranks, as many, and fewer.
KINDS = [
    BY_NAME["gqa"],
    BY_NAME["mha"],
    BY_NAME["mqa"],
    Tiny("two-kv-heads", "Llama", {**DENSE, "num_key_value_heads": 2}),
    BY_NAME["explicit-head-dim"],
    BY_NAME["biases"],
    BY_NAME["tied"],
    BY_NAME["llama-3.2-like"],
    BY_NAME["mistral-sliding"],
    BY_NAME["qwen2"],
    BY_NAME["qwen3"],
    BY_NAME["scout"],
    BY_NAME["maverick"],
    BY_NAME["two-experts-per-token"],
]
FORMATS = ["meta-1", "meta-2", "meta-4", "meta-llama4-2", "gguf", "vision-text"]
NAMES = [kind.name for kind in KINDS] + FORMATS


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A checkpoint and a prompt for every name."""
    folder = tmp_path_factory.mktemp("models")
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, path: Path, ids: torch.Tensor, **more: Any) -> None:
        found[name] = {"name": name, "path": str(path), "ids": ids.tolist(), **more}

    for kind in KINDS:
        theirs, _ = kind.build()
        # Two files, so that a rank's part of a matrix may be in either.
        theirs.save_pretrained(folder / kind.name, max_shard_size="200KB")
        add(kind.name, folder / kind.name, kind.ids())
    gqa = BY_NAME["gqa"]
    theirs, _ = Tiny("", "Llama", {**DENSE, "vocab_size": 96}).build()  # Meta's shares are even
    for count in (1, 2, 4):
        path = save_meta(theirs, folder / f"meta-{count}", count, by_columns=count == 2)
        add(f"meta-{count}", path, gqa.ids() % 96)
    add("gguf", save_gguf(theirs, folder / "model.gguf"), gqa.ids() % 96)
    add("int8", folder / "gqa", gqa.ids(), int8=True)
    theirs, _ = Tiny("", "Llama4", {**MIXED, "use_qk_norm": True, "vocab_size": 96}).build()
    path = save_meta_llama4(theirs, folder / "llama4", 2)
    add("meta-llama4-2", path, BY_NAME["scout"].ids() % 96)
    add("vision-text", _vision_text(folder / "mllama"), gqa.ids() % 96)
    return found


def _vision_text(folder: Path) -> Path:
    """The text layers of a 3.2 Vision model, with cross-attention layers between them."""
    from tests.model.vision_models import build_mllama

    build_mllama()[0].save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[2, 4])
def results(
    request: pytest.FixtureRequest, jobs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp(f"ranks-{request.param}")
    return run_jobs(request.param, list(jobs.values()), folder)


@pytest.fixture(scope="module")
def alone(jobs: dict[str, Any]) -> dict[str, Any]:
    return {name: worker.work(job, None) for name, job in jobs.items()}


@pytest.mark.parametrize("name", NAMES)
def test_ranks_compute_what_one_process_does(
    name: str, results: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    one = alone[name]
    for rank in (result[name] for result in results):
        torch.testing.assert_close(rank["logits"], one["logits"], rtol=0, atol=1e-5)
        for way in ("plain", "fused"):
            torch.testing.assert_close(rank[way][0], one[way][0], rtol=0, atol=1e-5)
            assert torch.equal(rank[way][1], one[way][1])


def test_int8_on_ranks_is_as_close_as_on_one(
    results: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    """Not equal: a row that is cut has a scale for each of its parts, which fit better."""
    exact = alone["gqa"]["logits"]

    def distance(logits: torch.Tensor) -> float:
        return float((logits - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())

    for rank in (result["int8"] for result in results):
        assert 0 < distance(rank["logits"]) < 1.2 * distance(alone["int8"]["logits"])


@pytest.mark.parametrize("name", [*NAMES, "int8"])
def test_all_ranks_see_the_same_bits(name: str, results: list[dict[str, Any]]) -> None:
    """Each chooses tokens and experts by itself: a difference would lead them apart."""
    first = results[0][name]
    for rank in (result[name] for result in results[1:]):
        assert torch.equal(rank["logits"], first["logits"])
        for way in ("plain", "fused"):
            assert torch.equal(rank[way][0], first[way][0])
