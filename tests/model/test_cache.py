"""The KV cache: any split gives the same logits, rings hold what full caches hold, forks agree."""

import math
import random
from itertools import pairwise

import pytest
import torch

from llamatool.config.catalog import find
from llamatool.config.layers import LayerSpec, plan_layers
from llamatool.config.model import TemperatureConfig
from llamatool.model.attention import Attention
from llamatool.model.cache import KVCache
from llamatool.model.decoder import Decoder
from llamatool.model.rope import Rotation
from llamatool.sizing.kv_cache import kv_bytes
from tests.model.tiny_models import BY_NAME, Tiny

TOLERANCE = 1e-5
SPLIT_KINDS = ["gqa", "rope-llama3", "mistral-sliding", "qwen2-sliding-from-layer-1", "scout",
               "maverick", "explicit-rope-layers"]  # fmt: skip


def in_pieces(model: Decoder, ids: torch.Tensor, sizes: list[int], cache: KVCache) -> torch.Tensor:
    """The logits of all positions, read in pieces of these sizes (the last one repeats)."""
    logits, start, number = [], 0, 0
    while start < ids.shape[1]:
        size = sizes[min(number, len(sizes) - 1)]
        logits.append(model(ids[:, start : start + size], cache=cache, logits_to_keep=None))
        start, number = start + size, number + 1
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", SPLIT_KINDS)
@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 39])
def test_pieces_equal_one_forward(name: str, size: int) -> None:
    kind = Tiny("", BY_NAME[name].cls, BY_NAME[name].fields)
    _, model = kind.build()
    ids = kind.ids()
    whole = model(ids, logits_to_keep=None)
    pieces = in_pieces(model, ids, [size], model.new_cache(40, batch_size=2))
    assert (pieces - whole).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", SPLIT_KINDS)
def test_random_splits_equal_one_forward(name: str) -> None:
    kind = Tiny("", BY_NAME[name].cls, BY_NAME[name].fields)
    _, model = kind.build()
    ids = kind.ids()
    whole = model(ids, logits_to_keep=None)
    chance = random.Random(0)
    for _ in range(10):
        sizes = [chance.randint(1, 20) for _ in range(40)]
        pieces = in_pieces(model, ids, sizes, model.new_cache(40, batch_size=2))
        assert (pieces - whole).abs().max() <= TOLERANCE, sizes


@pytest.mark.parametrize("name", ["gqa", "mistral-sliding", "scout", "maverick", "rope-dynamic"])
@pytest.mark.parametrize("piece", [1, 5, 8, 32, 2048])
@pytest.mark.parametrize("keep", [0, 1, 3])
def test_prefill_equals_one_forward(name: str, piece: int, keep: int) -> None:
    kind = BY_NAME[name]
    _, model = kind.build()
    ids = kind.ids()
    whole = model(ids, logits_to_keep=None)
    cache = model.new_cache(kind.num_tokens, batch_size=2)
    if keep > piece:
        with pytest.raises(ValueError, match="3 positions from pieces of 1"):
            model.prefill(ids, cache, piece=piece, logits_to_keep=keep)
        return
    logits = model.prefill(ids, cache, piece=piece, logits_to_keep=keep)
    assert logits.shape == (2, keep, 97)
    assert cache.length == kind.num_tokens
    if keep:
        assert (logits - whole[:, -keep:]).abs().max() <= TOLERANCE


def test_a_second_prefill_continues_the_first() -> None:
    kind = BY_NAME["scout"]
    _, model = kind.build()
    ids = kind.ids()
    whole = model(ids, logits_to_keep=None)
    cache = model.new_cache(40, batch_size=2)
    model.prefill(ids[:, :13], cache, piece=8)
    logits = model.prefill(ids[:, 13:], cache, piece=8, logits_to_keep=5)
    assert (logits - whole[:, -5:]).abs().max() <= TOLERANCE


def random_attention(spec: LayerSpec, hidden_size: int) -> Attention:
    torch.manual_seed(0)
    layer = Attention(spec, hidden_size, 1e-5).requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=hidden_size**-0.5)
    return layer


