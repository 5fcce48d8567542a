"""The KV cache: keys and values of the tokens read so far, written in place.

Each layer keeps what its kind of attention can still see, and no more:

  full      every token
  chunked   the tokens of the current chunk, in a ring of one chunk
  sliding   the last `window` tokens, in a ring of that size
  cross     nothing of the text; the keys and values of the images, made once

so `KVCache.num_bytes` is exactly what `llamatool kv-budget` calls capped. Keys are stored after
their rotation, hence the order within a ring does not matter to a single query.

Letters: B batch, K key/value heads, N new tokens, S tokens in sight, E head_dim.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llamatool.config.layers import LayerSpec


class Segment(NamedTuple):
    """New tokens `first` to `first + num_tokens - 1` and what they may see.

    The last new token of the segment sees all keys, each one before it one key less (causal,
    aligned at the lower right); with a window, only the last `window` of those.
    """

    first: int
    num_tokens: int
    k_BKSE: Tensor
    v_BKSE: Tensor
    window: int | None = None


class Slots(NamedTuple):
    """The filled slots of one layer, from slot 0 on."""

    k_BKSE: Tensor
    v_BKSE: Tensor
    chunk: int  # the number of their chunk, in a chunked layer

    def copy(self) -> "Slots":
        """The same, in memory of its own."""
        return Slots(self.k_BKSE.clone(), self.v_BKSE.clone(), self.chunk)


class SeenImage(NamedTuple):
    """An image whose keys and values cross-attention layers hold."""

    position: int  # of its token; tokens from there on see it, until the next image
    first_key: int
    stop_key: int


class CacheMark(NamedTuple):
    """A point to return to: the length, and copies of the rings (full layers need none)."""

    length: int
    rope_length: int
    rings: tuple[Slots | None, ...]
    num_images: int = 0


class KVCache:
    """The keys and values of all layers, for a batch of rows of equal length."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        max_tokens: int,
        *,
        batch_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | Mapping[int, torch.device] = "cpu",
        max_image_tokens: int = 0,
    ) -> None:
        """Memory for `max_tokens` tokens, allocated now.

        Args: device: of all layers, or of each by its index. max_image_tokens: positions of
        images that cross-attention layers have room for.
        Raises: ValueError if a size is not positive.
        """
        if max_tokens < 1 or batch_size < 1:
            raise ValueError(f"a cache of {max_tokens} tokens and {batch_size} rows")
        self.max_tokens = max_tokens
        self.batch_size = batch_size
        self.length = 0  # tokens read so far
        self.rope_length = 0  # the longest length that rotations were scaled for
        self.max_image_tokens = max_image_tokens
        self.images: list[SeenImage] = []  # in the order of their positions
        self._specs = tuple(layers)
        self.layers: dict[int, LayerCache] = {
            spec.index: _layer_cache(
                spec,
                slots,
                batch_size,
                dtype,
                device[spec.index] if isinstance(device, Mapping) else torch.device(device),
            )
            for spec in layers
            if (slots := max_image_tokens if spec.attention == "cross" else max_tokens)
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values, filled or not.

        Example: Llama 3.1 8B, 131072 tokens, bfloat16 -> 17179869184; Llama 4 Scout, 1048576
        tokens -> 52747567104.
        """
        return sum(layer.k_BKSE.nbytes + layer.v_BKSE.nbytes for layer in self.layers.values())

    def advance(self, num_tokens: int) -> None:
        """Counts `num_tokens` as read, once every layer has taken their keys and values."""
        self.length += num_tokens

    def require_room(self, batch_size: int, num_tokens: int) -> None:
        """Checks that `num_tokens` more tokens fit.

        Raises: ValueError with the numbers.
        """
        if batch_size != self.batch_size:
            raise ValueError(f"{batch_size} rows for a cache of {self.batch_size}")
        if self.length + num_tokens > self.max_tokens:
            raise ValueError(
                f"{num_tokens} tokens after {self.length} in a cache of {self.max_tokens}"
            )

    @property
    def num_image_tokens(self) -> int:
        """Positions of images that cross-attention layers hold."""
        return self.images[-1].stop_key if self.images else 0

    def add_image(self, position: int, num_tokens: int) -> SeenImage:
        """Makes room for an image of `num_tokens` whose token stands, or will stand, there.

        Write its keys and values into every cross-attention layer, from `first_key` on.
        Raises: ValueError if there is no room, or the position is not behind that of the image
        before it.
        """
        first = self.num_image_tokens
        if first + num_tokens > self.max_image_tokens:
            raise ValueError(
                f"{num_tokens} image tokens after {first} in a cache of {self.max_image_tokens}"
            )
        if position < self.length or (self.images and position <= self.images[-1].position):
            raise ValueError(f"an image at {position}, where tokens or images were read already")
        self.images.append(SeenImage(position, first, first + num_tokens))
        return self.images[-1]

    def mark(self) -> CacheMark:
        """The present state, to `rewind` to after other tokens were read.

        Costs a copy of the rings only: what a full layer holds below this length stays there.
        """
        rings = tuple(
            layer.filled(self.length).copy() if layer.is_ring else None
            for layer in self.layers.values()
        )
        return CacheMark(self.length, self.rope_length, rings, len(self.images))

    def rewind(self, mark: CacheMark) -> None:
        """Back to the state of `mark`, which must be of this cache and not above its length.

        Raises: ValueError if the cache is shorter than the mark.
        """
        if mark.length > self.length:
            raise ValueError(f"rewind to {mark.length} of {self.length} tokens")
        for layer, ring in zip(self.layers.values(), mark.rings, strict=True):
            if ring is not None:
                layer.put(ring)
        self.length, self.rope_length = mark.length, mark.rope_length
        del self.images[mark.num_images :]

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens.

        Raises: ValueError if a ring has already overwritten what the next token would see
        (`mark` and `rewind` work there).
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"truncate to {length} of {self.length} tokens")
        for index, layer in self.layers.items():
            if not layer.can_truncate(self.length, length):
                raise ValueError(
                    f"layer {index} no longer holds what token {length} sees (read: {self.length})"
                )
        self.length = length
        self.images = [image for image in self.images if image.position < length]
        if not length:
            self.rope_length = 0

    def fork(self, max_tokens: int | None = None) -> "KVCache":
        """An independent copy, with room for `max_tokens` (by default as much as this one).

        Raises: ValueError if `max_tokens` is below the present length.
        """
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        if max_tokens < self.length:
            raise ValueError(f"a fork of {max_tokens} tokens for {self.length} read")
        copy = KVCache(
            self._specs,
            max_tokens,
            batch_size=self.batch_size,
            dtype=next(iter(self.layers.values())).k_BKSE.dtype,
            device={index: layer.k_BKSE.device for index, layer in self.layers.items()},
            max_image_tokens=self.max_image_tokens,
        )
        copy.images = list(self.images)
        for index, layer in self.layers.items():
            held = self.num_image_tokens if isinstance(layer, CrossLayerCache) else self.length
            copy.layers[index].put(layer.filled(held))
        copy.length, copy.rope_length = self.length, self.rope_length
        return copy


@dataclass(slots=True)
class LayerCache:
    """Keys and values of one layer; here, of a full one: slot = position."""

    k_BKSE: Tensor
    v_BKSE: Tensor

    def extend(self, start: int, k_BKNE: Tensor, v_BKNE: Tensor) -> Iterator[Segment]:
        """Takes the tokens from position `start` on, and yields what each of them may see.

        Attend to a segment before asking for the next: a ring may reuse its slots.
        """
        stop = start + k_BKNE.shape[2]
        self._write(start, k_BKNE, v_BKNE)
        yield Segment(0, stop - start, self.k_BKSE[:, :, :stop], self.v_BKSE[:, :, :stop])

    @property
    def is_ring(self) -> bool:
        """Whether later tokens overwrite earlier ones."""
        return False

    def can_truncate(self, length: int, shorter: int) -> bool:
        """Whether, of `length` tokens read, what the token at `shorter` sees is still here."""
        return shorter <= length

    def filled(self, length: int) -> Slots:
        """The slots that `length` tokens have filled: views, not copies."""
        return Slots(self.k_BKSE[:, :, :length], self.v_BKSE[:, :, :length], 0)

    def put(self, slots: Slots) -> None:
        """Writes back what `filled` of this layer or its twin gave."""
        self._write(0, slots.k_BKSE, slots.v_BKSE)

    def _write(self, slot: int, k_BKNE: Tensor, v_BKNE: Tensor) -> None:
        stop = slot + k_BKNE.shape[2]
        self.k_BKSE[:, :, slot:stop] = k_BKNE
        self.v_BKSE[:, :, slot:stop] = v_BKNE


@dataclass(slots=True)
class CrossLayerCache(LayerCache):
    """Keys and values of images, one image after the other; text adds nothing."""

    def write(self, image: SeenImage, k_BKSE: Tensor, v_BKSE: Tensor) -> None:
        """Keeps the keys and values of `image`."""
        self._write(image.first_key, k_BKSE, v_BKSE)

    def can_truncate(self, length: int, shorter: int) -> bool:
        """Always: which images count stands in the KVCache."""
        return True


@dataclass(slots=True)
class ChunkLayerCache(LayerCache):
    """A ring of one chunk: slot = position mod chunk, and nothing before the chunk is visible.

    The keys that a query sees are always the first slots: a slice, never a mask.
    """

    chunk: int  # tokens
    current: int = 0  # the number of the chunk that the ring holds

    def extend(self, start: int, k_BKNE: Tensor, v_BKNE: Tensor) -> Iterator[Segment]:
        """One segment per chunk that the tokens touch."""
        num_tokens = k_BKNE.shape[2]
        first = 0
        while first < num_tokens:
            self.current, slot = divmod(start + first, self.chunk)
            count = min(num_tokens - first, self.chunk - slot)
            seen = slot + count
            new = slice(first, first + count)
            self._write(slot, k_BKNE[:, :, new], v_BKNE[:, :, new])
            yield Segment(first, count, self.k_BKSE[:, :, :seen], self.v_BKSE[:, :, :seen])
            first += count

    @property
    def is_ring(self) -> bool:
        """True."""
        return True

    def can_truncate(self, length: int, shorter: int) -> bool:
        """At a chunk's start nothing is visible; elsewhere the ring must hold that chunk."""
        chunk, slot = divmod(shorter, self.chunk)
        return slot == 0 or chunk == self.current

    def filled(self, length: int) -> Slots:
        """The slots of the last token's chunk."""
        slots = (length - 1) % self.chunk + 1 if length else 0
        return Slots(self.k_BKSE[:, :, :slots], self.v_BKSE[:, :, :slots], self.current)

    def put(self, slots: Slots) -> None:
        """Writes the chunk back, and which one it is."""
        self._write(0, slots.k_BKSE, slots.v_BKSE)
        self.current = slots.chunk


@dataclass(slots=True)
class SlidingLayerCache(LayerCache):
    """A ring of the last `window` tokens: slot = position mod window."""

    window: int  # tokens

    def extend(self, start: int, k_BKNE: Tensor, v_BKNE: Tensor) -> Iterator[Segment]:
        """A single token sees the filled ring as it is; several see it in order, and each other."""
        num_tokens = k_BKNE.shape[2]
        if num_tokens == 1:
            self._write(start % self.window, k_BKNE, v_BKNE)
            seen = min(start + 1, self.window)
            yield Segment(0, 1, self.k_BKSE[:, :, :seen], self.v_BKSE[:, :, :seen])
            return
        past_k, past_v = self._in_order(start)
        yield Segment(
            0,
            num_tokens,
            torch.cat((past_k, k_BKNE), dim=2),
            torch.cat((past_v, v_BKNE), dim=2),
            self.window,
        )
        kept = min(num_tokens, self.window)
        self._write_ring(start + num_tokens - kept, k_BKNE[:, :, -kept:], v_BKNE[:, :, -kept:])

    @property
    def is_ring(self) -> bool:
        """True."""
        return True

    def can_truncate(self, length: int, shorter: int) -> bool:
        """As long as the ring has not come round, or nothing or everything is dropped."""
        return length <= self.window or shorter in (0, length)

    def filled(self, length: int) -> Slots:
        """All slots, once the ring has come round."""
        slots = min(length, self.window)
        return Slots(self.k_BKSE[:, :, :slots], self.v_BKSE[:, :, :slots], 0)

    def _in_order(self, length: int) -> tuple[Tensor, Tensor]:
        """Copies of the last window - 1 keys and values, oldest first: all a new token sees."""
        first = max(0, length - self.window + 1)
        slots = torch.arange(first, length, device=self.k_BKSE.device) % self.window
        return self.k_BKSE[:, :, slots], self.v_BKSE[:, :, slots]

    def _write_ring(self, start: int, k_BKNE: Tensor, v_BKNE: Tensor) -> None:
        slot = start % self.window
        before_end = min(k_BKNE.shape[2], self.window - slot)
        self._write(slot, k_BKNE[:, :, :before_end], v_BKNE[:, :, :before_end])
        self._write(0, k_BKNE[:, :, before_end:], v_BKNE[:, :, before_end:])


def _layer_cache(
    spec: LayerSpec, max_tokens: int, batch_size: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    slots = max_tokens if spec.window is None else min(max_tokens, spec.window)
    shape = (batch_size, spec.num_key_value_heads, slots, spec.head_dim)
    k_BKSE = torch.zeros(shape, dtype=dtype, device=device)
    v_BKSE = torch.zeros(shape, dtype=dtype, device=device)
    match spec.attention, spec.window:
        case "cross", _:
            return CrossLayerCache(k_BKSE, v_BKSE)
        case "chunked", int(chunk):
            return ChunkLayerCache(k_BKSE, v_BKSE, chunk)
        case "sliding", int(window):
            return SlidingLayerCache(k_BKSE, v_BKSE, window)
        case _:
            return LayerCache(k_BKSE, v_BKSE)
