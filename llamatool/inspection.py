"""All that `inspect` says about one model, as one frozen value."""

from dataclasses import replace

from llamatool.checkpoint.locate import Kind
from llamatool.checkpoint.tensors import TensorTable
from llamatool.config.context import ContextVerdict, context_verdict
from llamatool.config.generation import Identity
from llamatool.config.layers import LayerSpec, plan_layers
from llamatool.config.license import LicenseTerms, license_terms
from llamatool.config.model import ModelConfig, Note
from llamatool.config.rope import RopeBands, frequency_bands
from llamatool.records import record
from llamatool.sizing.kv_cache import KvCache, kv_cache
from llamatool.sizing.parameters import ParameterCount, count_parameters
from llamatool.sizing.weights import StoredWeights, stored_weights, uniform_bytes
from llamatool.source import LoadedSource


@record
class TensorGroup:
    """Stored tensors of one element type."""

    dtype: str
    num_tensors: int
    num_elements: int
    num_bytes: int


@record
class CheckpointReport:
    """What the headers of the files say, and how that fits the configuration."""

    format: str  # safetensors, pth or gguf
    num_files: int
    num_tensors: int
    num_elements: int
    num_bytes: int
    by_dtype: tuple[TensorGroup, ...]  # largest first
    compared: bool  # whether there was a configuration to compare with
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ill_shaped: tuple[str, ...] = ()  # `name: found (..), expected (..)`
    ill_typed: tuple[str, ...] = ()
    kv_bytes_per_token: int | None = None  # read from the shapes, where there is no configuration


@record
class Inspection:
    """One source, inspected. The fields after `tables` are None for weights without a config."""

    source: str
    kind: Kind
    identity: Identity | None
    config: ModelConfig | None
    layers: tuple[LayerSpec, ...]
    parameters: ParameterCount | None
    weights_bytes: dict[str, int]
    stored: StoredWeights | None
    kv: KvCache | None
    bands: RopeBands | None
    context: ContextVerdict | None
    license: LicenseTerms | None
    checkpoint: CheckpointReport | None
    notes: tuple[Note, ...]


def inspect_source(loaded: LoadedSource, *, tokens: int | None = None) -> Inspection:
    """Everything that can be said about a loaded source.

    Args: tokens: length of a document that the context is asked about.
    Raises: LlamatoolError if the configuration contradicts itself.
    """
    config, identity = loaded.config, loaded.identity
    if config is None or identity is None:
        return _weights_only(loaded)
    layers = plan_layers(config)
    count = count_parameters(config)
    entry = identity.entry
    terms = None
    if entry is not None:
        terms = license_terms(
            entry.license, multimodal=config.vision is not None, note=entry.license_note
        )
    checkpoint, notes = _checkpoint(loaded, config)
    return Inspection(
        source=loaded.source,
        kind=loaded.kind,
        identity=identity,
        config=config,
        layers=layers,
        parameters=count,
        weights_bytes=uniform_bytes(count),
        stored=_stored(loaded, config, count, checkpoint),
        kv=kv_cache(layers, vision=config.vision),
        bands=frequency_bands(
            config.rope, config.head_dim, max_position_embeddings=config.max_position_embeddings
        ),
        context=context_verdict(config, layers, entry, tokens),
        license=terms,
        checkpoint=checkpoint,
        notes=loaded.notes + notes,
    )


def _weights_only(loaded: LoadedSource) -> Inspection:
    note = Note(
        "no-config",
        "no config.json beside the weights: described from the tensor headers alone",
    )
    return Inspection(
        source=loaded.source,
        kind=loaded.kind,
        identity=None,
        config=None,
        layers=(),
        parameters=None,
        weights_bytes={},
        stored=None,
        kv=None,
        bands=None,
        context=None,
        license=None,
        checkpoint=_summary(loaded.tables, compared=False),
        notes=(*loaded.notes, note),
    )


def _summary(tables: tuple[TensorTable, ...], *, compared: bool) -> CheckpointReport:
    groups: dict[str, list[int]] = {}
    for table in tables:
        for tensor in table.tensors.values():
            sums = groups.setdefault(tensor.dtype.name, [0, 0, 0])
            sums[0] += 1
            sums[1] += tensor.num_elements
            sums[2] += tensor.num_bytes
    by_dtype = sorted(
        (TensorGroup(name, *sums) for name, sums in groups.items()),
        key=lambda group: -group.num_bytes,
    )
    return CheckpointReport(
        format=tables[0].format,
        num_files=sum(len(table.files) for table in tables),
        num_tensors=sum(group.num_tensors for group in by_dtype),
        num_elements=sum(group.num_elements for group in by_dtype),
        num_bytes=sum(group.num_bytes for group in by_dtype),
        by_dtype=tuple(by_dtype),
        compared=compared,
        kv_bytes_per_token=None if compared else _kv_from_shapes(tables),
    )


def _kv_from_shapes(tables: tuple[TensorTable, ...]) -> int | None:
    """Bytes per token from the rows of every self-attention layer's k_proj, keys and values.

    Image towers and cross-attention layers own tensors of that name too; they do not count.
    """
    total = 0
    for table in tables:
        for name, tensor in table.tensors.items():
            language = ".layers." in name and "vision" not in name
            if language and name.endswith(".self_attn.k_proj.weight"):
                total += 2 * tensor.shape[0] * 2  # bfloat16
    return total or None


def _checkpoint(
    loaded: LoadedSource, config: ModelConfig
) -> tuple[CheckpointReport | None, tuple[Note, ...]]:
    """The report on the files and the notes that belong to it."""
    if not loaded.tables:
        return None, ()
    from llamatool.checkpoint.compare import compare

    summary = _summary(loaded.tables, compared=True)
    found = compare(loaded.tables, config)
    report = replace(
        summary,
        compared=not any(note.code == "not-compared" for note in found.notes),
        missing=found.missing,
        unexpected=found.unexpected,
        ill_shaped=found.ill_shaped,
        ill_typed=found.ill_typed,
    )
    return report, found.notes


def _stored(
    loaded: LoadedSource,
    config: ModelConfig,
    count: ParameterCount,
    report: CheckpointReport | None,
) -> StoredWeights:
    """Bytes of the weights: read from the headers where all of them are at hand."""
    if report is None or loaded.kind == "safetensors":
        return stored_weights(config, count)
    types = ", ".join(group.dtype for group in report.by_dtype)
    return StoredWeights(report.num_bytes, types, True)
