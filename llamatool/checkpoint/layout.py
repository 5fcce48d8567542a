"""A checkpoint with its tensors resolved: which stored tensor holds which part of the model.

Everything that can be checked before the first byte is read is checked here: each stored tensor
is used once or stands on the list of those left behind, each expected tensor is there, each shape
is the one that the configuration gives.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llamatool.checkpoint import names
from llamatool.checkpoint.names import Layout, Part, TensorSpec
from llamatool.checkpoint.tensors import TensorInfo, TensorTable
from llamatool.config.model import ModelConfig, Note
from llamatool.dtypes import DType
from llamatool.errors import CheckpointError, UnsupportedError

_PLAIN = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The stored tensors of a model in one layout, and the configuration they belong to."""

    layout: Layout
    path: Path
    config: ModelConfig
    tables: tuple[TensorTable, ...]  # one per rank in Meta's layout, else one
    byte_order: str = "<"  # of GGUF files

    @property
    def num_shards(self) -> int:
        """Model-parallel ranks of Meta's layout; 1 for the others."""
        return len(self.tables)


@dataclass(frozen=True, slots=True)
class Holding:
    """Where one tensor of the model lies.

    `infos` has a tuple per part, with one stored tensor per rank that holds a share of its own.
    """

    spec: TensorSpec
    parts: tuple[Part, ...]  # (): the stored tensor is the whole one
    infos: tuple[tuple[TensorInfo, ...], ...]
    replicas: tuple[tuple[TensorInfo, ...], ...]  # tensors of other ranks that must be equal
    repeat: int = 1  # ranks that hold the same share, one after the other

    @property
    def dtype(self) -> DType:
        """Element type as stored."""
        return self.infos[0][0].dtype

    @property
    def num_shards(self) -> int:
        """Ranks with a share of their own."""
        return max(len(infos) for infos in self.infos)


@dataclass(frozen=True, slots=True)
class Resolved:
    """All tensors of a checkpoint, by Hugging Face name."""

    checkpoint: Checkpoint
    holdings: Mapping[str, Holding]
    repeats: Mapping[str, Holding]  # stored copies of tied tensors
    dropped: tuple[tuple[str, str], ...]  # name, reason
    notes: tuple[Note, ...]


def resolve(checkpoint: Checkpoint) -> Resolved:
    """Every tensor that the configuration asks for, found and checked.

    Raises: CheckpointError for missing, unexpected or ill-shaped tensors, listing them;
    UnsupportedError for quantised weights and adapters.
    """
    _refuse_odd(checkpoint)
    checkpoint, notes = _fitted(checkpoint)
    finder = _Finder(checkpoint)
    holdings: dict[str, Holding] = {}
    repeats: dict[str, Holding] = {}
    missing: list[str] = []
    for spec in names.tensor_specs(checkpoint.config):
        holding = finder.find(spec)
        if holding is not None:
            (repeats if spec.repeats else holdings)[spec.name] = holding
        elif spec.repeats is None:
            missing.append(finder.wanted(spec))
    dropped, unknown = finder.leftovers()
    _refuse(checkpoint, missing, unknown)
    return Resolved(checkpoint, holdings, repeats, dropped, notes)


def shares_of(spec: TensorSpec, config: ModelConfig, num_shards: int) -> tuple[int, int]:
    """Ranks that hold a different share of `spec`, and how many hold the same one.

    With more ranks than key/value heads, each head is stored for several ranks.
    Example: 8 heads on 16 ranks -> (8, 2).
    Raises: UnsupportedError if neither number divides the other.
    """
    heads = config.num_key_value_heads
    is_kv = "_attn.k_proj." in spec.name or "_attn.v_proj." in spec.name
    if not is_kv or spec.name.startswith("vision_model.") or heads % num_shards == 0:
        return num_shards, 1
    if num_shards % heads:
        raise UnsupportedError(
            f"{heads} key/value heads cannot be shared by {num_shards} ranks",
            hint=f"take a multiple or a divisor of {heads}",
        )
    return heads, num_shards // heads


