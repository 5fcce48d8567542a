"""SOURCE to model: what every command does first, whatever kind of source it is given."""

from collections.abc import Callable
from dataclasses import replace
from typing import BinaryIO

from llamatool.checkpoint.locate import Kind, Source, locate, read_tensors
from llamatool.checkpoint.tensors import TensorTable
from llamatool.config import catalog
from llamatool.config.generation import Identity, completed, identify
from llamatool.config.huggingface import parse_huggingface
from llamatool.config.meta import embedding_rows, parse_meta, states_vocabulary
from llamatool.config.model import ModelConfig, Note
from llamatool.errors import CheckpointError
from llamatool.records import record

Progress = Callable[[int, int], None]  # done, total


@record
class LoadedSource:
    """A source with its configuration, the verdict on it, and its tensor tables if asked for."""

    source: str  # as the user gave it
    kind: Kind
    located: Source
    config: ModelConfig | None  # None: weights without a configuration
    identity: Identity | None
    tables: tuple[TensorTable, ...]  # one per model-parallel rank in Meta's layout, else one
    notes: tuple[Note, ...]

    def need_config(self) -> tuple[ModelConfig, Identity]:
        """Configuration and verdict.

        Raises: CheckpointError if the source is weights without a configuration.
        """
        if self.config is None or self.identity is None:
            raise CheckpointError(
                "there is no config.json beside these weights",
                where=self.source,
                hint="put the model's config.json into the same folder",
            )
        return self.config, self.identity


def load_source(
    source: str,
    *,
    with_tensors: bool = False,
    stdin: BinaryIO | None = None,
    progress: Progress | None = None,
) -> LoadedSource:
    """The model that `source` names, its headers too where `with_tensors` asks for them.

    Args: progress: told shards done and shards in all, where headers come from the hub.
    Raises: LlamatoolError of the kind that fits: unreadable or unknown input, the hub.
    """
    located = locate(source, stdin=stdin)
    if located.kind == "catalog":
        return _from_catalog(source, located)
    if located.kind == "hub":
        return _from_hub(source, located, progress)
    if located.kind == "gguf":
        return _from_gguf(source, located)
    tables: tuple[TensorTable, ...] = ()
    weights = located.kind in ("safetensors", "index") or located.config is None
    if with_tensors or weights or _vocabulary_unknown(located):
        tables = read_tensors(located)
    config = None
    if located.config is not None:
        config = _parsed(located, tables)
    return _loaded(source, located, config, tables)


def _parsed(located: Source, tables: tuple[TensorTable, ...]) -> ModelConfig:
    assert located.config is not None
    if located.config_format == "meta":
        shapes = [{name: info.shape for name, info in t.tensors.items()} for t in tables]
        rows = embedding_rows(located.config, shapes)
        return parse_meta(located.config, where=located.where, embedding_rows=rows)
    return parse_huggingface(located.config, where=located.where)


def _vocabulary_unknown(located: Source) -> bool:
    """Whether a params.json leaves the vocabulary to the weights beside it."""
    if located.kind != "meta_folder" or located.config is None:
        return False
    return not states_vocabulary(located.config)


def _from_catalog(source: str, located: Source) -> LoadedSource:
    entry = catalog.find(source)
    assert entry is not None
    verdict = identify(entry.config)
    # The user named the model: what its configuration alone leaves open is settled.
    identity = replace(
        verdict,
        family="llama",
        generation=entry.generation,
        model=entry.id,
        variant=entry.variant,
        confidence="certain",
        candidates=(),
        notes=tuple(n for n in verdict.notes if n.code != "rope-theta-lost"),
    )
    notes = entry.config.notes + identity.notes
    return LoadedSource(source, "catalog", located, entry.config, identity, (), notes)


def _from_hub(source: str, located: Source, progress: Progress | None) -> LoadedSource:
    from llamatool.checkpoint import hub

    assert located.hub_id is not None
    repository = hub.read_repository(located.hub_id, progress=progress)
    located = replace(located, config=repository.config, config_format=repository.config_format)
    tables = (repository.table,) if repository.table else ()
    return _loaded(source, located, _parsed(located, tables), tables)


def _from_gguf(source: str, located: Source) -> LoadedSource:
    from llamatool.checkpoint import gguf
    from llamatool.config.gguf import parse_gguf

    assert located.path is not None
    file = gguf.read_file(located.path)
    shapes = {name: tensor.shape for name, tensor in file.table.tensors.items()}
    config = parse_gguf(
        file.metadata,
        shapes=shapes,
        where=str(located.path),
        rope_divisors=gguf.rope_divisors(file),
    )
    return _loaded(source, located, config, (file.table,))


def _loaded(
    source: str, located: Source, config: ModelConfig | None, tables: tuple[TensorTable, ...]
) -> LoadedSource:
    if config is None:
        return LoadedSource(source, located.kind, located, None, None, tables, ())
    identity = identify(config)
    config = completed(config, identity)
    notes = config.notes + identity.notes
    if config.dtype is None and tables:
        dtype = main_dtype(tables)
        config = replace(config, dtype=dtype, origins={**config.origins, "dtype": "derived"})
        notes = tuple(note for note in notes if note.code != "dtype-missing")
    return LoadedSource(source, located.kind, located, config, identity, tables, notes)


def main_dtype(tables: tuple[TensorTable, ...]) -> str | None:
    """The element type that holds most elements, or None without tensors."""
    elements: dict[str, int] = {}
    for table in tables:
        for tensor in table.tensors.values():
            name = tensor.dtype.name
            elements[name] = elements.get(name, 0) + tensor.num_elements
    return max(elements, key=lambda name: elements[name], default=None)
