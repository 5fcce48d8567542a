"""SmolLM2-135M-Instruct from a GGUF file, against transformers' own reading of that file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llamatool.model.decoder import Decoder
from llamatool.model.load import load_model
from tests.checkpoint.builders import smollm2

DATA = Path(__file__).parent.parent / "data"
# Token ids by the model's own tokenizer, so that this test needs no other one.
# fmt: off
PROMPTS: dict[str, list[int]] = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Once upon a time, in a village by the sea, there lived an old woman who": [
        6403, 1980, 253, 655, 28, 281, 253, 6560, 411, 260, 3426, 28, 665, 4161, 354, 1573,
        4166, 617],
    "中国的首都是北京": [
        28589, 23022, 138, 11567, 180, 116, 240, 180, 38466, 27830, 30158, 241, 16736, 122],
    "def fibonacci(n):\n    if n < 2:\n        return": [
        1604, 3987, 46477, 24, 94, 727, 472, 585, 304, 2067, 216, 34, 42, 448, 1003],
    "SELECT name, COUNT(*) FROM users\nGROUP BY": [
        23428, 1462, 28, 3214, 23330, 12905, 25, 18451, 3629, 198, 31596, 11957, 18172],
}
# fmt: on


@pytest.fixture(scope="module")
def models() -> tuple[Any, Decoder]:
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = smollm2()
    fields = json.loads((DATA / "configs" / "smollm2-135m-instruct.json").read_text())
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=theirs)["tensors"]
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    theirs.tie_weights()
    return theirs, load_model(path, device="cpu", dtype="float32")


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_are_those_of_transformers(name: str, models: tuple[Any, Decoder]) -> None:
    theirs, ours = models
    ids = torch.tensor([PROMPTS[name]])
    with torch.no_grad():
        expected = theirs(ids).logits
    logits = ours(ids, logits_to_keep=None)
    assert (logits - expected).abs().max() <= 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_it_knows_the_capital_of_france(models: tuple[Any, Decoder]) -> None:
    _, ours = models
    ids = torch.tensor([PROMPTS["The capital of France is"]])
    assert int(ours(ids).argmax()) == 7042


def test_as_published(models: tuple[Any, Decoder]) -> None:
    _, ours = models
    assert sum(p.numel() for p in ours.parameters()) == 134_515_008
    assert ours.lm_head is None
    assert ours.config.rope.theta == 100000.0
    assert (ours.plan[0].num_attention_heads, ours.plan[0].num_key_value_heads) == (9, 3)


def test_greedy_continuation_is_the_same(models: tuple[Any, Decoder]) -> None:
    """16 tokens, ours from the cache and theirs from scratch each time."""
    theirs, ours = models
    their_ids = torch.tensor([PROMPTS["The capital of France is"]])
    cache = ours.new_cache(64)
    step = their_ids
    for _ in range(16):
        token = ours(step, cache=cache).argmax(-1)
        with torch.no_grad():
            expected = theirs(their_ids, logits_to_keep=1).logits.argmax(-1)
        assert torch.equal(token, expected)
        their_ids, step = torch.cat((their_ids, token), dim=1), token