class _Finder:
    """Looks up stored tensors and remembers which have been used."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.used: set[str] = set()
        self.by_name: list[dict[str, TensorInfo]] = []
        for table in checkpoint.tables:
            found: dict[str, TensorInfo] = {}
            for name, info in table.tensors.items():
                if checkpoint.layout == "meta" and info.shape == (0,):
                    continue  # Meta's files mark parameters without values so
                key = name
                if checkpoint.layout == "huggingface":
                    key = names.canonical_name(name, checkpoint.config)
                if key in found:
                    raise CheckpointError(
                        f"`{name}` and `{found[key].name}` are the same tensor",
                        where=str(checkpoint.path),
                    )
                found[key] = info
            self.by_name.append(found)

    def wanted(self, spec: TensorSpec) -> str:
        """The name that a missing tensor would have in this layout."""
        if self.checkpoint.layout == "meta":
            return spec.ways[0][0].name if spec.ways else spec.name
        return (spec.gguf or spec.name) if self.checkpoint.layout == "gguf" else spec.name

    def find(self, spec: TensorSpec) -> Holding | None:
        if self.checkpoint.layout == "meta":
            return self._find_parts(spec)
        key = spec.gguf if self.checkpoint.layout == "gguf" else spec.name
        info = self.by_name[0].get(key) if key is not None else None
        if info is None or key is None:
            return None
        self.used.add(key)
        self._check_shape(info, spec.shape)
        self._check_dtype((info,))
        return Holding(spec, (), ((info,),), ())

    def _find_parts(self, spec: TensorSpec) -> Holding | None:
        for way in spec.ways:
            if not all(part.name in tensors for part in way for tensors in self.by_name):
                continue
            return self._holding(spec, way)
        return None

    def _holding(self, spec: TensorSpec, way: tuple[Part, ...]) -> Holding:
        shares, repeat = shares_of(spec, self.checkpoint.config, self.checkpoint.num_shards)
        parts, infos, replicas = [], [], []
        for part in way:
            stored = tuple(tensors[part.name] for tensors in self.by_name)
            part = self._split_as_stored(part, stored[0], shares)
            for info in stored:
                self._check_shape(info, part.stored_shape(shares))
            self._check_dtype(stored)
            self.used.add(part.name)
            parts.append(part)
            if part.axis is None:
                infos.append(stored[:1])
                replicas.append(stored)
            else:
                infos.append(stored[::repeat])
                for first in range(0, len(stored), repeat):
                    if repeat > 1:
                        replicas.append(stored[first : first + repeat])
        kept = tuple(group for group in replicas if len(group) > 1)
        return Holding(spec, tuple(parts), tuple(infos), kept, repeat)

    def _split_as_stored(self, part: Part, info: TensorInfo, num_shards: int) -> Part:
        """The input table is split by rows or by columns; its shape tells."""
        if not part.name.endswith("tok_embeddings.weight") or part.axis is None:
            return part
        other = replace(part, axis=1 - part.axis)
        fits = info.shape == part.stored_shape(num_shards)
        return other if not fits and info.shape == other.stored_shape(num_shards) else part

    def _check_shape(self, info: TensorInfo, expected: tuple[int, ...]) -> None:
        if info.shape != expected:
            raise CheckpointError(
                f"tensor `{info.name}` has the shape {list(info.shape)}, the configuration gives"
                f" {list(expected)}",
                where=str(info.file),
                hint="the configuration belongs to another model, or the file is a part of it",
            )

    def _check_dtype(self, infos: tuple[TensorInfo, ...]) -> None:
        first = infos[0].dtype
        quantised = self.checkpoint.layout == "gguf" and first.block_elements > 1
        if first.name not in _PLAIN and not quantised:
            raise UnsupportedError(
                f"tensor `{infos[0].name}` is stored as {first.name}",
                where=str(infos[0].file),
                hint="take the release in bfloat16 or float16",
            )
        for info in infos:
            if info.dtype != first:
                raise CheckpointError(
                    f"tensor `{info.name}` is {first.name} in one shard and {info.dtype.name} in"
                    " another",
                    where=str(info.file),
                )

    def leftovers(self) -> tuple[tuple[tuple[str, str], ...], list[str]]:
        """Unused tensors: those that are left behind, with the reason, and unknown ones."""
        dropped: dict[str, str] = {}
        unknown: dict[str, None] = {}
        for table in self.checkpoint.tables:
            for name, info in table.tensors.items():
                key = name
                if self.checkpoint.layout == "huggingface":
                    key = names.canonical_name(name, self.checkpoint.config)
                if key in self.used:
                    continue
                reason = names.drop_reason(name)
                if reason is None and info.shape == (0,) and self.checkpoint.layout == "meta":
                    reason = "no values"
                if reason is None:
                    unknown[name] = None
                else:
                    dropped[name] = reason
            for name in table.other:
                dropped[name] = names.drop_reason(name) or "no tensor"
        return tuple(dropped.items()), list(unknown)


def _refuse_odd(checkpoint: Checkpoint) -> None:
    """Refuses adapters and quantised releases by their tensors' names."""
    odd = names.odd_name(name for table in checkpoint.tables for name in table.tensors)
    if odd is not None:
        name, what, hint = odd
        raise UnsupportedError(
            f"`{name}` is {what}, which cannot be converted", where=str(checkpoint.path), hint=hint
        )
    if checkpoint.layout == "meta" and checkpoint.path.is_dir():
        from llamatool.checkpoint import pth

        scales = pth.side_files(checkpoint.path)
        if scales:
            raise UnsupportedError(
                f"`{scales[0].name}` holds scales: the shards are quantised",
                where=str(checkpoint.path),
                hint="take the bfloat16 release",
            )
    quantization = checkpoint.config.quantization
    if checkpoint.layout != "gguf" and quantization is not None:
        raise UnsupportedError(
            f"the weights are quantised ({quantization.method})",
            where=str(checkpoint.path),
            hint="take the unquantised release",
        )


