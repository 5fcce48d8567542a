"""Distributions equal to those of transformers' processors, in the same order."""

import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from llamatool.errors import UsageError  # noqa: E402
from llamatool.generate.sampling import (  # noqa: E402
    DEFAULTS,
    Sampling,
    choose,
    from_generation_config,
    keep_top_p,
    penalise,
    processed,
)

WAYS = [
    Sampling(1.0, 1.0),
    Sampling(0.6, 0.9),
    Sampling(2.5, 1.0),
    Sampling(1.0, 0.3),
    Sampling(1.0, 1.0, top_k=5),
    Sampling(1.0, 1.0, min_p=0.05),
    Sampling(1.0, 1.0, repetition_penalty=1.3),
    Sampling(0.7, 0.95, top_k=40, min_p=0.02, repetition_penalty=1.1),
    Sampling(1.3, 0.8, top_k=3, min_p=0.5, repetition_penalty=0.8),
    Sampling(0.05, 0.999, top_k=10_000),
]


def their_scores(logits, seen, sampling: Sampling):
    """The processors in the order in which `generate` of transformers puts them."""
    pytest.importorskip("transformers")
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            vocab_size=16,
        )
    )  # fmt: skip
    config = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p or None,
        repetition_penalty=sampling.repetition_penalty,
    )
    processors = model._get_logits_processor(config, input_ids_seq_length=seen.shape[1])
    return processors(seen, logits)


@pytest.mark.parametrize("sampling", WAYS, ids=str)
@pytest.mark.parametrize("vocab_size", [50, 32_000])
def test_distributions_are_those_of_transformers(sampling: Sampling, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for spread in (1.0, 4.0):
        logits = torch.randn(4, vocab_size, generator=generator) * spread
        seen = torch.randint(vocab_size, (4, 30), generator=generator)
        expected = their_scores(logits.clone(), seen, sampling).softmax(-1)
        ours = processed(logits, sampling, seen_BT=seen).softmax(-1)
        assert (ours - expected).abs().max() <= 1e-6
        assert torch.equal(ours == 0, expected == 0)


def test_bfloat16_logits_are_processed_in_fp32() -> None:
    logits = torch.randn(1, 1000).bfloat16()
    scores = processed(logits, Sampling(0.7, 0.9))
    assert scores.dtype == torch.float32
    assert torch.equal(scores, processed(logits.float(), Sampling(0.7, 0.9)))


def test_examples_of_the_docstrings() -> None:
    seen = torch.tensor([[0, 1, 0]])
    assert penalise(torch.tensor([[3.0, -3.0, 1.0]]), seen, 2.0).tolist() == [[1.5, -6.0, 1.0]]
    kept = keep_top_p(torch.tensor([[0.5, 0.3, 0.2]]).log(), 0.7)
    assert kept.isfinite().tolist() == [[True, True, False]]
    assert from_generation_config({}) == Sampling(0.6, 0.9)
    assert from_generation_config({"temperature": 1.0}) == Sampling(1.0, 0.9)
    assert from_generation_config({"do_sample": False}).is_greedy
    assert from_generation_config({"temperature": None, "top_k": "x"}) == DEFAULTS


def test_the_draw_follows_the_distribution() -> None:
    """200,000 draws of 6 tokens: chi-squared below its 0.9999 quantile of 25.7."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -30.0, 0.5])
    expected = torch.softmax(logits, -1)
    rows = logits.expand(200_000, -1)
    drawn = choose(rows, Sampling(1.0, 1.0), generator=torch.Generator().manual_seed(0))
    counts = drawn.bincount(minlength=6).double()
    wanted = expected.double() * 200_000
    likely = wanted > 1
    assert (((counts - wanted) ** 2 / wanted)[likely]).sum() < 25.7
    assert counts[4] == 0


def test_what_is_ruled_out_is_never_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 100, generator=generator)
    allowed = set(logits[0].topk(3).indices.tolist())
    sampling = Sampling(5.0, 1.0, top_k=3)
    drawn = {int(choose(logits, sampling, generator=generator)) for _ in range(300)}
    assert drawn == allowed


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert int(choose(logits, Sampling(0.0))) == 1
    assert int(choose(logits, Sampling(1.0, top_k=1))) == 1
    seen = torch.tensor([[1]])
    assert int(choose(logits, Sampling(0.0, repetition_penalty=1.5), seen_BT=seen)) == 2


def test_one_seed_one_answer() -> None:
    logits = torch.randn(1, 32_000)

    def drawn(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [int(choose(logits, Sampling(1.0, 1.0), generator=generator)) for _ in range(8)]

    assert drawn(1) == drawn(1) != drawn(2)
    random.seed(0)
    torch.manual_seed(0)  # chance elsewhere has no influence
    assert drawn(1) == drawn(1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1),
     ("top_k", -1), ("min_p", 2.0), ("repetition_penalty", 0.0)],
)  # fmt: skip
def test_values_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is"):
        replace(DEFAULTS, **{name: value}).checked()
