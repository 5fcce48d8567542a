"""A path to a running model: what it is, whether it fits, and its weights in place."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llamatool.checkpoint import files
from llamatool.checkpoint.tensors import TensorTable
from llamatool.config.model import ModelConfig
from llamatool.dtypes import by_name
from llamatool.errors import CheckpointError, ResourceError, UnsupportedError, UsageError
from llamatool.model.decoder import PREFILL_PIECE, Decoder
from llamatool.model.placement import fill_spread
from llamatool.model.storage import FLOATS
from llamatool.model.weights import Weights
from llamatool.sizing.fit import Load
from llamatool.sizing.kv_cache import kv_cache
from llamatool.sizing.placement import Device, Placement, place_layers, require_free_choice
from llamatool.sizing.ranks import RankMemory, rank_memory
from llamatool.source import LoadedSource, load_source
from llamatool.units import format_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DEVICES = ("auto", "cpu", "cuda", "mps")

Announce = Callable[[RankMemory | Placement], None]


def load_model(
    source: str | Path,
    *,
    device: str = "auto",
    dtype: str | None = None,
    max_tokens: int = PREFILL_PIECE,
    batch_size: int = 1,
    max_images: int = 0,
    mesh: "DeviceMesh | None" = None,
    device_map: str | None = None,
    piece_tokens: int = PREFILL_PIECE,
    announce: Announce | None = None,
) -> Decoder:
    """A model ready to run, from a folder, a safetensors or GGUF file, or Meta's `.pth` files.

    All names and shapes are checked before anything is read. Then the weights are taken one at a
    time; on a CPU and in the dtype of the file they are the mapped file itself, so that a model
    is ready at once and its pages are read as they are used.

    Args:
    device: `cpu`, `cuda`, `cuda:1`, `mps`, or `auto` for the first of CUDA, MPS and CPU there is.
    dtype: of weights and activations; by default that of the checkpoint, bfloat16 where it is
    packed in blocks.
    max_tokens: tokens that the cache will have to hold, for the check of memory.
    max_images: images that a cache will have to hold; with 0 the image tower and cross-attention
    layers stay out of memory, and the model reads text.
    mesh: of the ranks that share the model, as `torchrun` starts them; this one then holds and
    reads its part, and every rank must call `forward` with the same tokens.
    device_map: `auto` spreads the layers over the GPUs of this process, as far as each has room,
    and leaves on the CPU what no GPU has room for; None: everything is on one device.
    piece_tokens: of a prompt, read at once, for whose activations the device map leaves room.
    announce: told what each rank or device will hold, before anything is read.

    Raises: CheckpointError that lists every missing, unknown or ill-shaped tensor;
    UnsupportedError for weights packed in a way that is not read; ResourceError, with the
    numbers, if weights and cache do not fit into the free memory; UsageError if the ranks cannot
    share the model, or `device_map` contradicts another argument.
    Example: `load_model("Llama-3.2-1B")(ids)` with ids [1, 12] -> logits [1, 1, 128256].
    """
    loaded = load_source(str(source), with_tensors=True)
    config, tables = runnable(loaded)
    place = find_device(device)
    kind = find_dtype(dtype, config)
    placement = None
    if device_map is not None:
        require_free_choice(device_map, device, is_shared=mesh is not None)
        load = Load(max_tokens, batch_size, max_images)
        placement = place_layers(
            config, local_devices(), load, dtype=dtype_name(kind), piece_tokens=piece_tokens
        )
        place = torch.device(placement.embedding_device)
        if announce is not None:
            announce(placement)
    with torch.device("meta"):
        model = Decoder(config, images=max_images > 0)
    if mesh is not None:
        from llamatool.model.parallel import parallelize

        parallelize(model, mesh)
        assert model.ranks is not None
        model.num_on_host = model.ranks.count_on_host() if place.type == "cpu" else 1
        if announce is not None:
            name = dtype_name(kind)
            announce(
                rank_memory(
                    config,
                    model.ranks.size,
                    dtype=name,
                    kv_dtype=name,
                    num_tokens=max_tokens,
                    batch_size=batch_size,
                    num_images=max_images,
                )
            )
    weights = Weights(config, tables, where=loaded.located.where, as_stored=False)
    if placement is not None and placement.is_spread:
        fill_spread(model, weights, kind, placement)
        return model.eval()
    require_memory(
        model,
        kind,
        place,
        max_tokens=max_tokens,
        batch_size=batch_size,
        max_images=max_images,
    )
    weights.fill(model, "", kind, place)
    return model.eval()


def runnable(loaded: LoadedSource) -> tuple[ModelConfig, Sequence[TensorTable]]:
    """Configuration and tensor tables of a source that can run.

    Raises: CheckpointError if it has no configuration or no weights; UnsupportedError if the
    weights are packed.
    """
    config, _ = loaded.need_config()
    if not loaded.tables or loaded.kind == "hub":
        raise CheckpointError(
            "there are no weights to run",
            where=loaded.source,
            hint="name a folder or file with weights on this machine",
        )
    if loaded.kind == "gguf" and loaded.located.path is not None:
        _require_little_endian(loaded.located.path)
    packed = config.quantization
    if packed is not None and config.source_format != "gguf":
        raise UnsupportedError(
            f"the weights are packed by `{packed.method}`, which is not run here",
            where=loaded.located.where,
            hint="take the bfloat16 release of this model",
        )
    return config, loaded.tables


def _require_little_endian(path: Path) -> None:
    with files.open_regular(path) as stream:
        version = int.from_bytes(files.read_exactly(stream, 8, path)[4:], "little")
    if version >= 65_536:  # the small version number stands in the last byte
        raise UnsupportedError("the tensors are stored big-endian", where=str(path))


def as_stored(config: ModelConfig) -> ModelConfig:
    """The configuration for weights whose rows of q and k stay as the file has them.

    Meta's files and GGUF keep the two elements of a rotated pair beside each other, so the model
    must rotate neighbours there. Running it that way checks a conversion without the code that
    exchanges the rows.
    """
    if config.source_format == "huggingface":
        return config
    return replace(config, rope=replace(config.rope, interleaved=True))


def find_device(name: str) -> torch.device:
    """The device of this name; `auto` is the first of CUDA, MPS and CPU that is here.

    Raises: UsageError for an unknown name, ResourceError for a device that is not here.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    kind, _, number = name.partition(":")
    if kind not in DEVICES[1:] or (number and not (kind == "cuda" and number.isdecimal())):
        raise UsageError(f"`{name[:80]}` is no device", hint=f"known are {', '.join(DEVICES)}")
    if (kind == "cuda" and not cuda) or (kind == "mps" and not mps):
        raise ResourceError(f"there is no {kind} device here", hint="use --device cpu")
    if number and int(number) >= torch.cuda.device_count():
        raise ResourceError(f"there is no `{name}`: {torch.cuda.device_count()} GPUs are here")
    return torch.device(name)