def _fitted(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[Note, ...]]:
    """The checkpoint with the feed-forward width of its tensors, which win over a formula."""
    config = checkpoint.config
    if checkpoint.layout != "meta" or config.model_type.startswith("llama4"):
        return checkpoint, ()
    for name in ("layers.0.feed_forward.w1.weight", "text_model.layers.0.feed_forward.w1.weight"):
        infos = [t.tensors[name] for t in checkpoint.tables if name in t.tensors]
        if len(infos) != len(checkpoint.tables) or not infos or len(infos[0].shape) != 2:
            continue
        rows = infos[0].shape[0] * len(infos)
        if rows != config.intermediate_size:
            note = Note(
                "feed-forward-differs",
                f"params.json gives a feed-forward width of {config.intermediate_size}, the"
                f" tensors have {rows}; the tensors count",
            )
            config = replace(config, intermediate_size=rows)
            return replace(checkpoint, config=config), (note,)
    return checkpoint, ()


def _refuse(checkpoint: Checkpoint, missing: list[str], unknown: list[str]) -> None:
    where = str(checkpoint.path)
    if unknown:
        close = difflib.get_close_matches(unknown[0], missing, n=1)
        raise CheckpointError(
            f"{_count(unknown, 'tensor')} that this model does not have: {_list(unknown)}",
            where=where,
            hint=f"`{close[0]}` is missing" if close else "is the configuration of this model?",
        )
    if missing:
        raise CheckpointError(
            f"{_count(missing, 'missing tensor')}: {_list(missing)}",
            where=where,
            hint="the download may be incomplete, or the configuration of another model",
        )


def _count(items: list[str], what: str) -> str:
    return f"{len(items)} {what}" + ("s" if len(items) > 1 else "")


def _list(items: list[str]) -> str:
    return ", ".join(f"`{item[:120]}`" for item in items[:3]) + (", ..." if len(items) > 3 else "")
