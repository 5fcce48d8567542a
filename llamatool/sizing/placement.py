"""Which device holds which layers, where one process spreads a model over several.

The model is a row of parts that a token passes in order: embedding, layers, final norm with the
output table. Devices are filled in order, each with as much of the row as it can hold beside the
cache of its layers and the activations of one piece of prompt. So no more devices are used than
needed, and a token changes from one to the next as seldom as possible.

Layers that no GPU has room for lie on the CPU and are computed there; the output table, which is
read for every token, then stays on a GPU. One device works at a time: this saves memory, never
time (tensor parallelism lets all work at once, see sizing/ranks.py).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llamatool.config.layers import LayerSpec, plan_layers
from llamatool.config.model import ModelConfig, VisionConfig
from llamatool.dtypes import DType, by_name
from llamatool.errors import ResourceError, UsageError
from llamatool.records import record
from llamatool.sizing.fit import (
    ACTIVATION_BYTES,
    LOGIT_BYTES,
    RUNTIME_BYTES,
    UTILIZATION,
    Load,
    activation_bytes,
)
from llamatool.sizing.kv_cache import kv_cache
from llamatool.sizing.parameters import (
    layer_parameters,
    projector_parameters,
    vision_tower_parameters,
)
from llamatool.units import format_bytes

CPU = "cpu"
PIECE_TOKENS = 2048  # of a prompt, read at once (model/decoder.py)


@record
class Device:
    """A device and what is free on it."""

    name: str  # as torch calls it: `cuda:0`, `cpu`
    free_bytes: int | None  # None: the system does not tell, and nothing is refused

    @property
    def usable_bytes(self) -> int | None:
        """Bytes that weights, cache and activations may take.

        Of a GPU, as in kv-budget, nine tenths less 512 MiB for kernels and buffers. Of the CPU
        all: pages of mapped weights are given back where they are needed.
        Example: a GPU with 80 GiB free -> 76772540416.
        """
        if self.free_bytes is None or self.name == CPU:
            return self.free_bytes
        return max(0, int(self.free_bytes * UTILIZATION) - RUNTIME_BYTES)


@record
class DeviceShare:
    """What one device holds."""

    device: Device
    layers: tuple[int, ...]  # their indices, in order; none where only a table lies here
    has_embedding: bool  # and the image tower, where there is one
    has_head: bool  # final norm and output table
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int  # of one piece of prompt: an estimate
    read_bytes: int  # of weights, by one token

    @property
    def needed_bytes(self) -> int:
        """Bytes of everything."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


@record
class Placement:
    """A model spread over devices."""

    shares: tuple[DeviceShare, ...]  # of the devices that hold something, in order
    num_layers: int
    num_tokens: int  # of each sequence, that the caches have room for
    copies_table: bool  # a tied table lies on two devices: one embeds, one makes logits

    @property
    def is_spread(self) -> bool:
        """Whether there is more than one device."""
        return len(self.shares) > 1

    @property
    def embedding_device(self) -> str:
        """Where ids go in."""
        return next(share.device.name for share in self.shares if share.has_embedding)

    @property
    def head_device(self) -> str:
        """Where logits come out."""
        return next(share.device.name for share in self.shares if share.has_head)

    @property
    def layer_devices(self) -> dict[int, str]:
        """The device of each layer, by its index."""
        return {index: share.device.name for share in self.shares for index in share.layers}

    @property
    def cpu_cost(self) -> str | None:
        """What the CPU's layers cost, as a sentence; None if it has none beside a GPU."""
        if not self.is_spread or self.shares[-1].device.name != CPU:
            return None
        share = self.shares[-1]
        parts = [f"{len(share.layers)} of {self.num_layers} layers"] if share.layers else []
        parts += ["the logits"] if share.has_head else []
        return (
            f"the CPU computes {' and '.join(parts)} where their weights stay: every token reads"
            f" {format_bytes(share.read_bytes)} of weights there"
        )


def place_layers(
    config: ModelConfig,
    devices: Sequence[Device],
    load: Load,
    *,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    piece_tokens: int = PIECE_TOKENS,
) -> Placement:
    """Which device holds what of a model, and the bytes of it.

    Args:
    devices: in the order in which they are filled; `cpu`, if it is there, comes last.
    load: with no images the image tower and the cross-attention layers are left out, as the model
    is then loaded without them.
    dtype: of weights and activations. kv_dtype: of the cache, by default the same.
    piece_tokens: of a prompt, read at once.

    Raises: ResourceError, with the numbers, if no such division fits; UsageError if a type is
    unknown.
    Example: Llama 3.1 70B in bfloat16, 8192 tokens, two GPUs of 80 GiB -> layers 0 to 41 with the
    embedding on the first, 42 to 79 with the output table on the second.
    """
    row = _Row(config, load, dtype, kv_dtype or dtype, piece_tokens)
    for head in _head_places(devices):
        stretches = row.spread(devices, head)
        if stretches is not None:
            return row.placement(devices, stretches)
    raise row.refusal(devices)


