"""Two checkpoints compared by what they compute, each in the convention of its own layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llamatool.errors import CheckpointError, InputError
from llamatool.model.load import as_stored, load_model, runnable
from llamatool.model.verify import compare_logits
from llamatool.source import load_source
from tests.model.layouts import save_gguf, save_huggingface, save_meta, save_meta_llama4
from tests.model.test_load import LLAMA_2_GQA, LLAMA_3, MAVERICK, SCOUT, drop, ids
from tests.model.test_memory import Ledger
from tests.model.tiny_models import BY_NAME, Tiny


@pytest.mark.parametrize(("num_ranks", "kind"), [(1, LLAMA_3), (2, LLAMA_3), (4, LLAMA_2_GQA)])
def test_meta_against_huggingface(num_ranks: int, kind: Tiny, tmp_path: Path) -> None:
    theirs, _ = kind.build()
    by_columns = kind is LLAMA_2_GQA
    meta = save_meta(theirs, tmp_path / "meta", num_ranks, by_columns=by_columns)
    folder = save_huggingface(theirs, tmp_path / "hf", "40KB")
    found = compare_logits(meta, folder)
    assert found.same
    assert found.max_difference <= 1e-5 * found.largest_logit
    assert 0 <= found.mean_kl < 1e-11
    assert found.num_same_argmax == found.num_tokens == 96
    assert found.num_layers == 3


@pytest.mark.parametrize("kind", [SCOUT, MAVERICK], ids=["scout", "maverick"])
def test_llama_4(kind: Tiny, tmp_path: Path) -> None:
    theirs, _ = kind.build()
    meta = save_meta_llama4(theirs, tmp_path / "meta", 2)
    found = compare_logits(meta, save_huggingface(theirs, tmp_path / "hf"))
    assert found.same
    assert found.max_difference == 0.0  # the rows of q and k lie alike in both layouts


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_against_huggingface(tied: bool, tmp_path: Path) -> None:
    theirs, _ = Tiny("", "Llama", {**LLAMA_3.fields, "tie_word_embeddings": tied}).build()
    gguf = save_gguf(theirs, tmp_path / "model.gguf")
    assert compare_logits(gguf, save_huggingface(theirs, tmp_path / "hf")).same


def test_a_forgotten_permutation_is_noticed(tmp_path: Path) -> None:
    """Rows of q and k left as Meta has them: every shape fits, and the logits do not."""
    theirs, _ = LLAMA_3.build()
    meta = save_meta(theirs, tmp_path / "meta", 1, by_columns=False)
    folder = save_huggingface(theirs, tmp_path / "hf")
    stored = torch.load(meta / "consolidated.00.pth")
    changes = {
        f"model.layers.{i}.self_attn.k_proj.weight": stored[f"layers.{i}.attention.wk.weight"]
        for i in range(3)
    }
    drop(folder, **changes)
    found = compare_logits(meta, folder)
    assert not found.same
    assert found.mean_kl > 1e-6


def test_permuting_k_by_the_query_heads_is_noticed(tmp_path: Path) -> None:
    """ggml-org/llama.cpp#3364, huggingface/transformers#31788: wk has fewer heads than wq."""
    theirs, _ = LLAMA_3.build()
    folder = save_huggingface(theirs, tmp_path / "hf")
    meta = save_meta(theirs, tmp_path / "meta", 1, by_columns=False)
    stored = torch.load(meta / "consolidated.00.pth")
    wrong = {}
    for i in range(3):
        weight = stored[f"layers.{i}.attention.wk.weight"]
        by_queries = weight.view(8, 2, 2, 64).transpose(1, 2).reshape(32, 64)
        wrong[f"model.layers.{i}.self_attn.k_proj.weight"] = by_queries.contiguous()
    drop(folder, **wrong)
    assert not compare_logits(meta, folder).same


def test_running_as_stored_equals_running_permuted(tmp_path: Path) -> None:
    """The two conventions on Meta's own files."""
    from llamatool.model.decoder import Decoder
    from llamatool.model.weights import Weights

    theirs, _ = LLAMA_3.build()
    meta = save_meta(theirs, tmp_path, 2, by_columns=False)
    config, tables = runnable(load_source(str(meta), with_tensors=True))
    with torch.device("meta"):
        raw = Decoder(as_stored(config))
    assert raw.config.rope.interleaved
    weights = Weights(config, tables, where="a test", as_stored=True)
    weights.fill(raw, "", torch.float32, torch.device("cpu"))
    permuted = load_model(meta, device="cpu")
    one, other = raw.layers["0"].self_attn.k_proj, permuted.layers["0"].self_attn.k_proj
    assert not torch.equal(one.weight, other.weight)
    difference = raw(ids(), logits_to_keep=None) - permuted(ids(), logits_to_keep=None)
    assert difference.abs().max() <= 1e-5


def test_one_layer_of_each_is_in_memory(tmp_path: Path) -> None:
    fields = {**LLAMA_3.fields, "num_hidden_layers": 12}
    theirs, _ = Tiny("", "Llama", fields).build(dtype=torch.bfloat16)
    folder = save_huggingface(theirs, tmp_path)
    layer = 4 * sum(p.numel() for p in theirs.model.layers[0].parameters())
    tables = 4 * 96 * 64 * 2
    with Ledger() as ledger:
        compare_logits(folder, folder, num_tokens=65)
    activations = 4 * 65 * (8 * 64 + 4 * 96)
    assert ledger.peak_bytes <= 1.5 * layer + 2 * tables + activations  # 12 layers would be 8 x


def test_on_the_command_line(run: Callable[..., Any], tmp_path: Path) -> None:
    theirs, _ = LLAMA_3.build()
    meta = save_meta(theirs, tmp_path / "meta", 2, by_columns=False)
    folder = save_huggingface(theirs, tmp_path / "hf")
    done = run("verify", str(meta), str(folder), "--logits")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("the same logits\n")
    assert "96, through 3 layers in float32" in done.stdout
    drop(folder, **{"lm_head.weight": 1.01 * theirs.state_dict()["lm_head.weight"]})
    done = run("verify", str(meta), str(folder), "--logits", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert next(iter(found)) == "schema"
    assert found["same"] is False
    assert found["max_difference"] > found["tolerance"] * found["largest_logit"]
    assert found["tokens"] == 96


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    theirs, _ = LLAMA_3.build()
    one = save_huggingface(theirs, tmp_path / "one")
    theirs, _ = Tiny("", "Llama", {**LLAMA_3.fields, "num_hidden_layers": 2}).build()
    other = save_huggingface(theirs, tmp_path / "other")
    with pytest.raises(InputError, match="`num_hidden_layers` is 3 in the first and 2 in"):
        compare_logits(one, other)
    drop(one, "model.norm.weight")
    with pytest.raises(CheckpointError, match="1 missing"):
        compare_logits(one, other)


def test_a_difference_gives_its_size(tmp_path: Path) -> None:
    theirs, _ = BY_NAME["gqa"].build()
    one = save_huggingface(theirs, tmp_path / "one")
    theirs.lm_head.weight.data[5] += 0.5
    other = save_huggingface(theirs, tmp_path / "other")
    found = compare_logits(one, other)
    assert not found.same
    assert found.max_difference > 0.5
    assert found.mean_kl > 1e-3
    assert compare_logits(one, one).mean_kl == 0.0
