"""Costs: the tokens that a plan foretells are those that a run computes; FLOPs of known models."""

import math

import pytest

from llamatool.config.layers import plan_layers
from llamatool.config.model import ModelConfig, RopeConfig
from llamatool.needle.experiment import Design
from llamatool.needle.plan import (
    Change,
    Read,
    chunks_around,
    plan,
    prefill_flops,
    reads_with_changes,
)
from llamatool.sizing.kv_cache import kv_bytes
from tests.needle.conftest import experiment

ELEVEN = tuple(i / 10 for i in range(11))


def llama(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, inner: int):
    config = ModelConfig(
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        vocab_size=128256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        tie_word_embeddings=False,
        rope=RopeConfig(theta=500000.0),
        dtype="bfloat16",
        embedding_rows=128256,
    )
    return plan_layers(config)


# PFLOP of one prefill with every layer complete, from the table of the specification: the last
# layer's queries and feed-forward are not computed here, hence the share of 1 / layers less.
@pytest.mark.parametrize(
    ("shape", "length", "petaflops"),
    [
        ((2048, 16, 32, 8, 64, 8192), 65_536, 0.41),
        ((4096, 32, 32, 8, 128, 14336), 65_536, 2.04),
        ((4096, 32, 32, 8, 128, 14336), 131_072, 6.33),
        ((8192, 80, 64, 8, 128, 28672), 131_072, 40.5),
        ((4096, 32, 32, 8, 128, 14336), 1_048_576, 303),
    ],
)
def test_flops_of_known_models(shape, length, petaflops):
    layers = llama(*shape)
    found = prefill_flops(layers, shape[0], 0, length) / 1e15
    assert math.isclose(found, petaflops * (1 - 1 / len(layers)), rel_tol=0.02)


def test_flops_add_up_over_pieces():
    layers = llama(4096, 32, 32, 8, 128, 14336)
    whole = prefill_flops(layers, 4096, 0, 8192)
    parts = sum(prefill_flops(layers, 4096, i, i + 1024) for i in range(0, 8192, 1024))
    assert math.isclose(whole, parts, rel_tol=1e-12)


def test_eleven_depths_cost_six_and_a_half_texts():
    length = 100_000
    changes = [Change(start, start + 20) for start in range(0, length - 19, (length - 20) // 10)]
    assert len(changes) == 11
    reads = list(reads_with_changes(length, changes, False, None))
    assert sum(read.stop - read.start for read in reads) / length == pytest.approx(6.5, abs=0.01)
    with_plain = list(reads_with_changes(length, changes, True, None))
    assert sum(read.stop - read.start for read in with_plain) / length < 6.6


def test_local_layers_cost_one_text_and_some_chunks():
    changes = [Change(start, start + 20) for start in (0, 5_000, 99_980)]
    reads = list(reads_with_changes(100_000, changes, True, 512))
    assert reads[0] == Read(0, 100_000)
    assert sum(read.stop - read.start for read in reads[1:]) <= 3 * 1024


def test_chunks_around():
    assert chunks_around(Change(500, 520), 4096, 512) == Read(0, 1024)
    assert chunks_around(Change(512, 532), 4096, 512) == Read(512, 1024)
    assert chunks_around(Change(4080, 4090), 4090, 512) == Read(3584, 4090)


@pytest.mark.parametrize("mode", ["single", "packed", "sweep"])
def test_shares_of_a_grid(pocket_tokenizer, mode):
    """Token counts of each mode against one prompt after the other, without any model."""
    layers = llama(4096, 32, 32, 8, 128, 14336)
    lengths = (8192, 16384, 32768, 65536)
    made = experiment(pocket_tokenizer, Design(lengths, ELEVEN, 1, mode=mode, controls=False))
    found = plan(made, made.outlines(), layers, 4096, chunk=None, kv_dtype="bfloat16")
    assert found.num_prompts == 44
    assert found.kv_bytes == kv_bytes(layers, 65_536, dtype="bfloat16") == 8 * 2**30
    tails = 44 * made.sizes.tail
    limit = {"single": 6.6 * sum(lengths), "packed": 1.05 * sum(lengths), "sweep": 1.05 * 65_536}
    assert found.prefill_tokens <= limit[mode] + tails
    assert found.naive_prefill_tokens == 11 * (sum(lengths) - 4 * made.sizes.budget)