def require_free_choice(device_map: str | None, device: str, *, is_shared: bool) -> None:
    """Checks that a device map is one, and has the choice of devices to itself.

    Args: is_shared: several ranks share the model.
    Raises: UsageError.
    """
    if device_map is None:
        return
    if device_map != "auto":
        raise UsageError(f"--device-map is `{device_map[:80]}`: only auto is known")
    if device != "auto":
        raise UsageError(
            f"--device-map chooses devices, and --device {device[:80]} has chosen already",
            hint="give one of the two",
        )
    if is_shared:
        raise UsageError(
            "--device-map spreads a model in one process, and here several ranks share it",
            hint="leave --device-map out under torchrun, or run one process",
        )


class _Stretch(NamedTuple):
    """Parts `first` to `stop` - 1 of the row, and perhaps the head out of its order."""

    first: int
    stop: int
    keeps_head: bool = False


class _Head(NamedTuple):
    """Where the output table may lie: on which of how many devices."""

    num_devices: int
    keeper: int | None  # holds it out of its order; None: it lies where the row ends


def _head_places(devices: Sequence[Device]) -> Iterator[_Head]:
    """Ways to place the output table, the best first.

    GPUs alone, if they are enough: at the end of the row, or where else one has room (a tied table
    beside the embedding is not needed twice). Then with the CPU, which takes what is left of the
    row, the table being on the last GPU that has room; only if that fits nowhere, on the CPU.
    """
    num_gpus = sum(device.name != CPU for device in devices)
    for num_devices in sorted({num_gpus, len(devices)} - {0}):
        if num_devices == num_gpus:
            yield _Head(num_devices, None)
        for number in reversed(range(num_gpus)):
            yield _Head(num_devices, number)
        if num_devices > num_gpus:
            yield _Head(num_devices, None)


