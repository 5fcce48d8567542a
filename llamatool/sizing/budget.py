"""One model's whole answer: its cache, its weights, and whether they fit where they should."""

from collections.abc import Sequence
from dataclasses import field, replace
from fractions import Fraction
from typing import Literal

from llamatool.config.catalog import CatalogEntry
from llamatool.config.context import ContextVerdict, context_verdict
from llamatool.config.layers import LayerSpec, plan_layers, split_layers
from llamatool.config.model import ModelConfig, Note
from llamatool.dtypes import DType, by_name
from llamatool.errors import UsageError
from llamatool.records import record
from llamatool.sizing.curve import Crossing, crossings, curve_lengths
from llamatool.sizing.fit import (
    Assumptions,
    Fit,
    Load,
    Weights,
    check,
    fit,
    largest_machine,
    smallest_machine,
)
from llamatool.sizing.hardware import Machine
from llamatool.sizing.kv_cache import (
    POLICIES,
    KvCache,
    Policy,
    image_positions,
    image_tokens,
    kv_cache,
    kv_dtype,
    with_kv_heads,
)
from llamatool.sizing.parameters import ParameterCount, count_parameters
from llamatool.sizing.weights import stored_weights

DEFAULT_TOKENS = 8192

# Weights and cache, mildest first.
_REMEDIES: tuple[tuple[str | None, str | None], ...] = (
    (None, "fp8"),
    ("int8", None),
    ("int8", "fp8"),
    ("int4", None),
    ("int4", "fp8"),
    ("int4", "q4_0"),
)

VLLM_VARIABLE = "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"


@record
class Document:
    """A text whose tokens are asked about."""

    name: str
    num_bytes: int
    num_tokens: int
    exact: bool  # counted with the model's own tokenizer
    counted_by: str  # that tokenizer, or how it was estimated


@record
class Question:
    """What is asked about each model."""

    load: Load
    kv_dtype: str = "bfloat16"
    weights_dtype: str | None = None  # None: as the configuration describes the files
    scheme: str | None = None  # what-if: mha, gqa:N or mqa
    machine: Machine | Literal["smallest"] | None = None
    assumptions: Assumptions = field(default_factory=Assumptions)
    curve: bool = False
    alternatives: bool = True  # if it does not fit: search what would
    document: Document | None = None


@record
class Subject:
    """A model to ask about."""

    source: str  # as the user named it
    model: str | None  # the published model it is, if that is known
    config: ModelConfig
    entry: CatalogEntry | None = None  # of that model
    file_bytes: int | None = None  # of the stored tensors, where they were read
    notes: tuple[Note, ...] = ()


@record
class WeightsAnswer:
    """Bytes of the weights and where the figure comes from."""

    num_bytes: int
    description: str
    exact: bool


@record
class LayerCounts:
    """Layers by kind of attention."""

    full: int
    chunked: int
    sliding: int
    cross: int
    window: int | None  # tokens, of the chunked or sliding layers


@record
class CurvePoint:
    """The capped cache at one length."""

    num_tokens: int
    num_bytes: int