def naive_attention(layer: Attention, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Softmax over a full mask of all positions, keys repeated, in double precision."""
    spec = layer.spec
    heads = [t.view(*t.shape[:2], -1, spec.head_dim).transpose(1, 2).double()
             for t in (layer.q_proj(x), layer.k_proj(x), layer.v_proj(x))]  # fmt: skip
    q, k, v = heads
    groups = spec.num_attention_heads // spec.num_key_value_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) / spec.head_dim**0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2).float() @ layer.o_proj.weight.T


@pytest.mark.parametrize("attention", ["full", "chunked", "sliding"])
@pytest.mark.parametrize("size", [1, 3, 8, 9, 50])
def test_rings_equal_a_full_mask(attention: str, size: int) -> None:
    """Against masks written from their definition, over many rounds of the ring."""
    window = None if attention == "full" else 8
    spec = LayerSpec(0, attention, window, False, 8, 4, 8, 96)  # type: ignore[arg-type]
    layer = random_attention(spec, 64)
    x = torch.randn(2, 50, 64)
    q, k = torch.arange(50)[:, None], torch.arange(50)
    allowed = k <= q
    if attention == "chunked":
        allowed = allowed & (k // 8 == q // 8)
    if attention == "sliding":
        allowed = allowed & (k > q - 8)
    cache = KVCache([spec], 50, batch_size=2)
    nothing = Rotation(torch.ones(0), torch.ones(0), False)
    parts = []
    for start in range(0, 50, size):
        part = x[:, start : start + size]
        parts.append(layer(part, nothing, cache.layers[0], start, part.shape[1]))
        cache.advance(part.shape[1])
    assert (torch.cat(parts, 1) - naive_attention(layer, x, allowed)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("attention", ["full", "chunked"])
def test_at_the_real_chunk_size(attention: str) -> None:
    """Over 8192, 16384 and 32768 tokens, in prompt pieces and single steps across the borders.

    huggingface/transformers#37351, #38299 and vllm-project/vllm#20816 (garbled beyond 10k),
    ikawrakow/ik_llama.cpp#335 (beyond 18k), vllm-project/vllm-gaudi#842 (temperature).
    """
    chunk, total = 8192, 33000
    temperature = TemperatureConfig(8192.0, 0.1) if attention == "full" else None
    window = chunk if attention == "chunked" else None
    spec = LayerSpec(0, attention, window, False, 2, 1, 8, 32, temperature=temperature)  # type: ignore[arg-type]
    layer = random_attention(spec, 16)
    x = torch.randn(1, total, 16)
    nothing = Rotation(torch.ones(0), torch.ones(0), False)
    cache = KVCache([spec], total)
    outputs = {}
    borders = [8190, 8191, 8192, 8193, 10_000, 16_383, 16_384, 16_385, 18_500, 32_767, 32_768]
    ends = sorted({*range(2048, total, 2048), *(b + 1 for b in borders), *borders, total})
    for start, stop in pairwise([0, *ends]):
        outputs[stop - 1] = layer(x[:, start:stop], nothing, cache.layers[0], start, 1)[:, 0]
        cache.advance(stop - start)
    k, v = (proj(x)[0].double() for proj in (layer.k_proj, layer.v_proj))
    for position, output in outputs.items():
        first = position // chunk * chunk if attention == "chunked" else 0
        q = layer.q_proj(x[0, position]).double().view(2, 8)
        if temperature is not None:
            q = q * (1 + 0.1 * math.log(1 + (position + 1) // 8192))
        scores = q @ k[first : position + 1].T / 8**0.5
        read = (scores.softmax(-1) @ v[first : position + 1]).flatten().float()
        assert (output - layer.o_proj.weight @ read).abs().max() <= TOLERANCE, position


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_masks_in_tiles(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """However few queries one mask serves, the logits are the same."""
    import llamatool.model.attention as attention

    for name in ("gqa", "mistral-sliding", "scout"):
        kind = BY_NAME[name]
        _, model = kind.build()
        ids = kind.ids()
        whole = model(ids, logits_to_keep=None)
        monkeypatch.setattr(attention, "MASK_ELEMENTS", rows * 40)
        pieces = in_pieces(model, ids, [13], model.new_cache(40, batch_size=2))
        monkeypatch.undo()
        assert (pieces - whole).abs().max() <= TOLERANCE


LIFE_KINDS = ["gqa", "mistral-sliding", "scout", "maverick"]


@pytest.mark.parametrize("name", LIFE_KINDS)
@pytest.mark.parametrize("length", [3, 8, 12, 16, 21])
def test_a_fork_equals_a_fresh_cache(name: str, length: int) -> None:
    kind = BY_NAME[name]
    _, model = kind.build()
    ids, others = kind.ids(), kind.ids(seed=2)
    cache = model.new_cache(24, batch_size=2)
    model(ids[:, :length], cache=cache)
    fork = cache.fork(40)
    model(ids[:, length:24], cache=cache)  # the original goes on and must not disturb the fork
    logits = in_pieces(model, others[:, length:], [5], fork)
    fresh = in_pieces(model, torch.cat((ids[:, :length], others[:, length:]), 1), [40],
                      model.new_cache(40, batch_size=2))  # fmt: skip
    assert (logits - fresh[:, length:]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", LIFE_KINDS)
@pytest.mark.parametrize("length", [3, 8, 12, 16, 21])
def test_rewinding_equals_a_fresh_cache(name: str, length: int) -> None:
    """One prefix, several continuations, each longer than a ring."""
    kind = BY_NAME[name]
    _, model = kind.build()
    ids = kind.ids()
    cache = model.new_cache(40, batch_size=2)
    model(ids[:, :length], cache=cache)
    mark = cache.mark()
    for seed in (2, 3):
        others = kind.ids(seed=seed)
        cache.rewind(mark)
        assert cache.length == length
        logits = in_pieces(model, others[:, length:], [5], cache)
        fresh = model(torch.cat((ids[:, :length], others[:, length:]), 1), logits_to_keep=None)
        assert (logits - fresh[:, length:]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", LIFE_KINDS)
def test_truncating_equals_a_fresh_cache_or_is_refused(name: str) -> None:
    kind = BY_NAME[name]
    _, model = kind.build()
    ids, others = kind.ids(), kind.ids(seed=2)
    refused = 0
    for read in (5, 8, 19, 24, 30):
        for length in range(read + 1):
            cache = model.new_cache(40, batch_size=2)
            model(ids[:, :read], cache=cache)
            try:
                cache.truncate(length)
            except ValueError as error:
                assert "no longer holds" in str(error)  # noqa: PT017
                assert cache.length == read
                refused += 1
                continue
            logits = model(others[:, length : length + 6], cache=cache, logits_to_keep=None)
            fresh = model(torch.cat((ids[:, :length], others[:, length : length + 6]), 1),
                          logits_to_keep=6)  # fmt: skip
            assert (logits - fresh).abs().max() <= TOLERANCE, (read, length)
    assert (refused == 0) == (name == "gqa")


def test_truncating_twice_does_not_trust_a_stale_ring() -> None:
    kind = BY_NAME["scout"]
    _, model = kind.build()
    cache = model.new_cache(40, batch_size=2)
    model(kind.ids()[:, :20], cache=cache)
    cache.truncate(8)  # a chunk begins here: nothing of it is needed
    with pytest.raises(ValueError, match="no longer holds what token 5 sees"):
        cache.truncate(5)  # the ring holds tokens 16 to 19, not 0 to 4


def test_limits_are_said() -> None:
    kind = BY_NAME["gqa"]
    _, model = kind.build()
    cache = model.new_cache(10)
    with pytest.raises(ValueError, match="40 tokens after 0 in a cache of 10"):
        model(kind.ids(1), cache=cache)
    with pytest.raises(ValueError, match="2 rows for a cache of 1"):
        model(kind.ids(2)[:, :5], cache=cache)
    model(kind.ids(1)[:, :8], cache=cache)
    with pytest.raises(ValueError, match="fork of 7 tokens for 8 read"):
        cache.fork(7)
    with pytest.raises(ValueError, match="truncate to 9 of 8"):
        cache.truncate(9)
    mark = cache.mark()
    cache.truncate(2)
    with pytest.raises(ValueError, match="rewind to 8 of 2"):
        cache.rewind(mark)
    with pytest.raises(ValueError, match="a cache of 0 tokens"):
        model.new_cache(0)


BYTES = [
    ("llama-3.1-8b", 131072, 17179869184),
    ("llama-4-scout-17b-16e", 1048576, 52747567104),
    ("llama-4-scout-17b-16e", 100000, 6123159552),
    ("llama-3.2-1b", 1000, None),
    ("llama-2-7b", 4096, None),
    ("llama-3.2-11b-vision", 5000, None),
]


@pytest.mark.parametrize(("name", "num_tokens", "expected"), BYTES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_bytes_are_those_of_kv_budget(
    name: str, num_tokens: int, expected: int | None, batch_size: int
) -> None:
    entry = find(name)
    assert entry is not None
    layers = plan_layers(entry.config)
    cache = KVCache(layers, num_tokens, batch_size=batch_size, dtype=torch.bfloat16, device="meta")
    assert cache.num_bytes == kv_bytes(layers, num_tokens, batch_size=batch_size)
    if expected is not None:
        assert cache.num_bytes == batch_size * expected


@pytest.mark.parametrize("name", ["mistral-sliding", "scout", "tied"])
@pytest.mark.parametrize("num_tokens", [5, 8, 100])
def test_bytes_of_tiny_models(name: str, num_tokens: int) -> None:
    _, model = BY_NAME[name].build()
    cache = model.new_cache(num_tokens)
    assert cache.num_bytes == kv_bytes(model.plan, num_tokens, dtype="float32")