class _Row:
    """The parts of a model in order: 0 the embedding, 1 to n the layers, n + 1 the head."""

    def __init__(
        self, config: ModelConfig, load: Load, dtype: str, kv_dtype: str, piece_tokens: int
    ) -> None:
        self.config = config
        self.load = load
        self.dtype = _float_type(dtype)
        images = load.num_images > 0
        self.layers = [s for s in plan_layers(config) if images or s.attention != "cross"]
        self.head = len(self.layers) + 1
        width = config.hidden_size
        self.table_bytes = self._bytes(config.vocab_size * width)
        step = min(load.num_tokens, piece_tokens) * load.batch_size
        self.vector_bytes = self._bytes(2 * step * width)  # a piece between two layers
        self.logit_bytes = load.batch_size * (LOGIT_BYTES * config.vocab_size)
        self.logit_bytes += self._bytes(load.batch_size * config.vocab_size)
        tower, self.tower_peak_bytes = self._tower()
        embedding = config.embedding_rows * width + tower
        self.weights = [self._bytes(embedding)]
        self.kv = [0]
        self.activations = [self.vector_bytes]
        for spec in self.layers:
            cache = kv_cache((spec,), dtype=kv_dtype, vision=config.vision)
            peak = activation_bytes(config, (spec,), step, num_sequences=0) // ACTIVATION_BYTES
            self.weights.append(self._bytes(sum(layer_parameters(spec, width).values())))
            self.activations.append(self._bytes(peak))
            self.kv.append(
                cache.num_bytes(
                    load.num_tokens, batch_size=load.batch_size, num_images=load.num_images
                )
            )
        self.weights.append(self._bytes(width))  # the head, without its table
        self.kv.append(0)
        self.activations.append(self.vector_bytes)

    def spread(self, devices: Sequence[Device], head: _Head) -> list[_Stretch] | None:
        """The row over the devices, each filled before the next; None if it does not fit.

        Filling each to the brim leaves the least for the next, so if this does not fit, no other
        division with the head in this place does.
        """
        end = self.head + (1 if head.keeper is None else 0)
        stretches, first = [], 0
        for number, device in enumerate(devices[: head.num_devices]):
            keeps = number == head.keeper
            room = device.usable_bytes
            stop = first
            while stop < end and self._fits(_Stretch(first, stop + 1, keeps), room):
                stop += 1
            if keeps and not self._fits(_Stretch(first, stop, keeps), room):
                return None
            stretches.append(_Stretch(first, stop, keeps))
            first = stop
        return stretches if first == end else None

    def placement(self, devices: Sequence[Device], stretches: Sequence[_Stretch]) -> Placement:
        shares = tuple(
            self._share(device, stretch)
            for device, stretch in zip(devices, stretches, strict=False)
            if stretch.first < stretch.stop or stretch.keeps_head
        )
        whole = any(share.has_embedding and share.has_head for share in shares)
        return Placement(
            shares=shares,
            num_layers=len(self.layers),
            num_tokens=self.load.num_tokens,
            copies_table=self.config.tie_word_embeddings and not whole,
        )

    def refusal(self, devices: Sequence[Device]) -> ResourceError:
        """Why no division fits: what the whole model needs, and what each device has."""
        whole = _Stretch(0, self.head + 1)
        weights, kv = self._weight_bytes(whole), sum(self.kv)
        images = f" and {self.load.num_images} images" if self.load.num_images else ""
        rows = f" x {self.load.batch_size}" if self.load.batch_size > 1 else ""
        rooms = ", ".join(
            f"{format_bytes(device.usable_bytes or 0)} of {device.name}" for device in devices
        )
        return ResourceError(
            f"weights in {self.dtype.name} take {format_bytes(weights)}, the KV cache of"
            f" {self.load.num_tokens:,} tokens{rows}{images} {format_bytes(kv)} and activations"
            f" {format_bytes(self._activation_bytes(whole))} on each device; usable are {rooms},"
            " in which whole layers must fit",
            hint="`llamatool kv-budget` shows what fits; a smaller dtype or fewer tokens need less",
        )

    def _fits(self, stretch: _Stretch, room: int | None) -> bool:
        if room is None:
            return True
        kv = sum(self.kv[stretch.first : stretch.stop])
        return self._weight_bytes(stretch) + kv + self._activation_bytes(stretch) <= room

    def _weight_bytes(self, stretch: _Stretch) -> int:
        total = sum(self.weights[stretch.first : stretch.stop])
        if stretch.keeps_head:
            total += self.weights[self.head]
        # A tied table is there already where the embedding is.
        is_there = self.config.tie_word_embeddings and stretch.first == 0 < stretch.stop
        return total + (self.table_bytes if self._has_head(stretch) and not is_there else 0)

    def _activation_bytes(self, stretch: _Stretch) -> int:
        """The peak while a piece passes, or an image before it; and logits at the end."""
        peak = max(self.activations[stretch.first : stretch.stop], default=0)
        if stretch.first == 0 < stretch.stop:
            peak = max(peak, self.tower_peak_bytes)
        if self._has_head(stretch):
            peak = max(peak, self.vector_bytes) + self.logit_bytes
        return peak

    def _has_head(self, stretch: _Stretch) -> bool:
        return stretch.keeps_head or stretch.first <= self.head < stretch.stop

    def _share(self, device: Device, stretch: _Stretch) -> DeviceShare:
        specs = self.layers[max(stretch.first - 1, 0) : max(stretch.stop - 1, 0)]
        has_head = self._has_head(stretch)
        read = sum(map(self._read_bytes, specs))
        if has_head:
            read += self.table_bytes + self.weights[self.head]
        return DeviceShare(
            device=device,
            layers=tuple(spec.index for spec in specs),
            has_embedding=stretch.first == 0 < stretch.stop,
            has_head=has_head,
            weight_bytes=self._weight_bytes(stretch),
            kv_bytes=sum(self.kv[stretch.first : stretch.stop]),
            activation_bytes=self._activation_bytes(stretch),
            read_bytes=read,
        )

    def _read_bytes(self, spec: LayerSpec) -> int:
        """Bytes of a layer's weights that one token reads: of the experts, its own only."""
        count = sum(layer_parameters(spec, self.config.hidden_size).values())
        if spec.moe is not None:
            resting = spec.moe.num_experts - spec.moe.num_experts_per_tok
            count -= resting * 3 * self.config.hidden_size * spec.intermediate_size
        return self._bytes(count)

    def _tower(self) -> tuple[int, int]:
        """Parameters of image tower and projector, and bytes at the peak of reading images."""
        vision = self.config.vision
        if vision is None or not self.load.num_images:
            return 0, 0
        parameters = vision_tower_parameters(vision)
        parameters += projector_parameters(vision, self.config.hidden_size)
        positions, inner = _tower_activations(vision)
        features = positions * self.config.hidden_size
        return parameters, self._bytes(positions * inner + features * self.load.num_images)

    def _bytes(self, count: int) -> int:
        return self.dtype.num_bytes(count)


def _tower_activations(vision: VisionConfig) -> tuple[int, int]:
    """Positions of one image with all its tiles, and elements of each at the peak: an estimate.

    Two vectors of a block and its wider half, attention (q, k, v and output) or feed-forward
    (before and after GELU); where inputs of blocks are kept, those and two copies of them.

    Example: Llama 3.2 11B Vision -> 6432 positions (4 x 1608) of 28160 elements.
    """
    width = vision.hidden_size
    inner = 2 * width + max(4 * width, 2 * vision.intermediate_size)
    if vision.kind == "llama4":
        return (vision.max_num_tiles + 1) * vision.num_patches, inner
    positions = vision.max_num_tiles * (-(-vision.num_patches // 8) * 8)
    return positions, inner + 3 * len(vision.intermediate_layers_indices) * width


def _float_type(name: str) -> DType:
    dtype = by_name(name)
    if dtype is None or dtype.name in ("bool", "complex64"):
        raise UsageError(f"`{name}` is no element type of weights")
    return dtype
