"""What the files hold against what the configuration asks for, tensor by tensor."""

import math
import re
from collections.abc import Sequence

from llamatool.checkpoint.names import (
    Part,
    TensorSpec,
    canonical_name,
    drop_reason,
    odd_name,
    tensor_specs,
)
from llamatool.checkpoint.tensors import TensorInfo, TensorTable
from llamatool.config.model import ModelConfig, Note
from llamatool.dtypes import by_name
from llamatool.records import record

_SHARD = re.compile(r".*-\d{5}-of-(\d{5})\.safetensors")
_FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})


@record
class Comparison:
    """The differences. A tensor is named once, in the first list that it belongs to."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    ill_shaped: tuple[str, ...]  # `name: found (..), expected (..)`
    ill_typed: tuple[str, ...]  # `name: found float32, expected bfloat16`
    notes: tuple[Note, ...]


def compare(tables: Sequence[TensorTable], config: ModelConfig) -> Comparison:
    """The differences between stored tensors and those of `config`.

    Meta's ranks are compared one by one, with their share of each shape. What every conversion
    leaves behind (RoPE frequencies, training statistics) is no difference but a note.
    Example: a tied configuration beside a stored `lm_head.weight` -> a note, no difference.
    """
    packed = odd_name(name for table in tables for name in table.tensors)
    if packed is not None:
        name, what, hint = packed
        note = Note("not-compared", f"`{name}` is {what}: the tensors were not compared; {hint}")
        return Comparison((), (), (), (), (note,))
    specs = tensor_specs(config)
    finder = _Finder(config)
    if tables[0].format == "pth" and config.source_format == "meta":
        for rank, table in enumerate(tables):
            prefix = f"rank {rank}: " if len(tables) > 1 else ""
            finder.compare_meta(specs, table, len(tables), prefix)
    else:
        gguf = tables[0].format == "gguf"
        for table in tables:
            finder.compare_whole(specs, table, gguf=gguf)
    return finder.result()


class _Finder:
    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        stated = by_name(config.dtype) if config.dtype else None
        self.dtype = stated.name if stated else None
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.ill_shaped: list[str] = []
        self.ill_typed: list[str] = []
        self.dropped: list[str] = []
        self.notes: list[Note] = []

    def result(self) -> Comparison:
        if self.dropped:
            what = f"`{self.dropped[0]}`"
            if len(self.dropped) > 1:
                what += f" and {len(self.dropped) - 1} more"
            self.notes.append(
                Note("left-behind", f"{what}: not needed, every conversion leaves it behind")
            )
        return Comparison(
            tuple(self.missing),
            tuple(self.unexpected),
            tuple(self.ill_shaped),
            tuple(self.ill_typed),
            tuple(self.notes),
        )

    def compare_whole(self, specs: Sequence[TensorSpec], table: TensorTable, *, gguf: bool) -> None:
        """A Hugging Face folder or a GGUF file: every tensor is whole."""
        found = {canonical_name(name, self.config): info for name, info in table.tensors.items()}
        if gguf:
            found = dict(table.tensors)
        partial = len(table.files) == 1 and _SHARD.fullmatch(table.files[0].name) is not None
        for spec in specs:
            name = spec.gguf if gguf else spec.name
            info = found.pop(name, None) if name else None
            if info is not None:
                self._check(name or spec.name, info, spec.shape, typed=not gguf)
                if spec.repeats is not None:
                    self._stored_copy(name or spec.name)
            elif name and spec.repeats is None and not partial:
                self.missing.append(name)
        if partial:
            self.notes.append(
                Note("one-shard", "this file is one shard of several: what is missing is not told")
            )
        self._rest(found, "")

    def compare_meta(
        self, specs: Sequence[TensorSpec], table: TensorTable, num_shards: int, prefix: str
    ) -> None:
        """One of Meta's ranks: every tensor is the rank's share."""
        rest = dict(table.tensors)
        self._count_shards(specs, table, num_shards)
        for spec in specs:
            if not spec.ways:
                continue
            way = next(
                (way for way in spec.ways if all(part.name in table.tensors for part in way)), None
            )
            if way is None:
                if spec.repeats is None:
                    self.missing += [prefix + part.name for part in spec.ways[0]]
                continue
            for part in way:
                rest.pop(part.name, None)
                self._check_share(prefix, table.tensors[part.name], part, num_shards)
        self._rest(rest, prefix)

    def _count_shards(
        self, specs: Sequence[TensorSpec], table: TensorTable, num_shards: int
    ) -> None:
        """Tells of files that are not there, by the share that a split matrix has in this one."""
        for spec in specs:
            for part in (part for way in spec.ways for part in way if part.axis is not None):
                info = table.tensors.get(part.name)
                if info is None or ".layers." not in f".{part.name}" or info.num_elements == 0:
                    continue
                count, rest = divmod(math.prod(part.stored_shape(1)), info.num_elements)
                if not rest and count != num_shards and not self.notes:
                    here = "1 is" if num_shards == 1 else f"{num_shards} are"
                    message = f"the shapes are those of {count} files, and {here} here"
                    self.notes.append(Note("shards-missing", message))
                return

    def _check_share(self, prefix: str, info: TensorInfo, part: Part, num_shards: int) -> None:
        expected = part.stored_shape(num_shards)
        rows, columns = part.shape[0], part.shape[-1]
        # Llama 1 and 2 split the input table by columns, later ones by rows; both are right.
        either = {(rows // num_shards, columns), (rows, columns // num_shards)}
        table = part.name.endswith("tok_embeddings.weight") and info.shape in either
        self._check(prefix + part.name, info, info.shape if table else expected)

    def _check(
        self, name: str, info: TensorInfo, expected: tuple[int, ...], *, typed: bool = True
    ) -> None:
        if info.shape != expected:
            self.ill_shaped.append(f"{name}: found {info.shape}, expected {expected}")
        elif typed and self.dtype and info.dtype.name != self.dtype and not self._packed():
            self.ill_typed.append(f"{name}: found {info.dtype.name}, expected {self.dtype}")

    def _packed(self) -> bool:
        return self.config.quantization is not None

    def _stored_copy(self, name: str) -> None:
        self.notes.append(
            Note("stored-copy", f"`{name}` is stored although the configuration ties it")
        )

    def _rest(self, rest: dict[str, TensorInfo], prefix: str) -> None:
        for name, info in rest.items():
            if drop_reason(name) is not None or info.num_elements == 0:
                self.dropped.append(name)
            else:
                self.unexpected.append(prefix + name)