@record
class Budget:
    """The answer for one model; all bytes are exact unless they say otherwise."""

    subject: Subject
    question: Question
    layers: LayerCounts
    cache: KvCache
    kv_equation: str
    kv_bytes: int  # headline: capped
    kv_bytes_by_policy: dict[Policy, int]
    weights: WeightsAnswer
    fit: Fit | None
    unshared: str | None  # why so many devices cannot share the model; then there is no `fit`
    remedy: str | None  # options with which it would fit in memory
    context: ContextVerdict
    curve: tuple[CurvePoint, ...]  # at the powers of two
    plot: tuple[CurvePoint, ...]  # at eight lengths for each of them
    document: Document | None
    notes: tuple[Note, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of weights and cache, on all devices together if nothing is replicated."""
        return self.weights.num_bytes + self.kv_bytes


def kv_budget(subject: Subject, question: Question) -> Budget:
    """What one model's cache costs, and whether it fits.

    Raises: UsageError if an element type, a scheme or an assumption makes no sense.
    Example: Llama 4 Scout, 100000 tokens, bfloat16 -> 6123159552 bytes, capped.
    """
    check(question.load, question.assumptions)
    config = subject.config
    if question.scheme is not None:
        config = with_kv_heads(config, question.scheme)
    layers = plan_layers(config)
    count = count_parameters(config)
    weights, answer = weights_of(
        config, count, layers, question.weights_dtype, file_bytes=_file_bytes(subject, question)
    )
    cache = kv_cache(layers, dtype=question.kv_dtype, vision=config.vision)
    by_policy = {policy: _bytes(cache, question, policy) for policy in POLICIES}
    unshared = _unshared(layers, question.machine)
    found = None if unshared else _fit(config, layers, weights, question)
    context = context_verdict(config, layers, subject.entry, question.load.num_tokens)
    return Budget(
        subject=subject,
        question=question,
        layers=_layer_counts(layers),
        cache=cache,
        kv_equation=_kv_equation(layers, cache, question),
        kv_bytes=by_policy["capped"],
        kv_bytes_by_policy=by_policy,
        weights=answer,
        fit=found,
        unshared=unshared,
        remedy=_remedy(subject, config, layers, question, found),
        context=context,
        curve=_curve(cache, config, question, 1) if question.curve else (),
        plot=_curve(cache, config, question, 8) if question.curve else (),
        document=question.document,
        notes=tuple(_notes(subject, config, layers, question, found, unshared, context)),
    )


def weights_of(
    config: ModelConfig,
    count: ParameterCount,
    layers: Sequence[LayerSpec],
    dtype: str | None = None,
    *,
    file_bytes: int | None = None,
) -> tuple[Weights, WeightsAnswer]:
    """Weight bytes in memory, each tensor once, by what tensor parallelism does with them.

    Args: dtype: of every parameter; None: as the configuration describes the files.
    file_bytes: what the files really hold, where that was read.
    Raises: UsageError if the element type is unknown.
    Example: Llama 3.1 70B -> 141107412992 bytes, of which 2637824 are norms.
    """
    element = _element(dtype or config.dtype or "bfloat16")
    # A file that packs its weights, or that was read, may hold several types.
    of_file = dtype is None and (config.quantization is not None or file_bytes is not None)
    base_bits = Fraction(8 * element.block_bytes, element.block_elements)
    if dtype is None and file_bytes is not None:
        answer = WeightsAnswer(file_bytes, "as stored in the file", True)
    elif dtype is None:
        # A tied output table is a copy in Meta's files, but not in memory.
        stored = stored_weights(config, replace(count, stored=count.total))
        answer = WeightsAnswer(stored.num_bytes, stored.description, stored.exact)
    else:
        answer = WeightsAnswer(
            element.num_bytes(count.total), f"every parameter in {element.name}", True
        )
    quantized = config.quantization is not None and dtype is None
    bits = config.quantization.bits if config.quantization is not None and quantized else None
    linear_bits = Fraction(bits) if bits is not None else base_bits
    replicated = _num_bytes(count.replicated, base_bits)
    by_heads: dict[int, int] = {}
    for layer in layers:
        elements = layer.kv_width * (config.hidden_size + layer.attention_bias)
        heads = layer.num_key_value_heads
        by_heads[heads] = by_heads.get(heads, 0) + elements
    projections = tuple(
        (heads, _num_bytes(elements, linear_bits)) for heads, elements in by_heads.items()
    )
    cut_by_heads = sum(num_bytes for _, num_bytes in projections)
    idle = _num_bytes(count.vision, base_bits)
    if not config.tie_word_embeddings:  # a tied table is read as the output table
        idle += _num_bytes(config.embedding_rows * config.hidden_size, base_bits)
    if count.active is not None:
        idle += _num_bytes(count.text - count.active.total, linear_bits)
    return (
        Weights(
            sharded_bytes=answer.num_bytes - replicated - cut_by_heads,
            replicated_bytes=replicated,
            kv_projections=projections,
            read_share=Fraction(max(answer.num_bytes - idle, 0), answer.num_bytes),
            dtype=None if of_file else element,
        ),
        answer,
    )


def compare(budgets: Sequence[Budget]) -> tuple[Crossing, ...]:
    """Where the caches of two of the models cross, within the longer of their contexts."""
    longest = max(_longest(budget.subject.config) for budget in budgets)
    named = [(name_of(budget.subject), budget.cache) for budget in budgets]
    load = budgets[0].question.load
    return crossings(named, longest, batch_size=load.batch_size, num_images=load.num_images)


def name_of(subject: Subject) -> str:
    """The model's name, or that of its source."""
    return subject.model or subject.source


def _fit(
    config: ModelConfig, layers: Sequence[LayerSpec], weights: Weights, question: Question
) -> Fit | None:
    machine = question.machine
    if machine is None:
        return None
    load, dtype, how = question.load, question.kv_dtype, question.assumptions
    smallest = None
    if machine == "smallest":
        smallest = smallest_machine(config, layers, weights, load, kv_dtype=dtype, assumptions=how)
        machine = smallest or largest_machine(layers)
    found = fit(config, layers, weights, machine, load, kv_dtype=dtype, assumptions=how)
    if smallest is None and not found.fits_memory and question.alternatives:
        smallest = smallest_machine(config, layers, weights, load, kv_dtype=dtype, assumptions=how)
    return replace(found, smallest=smallest)


def _unshared(
    layers: Sequence[LayerSpec], machine: Machine | Literal["smallest"] | None
) -> str | None:
    """Why the devices of a machine cannot share a model, and how many can; None if they can."""
    if not isinstance(machine, Machine):
        return None
    try:
        split_layers(layers, machine.count)
    except UsageError as error:
        return f"{error.what}; {error.hint}"
    return None


def _file_bytes(subject: Subject, question: Question) -> int | None:
    """Bytes of the stored tensors, unless the question is about another model than they hold."""
    return subject.file_bytes if question.scheme is None else None


def _remedy(
    subject: Subject,
    config: ModelConfig,
    layers: Sequence[LayerSpec],
    question: Question,
    found: Fit | None,
) -> str | None:
    """The mildest change of element types with which it would fit, if one does."""
    if found is None or found.fits_memory or not question.alternatives:
        return None
    count = count_parameters(config)
    for weights_dtype, cache_dtype in _REMEDIES:
        weights, _ = weights_of(
            config,
            count,
            layers,
            weights_dtype or question.weights_dtype,
            file_bytes=_file_bytes(subject, question),
        )
        other = fit(
            config,
            layers,
            weights,
            found.machine,
            question.load,
            kv_dtype=cache_dtype or question.kv_dtype,
            assumptions=question.assumptions,
        )
        if other.fits_memory:
            options = [f"--weights {weights_dtype}"] if weights_dtype else []
            return " ".join(options + ([f"--kv-dtype {cache_dtype}"] if cache_dtype else []))
    return None


def _bytes(cache: KvCache, question: Question, policy: Policy) -> int:
    return cache.num_bytes(
        question.load.num_tokens,
        batch_size=question.load.batch_size,
        num_images=question.load.num_images,
        policy=policy,
        max_batched_tokens=question.assumptions.max_batched_tokens,
    )


def _layer_counts(layers: Sequence[LayerSpec]) -> LayerCounts:
    kinds = [layer.attention for layer in layers]
    return LayerCounts(
        full=kinds.count("full"),
        chunked=kinds.count("chunked"),
        sliding=kinds.count("sliding"),
        cross=kinds.count("cross"),
        window=next((layer.window for layer in layers if layer.window is not None), None),
    )


def _kv_equation(layers: Sequence[LayerSpec], cache: KvCache, question: Question) -> str:
    """The formula with this model's numbers: `2 x 32 layers x 8 heads x 128 x 2 B x 8,192`."""
    load = question.load
    dtype = kv_dtype(question.kv_dtype)
    if dtype.block_elements == 1:
        element = f"{dtype.block_bytes} B"
    else:
        element = f"{dtype.block_bytes}/{dtype.block_elements} B"
    terms = []
    for group in cache.groups:
        members = [
            layer
            for layer in layers
            if layer.attention == group.attention and layer.window == group.window
        ]
        heads = {layer.num_key_value_heads for layer in members}
        # Where the heads differ by layer, their sum stands for layers x heads.
        shape = (
            f"{group.num_layers} layers x {heads.pop()} KV heads"
            if len(heads) == 1
            else f"{sum(layer.num_key_value_heads for layer in members)} KV heads of all layers"
        )
        held = load.num_tokens if group.window is None else min(load.num_tokens, group.window)
        terms.append(f"2 x {shape} x {members[0].head_dim} x {element} x {held:,} tokens")
    if load.num_images and cache.bytes_per_image:
        terms.append(f"{load.num_images} images x {cache.bytes_per_image:,} B")
    total = "\n+ ".join(terms)
    return total if load.batch_size == 1 else f"{load.batch_size} sequences, each\n  {total}"


def _curve(
    cache: KvCache, config: ModelConfig, question: Question, steps: int
) -> tuple[CurvePoint, ...]:
    return tuple(
        CurvePoint(
            num_tokens,
            cache.num_bytes(
                num_tokens,
                batch_size=question.load.batch_size,
                num_images=question.load.num_images,
            ),
        )
        for num_tokens in curve_lengths(_longest(config), steps=steps)
    )


def _longest(config: ModelConfig) -> int:
    return config.max_position_embeddings or 131_072


def _notes(
    subject: Subject,
    config: ModelConfig,
    layers: Sequence[LayerSpec],
    question: Question,
    found: Fit | None,
    unshared: str | None,
    context: ContextVerdict,
) -> list[Note]:
    notes = list(subject.notes)
    notes += _context_notes(context)
    notes += _image_notes(config, question.load)
    notes += _head_notes(subject, layers, question)
    if unshared is not None:
        notes.append(Note("cannot-share", unshared))
    if found is not None:
        notes += _parallel_notes(layers, found)
    return notes


def _context_notes(context: ContextVerdict) -> list[Note]:
    asked, stated, trained = (
        context.asked_tokens,
        context.max_position_embeddings,
        context.trained_context,
    )
    if context.answer is None or asked is None:
        return []
    if stated is None:
        return [Note("context-unknown", context.answer)]
    if asked > stated:
        return [Note("beyond-context", context.answer)]
    if trained is not None and asked > trained:
        return [Note("beyond-training", context.answer)]
    return []


def _image_notes(config: ModelConfig, load: Load) -> list[Note]:
    if not load.num_images or image_positions(config.vision):
        return []
    if config.vision is not None:
        fewest, most = (load.num_images * tokens for tokens in image_tokens(config.vision))
        what = (
            "its images are tokens of the text: count them in --tokens"
            f" ({fewest:,} to {most:,}, by size and shape)"
        )
    else:
        what = "it reads no images"
    return [Note("images", f"--images adds nothing here: {what}")]


def _head_notes(subject: Subject, layers: Sequence[LayerSpec], question: Question) -> list[Note]:
    notes = []
    dtype = kv_dtype(question.kv_dtype)
    head_dim = layers[0].head_dim
    if head_dim % dtype.block_elements:
        notes.append(
            Note(
                "partial-block",
                f"head_dim {head_dim} is no multiple of the {dtype.block_elements} values of a "
                f"{dtype.name} block: the last block of each head is counted whole, and engines "
                "may refuse it",
            )
        )
    if subject.entry and subject.entry.unique_total and question.scheme is None:
        notes.append(
            Note(
                "duplicated-heads",
                "these files hold every KV head more than once, so the cache is larger than that "
                "of the model without the copies; --as gqa:8 shows it",
            )
        )
    return notes


def _parallel_notes(layers: Sequence[LayerSpec], found: Fit) -> list[Note]:
    ranks = found.tensor_parallel
    heads = layers[0].num_key_value_heads
    notes = []
    if ranks > heads:
        notes.append(
            Note(
                "kv-replicated",
                f"{ranks} ranks share {heads} KV heads: each rank keeps a whole head, so the cache "
                f"per device is that of {heads} ranks",
            )
        )
    return notes


def _element(name: str) -> DType:
    found = by_name(name)
    if found is None or found.name in ("bool", "complex64"):
        raise UsageError(f"`{name}` is no element type of weights", hint="say bfloat16, int4, q8_0")
    return found


def _num_bytes(elements: int, bits: Fraction) -> int:
    return int(elements * bits / 8)
