"""What a prefill allocates, tensor by tensor: nothing of length x length or x vocabulary."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.model.tiny_models import BY_NAME, DENSE, MIXED, Tiny


class Ledger(TorchDispatchMode):
    """Bytes of the storages that operators make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak_bytes = 0
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if (
                isinstance(tensor, torch.Tensor)
                and not tensor.is_meta
                and id_of(tensor) not in given
            ):
                self.see(tensor.untyped_storage())
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.live:
            return
        self.live[key] = storage.nbytes()
        self.largest_bytes = max(self.largest_bytes, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))
        weakref.finalize(storage, self.live.pop, key, None)


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def test_the_ledger_counts() -> None:
    with Ledger() as ledger:
        a = torch.zeros(1000)
        b = a + 1
        del a
        c = b.view(10, 100) * 2
        assert ledger.peak_bytes == 8000
        assert sum(ledger.live.values()) == b.nbytes + c.nbytes == 8000
        d = torch.zeros(1000)
    assert ledger.peak_bytes == 8000 + d.nbytes
    assert ledger.largest_bytes == 4000


PREFILL = [
    Tiny("full", "Llama", {**DENSE, "max_position_embeddings": 8192}),
    Tiny("sliding", "Mistral", {**DENSE, "sliding_window": 64}),
    Tiny("chunked", "Llama4", {**MIXED, "attention_chunk_size": 128}),
]


@pytest.mark.parametrize("kind", PREFILL, ids=lambda kind: kind.name)
def test_prefill_needs_its_cache_and_one_piece(kind: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import llamatool.model.attention as attention

    monkeypatch.setattr(attention, "MASK_ELEMENTS", 2**14)
    _, model = kind.build()
    piece = 128
    peaks = {}
    for num_tokens in (1024, 4096):
        ids = torch.randint(97, (1, num_tokens))
        cache = model.new_cache(num_tokens)
        model.prefill(ids[:, :1], cache.fork(), piece=piece)  # frequencies are made once
        with Ledger() as ledger:
            model.prefill(ids, cache, piece=piece)
        peaks[num_tokens] = ledger.peak_bytes
        assert cache.length == num_tokens
        assert ledger.largest_bytes < 4 * num_tokens * 97  # length x vocabulary
        assert ledger.largest_bytes < num_tokens * num_tokens
    # One piece: some vectors per token, the feed-forward, and a tile of masks in bool and float.
    widths = 4 * piece * (8 * 64 + 4 * 96)
    assert peaks[4096] <= widths + 8 * 2**14
    assert peaks[4096] <= 1.1 * peaks[1024]


def test_all_at_once_would_need_more() -> None:
    """The bound above is not so loose that the whole prompt would pass it."""
    _, model = PREFILL[0].build()
    cache = model.new_cache(4096)
    with Ledger() as ledger:
        model(torch.randint(97, (1, 4096)), cache=cache)
    assert ledger.peak_bytes > 4 * 128 * (8 * 64 + 4 * 96) + 8 * 2**14


def test_one_answer_needs_no_logits_of_the_rest() -> None:
    _, model = BY_NAME["gqa"].build()
    ids = torch.randint(97, (1, 2000))
    with Ledger() as ledger:
        model(ids, cache=model.new_cache(2000))
    assert ledger.largest_bytes < 4 * 2000 * 97
    with Ledger() as ledger:
        model(ids, cache=model.new_cache(2000), logits_to_keep=None)
    assert ledger.largest_bytes >= 4 * 2000 * 97


@pytest.mark.parametrize("more", [1, 64])
def test_key_heads_are_never_repeated(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight query heads read one key head of 3000 tokens: not even one copy of it is made."""
    import llamatool.model.attention as attention

    monkeypatch.setattr(attention, "MASK_ELEMENTS", 2**14)
    _, model = BY_NAME["mqa"].build()
    cache = model.new_cache(4000)
    ids = torch.randint(97, (1, 3000))
    model.prefill(ids, cache, piece=64)
    with Ledger() as ledger:
        model(ids[:, :more], cache=cache)
    assert ledger.largest_bytes < 3000 * 8 * 4
