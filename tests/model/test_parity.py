"""The decoder gives the logits of transformers, kind by kind."""

from dataclasses import replace

import pytest
import torch

from tests.model.tiny_models import BY_NAME, DENSE, KINDS, MIXED, Tiny, same_weights, their_cache

TOLERANCE = 1e-5


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_logits_in_fp32(kind: Tiny) -> None:
    theirs, ours = kind.build()
    ids = kind.ids()
    with torch.no_grad():
        expected = theirs(ids).logits
    logits = ours(ids, logits_to_keep=None)
    assert logits.shape == expected.shape == (2, kind.num_tokens, 97)
    assert 0.5 < expected.abs().max() < 20  # 1e-5 would mean nothing on logits of another size
    assert (logits - expected).abs().max() <= TOLERANCE


# What the test above must notice: each of these changes one thing of the configuration.
CHANGES = [
    ("rope-linear", {"rope": {"factor": 4.1}}),
    ("rope-yarn", {"rope": {"beta_slow": 2.0}}),
    ("rope-yarn", {"rope": {"attention_factor": 1.0}}),
    ("rope-dynamic", {"rope": {"factor": 4.1}}),
    ("rope-longrope-long", {"rope": {"factor": 4.1}}),
    ("rope-llama3", {"rope": {"high_freq_factor": 3.5}}),
    ("gqa", {"rope": {"theta": 11000.0}}),
    ("gqa", {"rope": {"interleaved": True}}),
    ("eps", {"rms_norm_eps": 1e-5}),
    ("mistral-sliding", {"sliding_window": 9}),
    ("scout", {"attention_chunk_size": 9}),
    ("scout", {"attention_chunk_size": None}),
    ("scout", {"qk_norm": "none"}),
    ("scout", {"rope": {"interleaved": False}}),
    ("scout", {"no_rope_layers": ()}),
    ("scout", {"temperature": None}),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=lambda v: v if isinstance(v, str) else "")
def test_the_comparison_is_sensitive(name: str, change: dict) -> None:
    kind = BY_NAME[name]
    theirs, ours = kind.build()
    fields = dict(change)
    config = ours.config
    rope = replace(config.rope, **fields.pop("rope", {}))
    with torch.device("meta"):
        other = type(ours)(replace(config, rope=rope, **fields))
    other.load_state_dict(ours.state_dict(), assign=True)
    ids = kind.ids()
    with torch.no_grad():
        expected = theirs(ids).logits
    assert (other(ids, logits_to_keep=None) - expected).abs().max() > 50 * TOLERANCE


def test_chunk_null_is_full_attention() -> None:
    config = {**MIXED, "attention_chunk_size": 4096}
    theirs, _ = Tiny("", "Llama4", config).build()
    theirs.config.attention_chunk_size = None
    ours = same_weights(theirs)
    assert {spec.attention for spec in ours.plan} == {"full"}
    theirs.config.attention_chunk_size = 4096
    ids = BY_NAME["scout"].ids()
    with torch.no_grad():
        expected = theirs(ids).logits
    assert (ours(ids, logits_to_keep=None) - expected).abs().max() <= TOLERANCE


DECODING = [
    *("gqa", "mistral-sliding", "qwen2", "scout", "maverick", "rope-llama3"),
    # These two change their frequencies while they write; keys that are cached keep their turn.
    *("rope-dynamic", "rope-longrope-long"),
]


@pytest.mark.parametrize("name", DECODING)
def test_decoding_in_fp32(name: str) -> None:
    """Step by step with both caches, over chunk and window borders and the original context."""
    kind = BY_NAME[name]
    theirs, ours = kind.build()
    ids = kind.ids()
    cache = ours.new_cache(kind.num_tokens, batch_size=2)
    output = None
    for start, stop in [(0, 13), *((i, i + 1) for i in range(13, kind.num_tokens))]:
        with torch.no_grad():
            output = theirs(ids[:, start:stop], **their_cache(output))
        logits = ours(ids[:, start:stop], cache=cache)
        assert (logits - output.logits[:, -1:]).abs().max() <= TOLERANCE


# Kinds whose tables and matrix shapes are those of transformers: nothing may round otherwise.
BF16_DENSE = ["gqa", "mqa", "biases", "tied", "code-llama-theta", "rope-dynamic", "qwen2"]


@pytest.mark.parametrize("name", BF16_DENSE)
def test_logits_in_bf16(name: str) -> None:
    """Within two units in the last place of bfloat16, at the scale of the logits."""
    kind = BY_NAME[name]
    theirs, ours = kind.build(dtype=torch.bfloat16)
    ids = kind.ids()
    with torch.no_grad():
        expected = theirs(ids).logits.float()
    unit = 2.0 ** (expected.abs().max().log2().floor().item() - 7)
    assert (ours(ids, logits_to_keep=None) - expected).abs().max() <= 2 * unit


@pytest.mark.parametrize(
    "name", ["rope-llama3", "rope-yarn", "mistral-sliding", "qwen3", "scout", "maverick"]
)
def test_logits_in_bf16_err_no_more_than_theirs(name: str) -> None:
    """Other kinds round in another order (masks, chunks, routed experts).

    Two bfloat16 runs then differ as each differs from fp32; ours must not be the worse one.
    """
    kind = BY_NAME[name]
    theirs, ours = kind.build(dtype=torch.bfloat16)
    exact, _ = kind.build()
    for parameter, rounded in zip(exact.parameters(), theirs.parameters(), strict=True):
        parameter.data = rounded.data.float()
    ids = kind.ids(batch_size=8)
    with torch.no_grad():
        truth, expected = exact(ids).logits, theirs(ids).logits.float()
    # The median: where rounding sends a token to another expert, its logits are just others.
    their_error = (expected - truth).abs().median()
    assert (ours(ids, logits_to_keep=None) - truth).abs().median() <= 1.1 * their_error


def test_greedy_tokens_in_bf16() -> None:
    """The same 64 tokens for at least 95 % of random initialisations."""
    kind = Tiny("", "Llama", {**DENSE, "num_hidden_layers": 2}, num_tokens=8)
    same = 0
    for seed in range(20):
        theirs, ours = kind.build(seed, torch.bfloat16)
        ids = kind.ids(1, seed)
        output, cache = None, ours.new_cache(80)
        their_ids = our_ids = ids
        theirs_all, ours_all = [], []
        for _ in range(64):
            with torch.no_grad():
                output = theirs(their_ids, **their_cache(output))
            their_ids = output.logits[:, -1:].float().argmax(-1)
            our_ids = ours(our_ids, cache=cache)[:, -1:].argmax(-1)
            theirs_all.append(int(their_ids))
            ours_all.append(int(our_ids))
        same += theirs_all == ours_all
    assert same >= 19