def local_devices() -> list[Device]:
    """The devices of this process that layers can be spread over, and what is free on each.

    The GPUs by number, then the CPU; where memory is shared with the GPU (MPS), that GPU alone.
    """
    here = find_device("auto")
    if here.type == "cuda":
        here_all = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        here_all.append(torch.device("cpu"))
    else:
        here_all = [here]
    return [Device(str(device), free_memory(device)) for device in here_all]


def dtype_name(dtype: torch.dtype) -> str:
    """The name as a configuration spells it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def find_dtype(name: str | None, config: ModelConfig) -> torch.dtype:
    """The dtype of this name, by default the checkpoint's.

    Raises: UsageError for a name that is no floating-point type of torch.
    """
    if name is None:
        return FLOATS.get(config.dtype or "", torch.bfloat16)
    known = by_name(name)
    if known is None or known.name not in FLOATS:
        raise UsageError(
            f"`{name[:80]}` is no dtype to compute in", hint=f"known are {', '.join(FLOATS)}"
        )
    return FLOATS[known.name]


def require_memory(
    model: Decoder,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_tokens: int,
    batch_size: int = 1,
    max_images: int = 0,
) -> None:
    """Checks that weights and cache fit into what is free, before anything is read.

    The weights are those of the modules that were built: the image tower where it is. An image
    counts with as many tiles as one may have.

    Raises: ResourceError with the numbers.
    """
    num_sharing = model.num_on_host
    free_bytes = free_memory(device, num_sharing=num_sharing)
    weight_bytes = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    name = dtype_name(dtype)
    cache = kv_cache(model.plan, dtype=name, vision=model.config.vision)
    cache_bytes = cache.num_bytes(max_tokens, batch_size=batch_size, num_images=max_images)
    images = f" and {max_images} images" if max_images and cache.bytes_per_image else ""
    if free_bytes is not None and weight_bytes + cache_bytes > free_bytes:
        raise ResourceError(
            f"weights in {name} take {format_bytes(weight_bytes)} and the KV cache of"
            f" {max_tokens:,} tokens{images} {format_bytes(cache_bytes)}, together"
            f" {format_bytes(weight_bytes + cache_bytes)}; {format_bytes(free_bytes)} are free"
            f" on {device}" + (f" for each of {num_sharing} ranks" if num_sharing > 1 else ""),
            hint="`llamatool kv-budget` shows what fits; a smaller dtype or fewer tokens need less",
        )


def free_memory(device: torch.device, *, num_sharing: int = 1) -> int | None:
    """Bytes free on `device`, or None where the system does not tell.

    On a CPU this is what Linux calls available: pages of mapped files count, because the system
    takes them back.

    Args: num_sharing: processes that take alike shares of it.
    """
    free_bytes = _free_memory(device)
    return None if free_bytes is None else free_bytes // num_sharing


def _free_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return None
