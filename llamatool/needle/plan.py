"""What a test will cost before anything is computed: tokens, FLOPs, memory of the cache, time."""

from collections.abc import Iterable, Sequence

from llamatool.config.layers import LayerSpec
from llamatool.needle.experiment import Experiment, Mode, Outline
from llamatool.records import record
from llamatool.sizing.kv_cache import kv_bytes

EFFICIENCY = 0.4  # of the speed of a matrix product that a whole prefill reaches


@record
class Change:
    """A stretch of ids that differs from a job's text: a needle in its slot."""

    start: int
    stop: int


@record
class Plan:
    """The cost of a whole test."""

    mode: Mode
    num_prompts: int
    prefill_tokens: int  # computed, questions included
    naive_prefill_tokens: int  # if every prompt were read from its beginning
    flops: float
    kv_bytes: int  # of the longest prompt
    seconds: float | None  # estimated; None where no speed is known


@record
class Read:
    """Tokens `start` to `stop - 1` are computed."""

    start: int
    stop: int


def plan(
    experiment: Experiment,
    outlines: Sequence[Outline],
    layers: Sequence[LayerSpec],
    hidden_size: int,
    *,
    chunk: int | None,
    kv_dtype: str,
    flops_per_second: float | None = None,
) -> Plan:
    """The cost of `outlines`.

    Args: chunk: of a model that is local below its top (subject.py), else None.
    flops_per_second: of a matrix product on the device.
    """
    reads = [read for outline in outlines for read in reads_of(experiment, outline, chunk)]
    flops = sum(prefill_flops(layers, hidden_size, read.start, read.stop) for read in reads)
    sizes = experiment.sizes
    longest = max(max(outline.lengths) for outline in outlines)
    return Plan(
        mode=experiment.design.mode,
        num_prompts=sum(o.questions_to(cell) for o in outlines for cell in o.cells),
        prefill_tokens=sum(read.stop - read.start for read in reads),
        naive_prefill_tokens=naive_tokens(outlines, sizes.budget),
        flops=flops,
        kv_bytes=kv_bytes(layers, longest, dtype=kv_dtype),
        seconds=None if not flops_per_second else flops / (EFFICIENCY * flops_per_second),
    )


def naive_tokens(outlines: Iterable[Outline], budget: int) -> int:
    """Tokens if every question were asked of a prompt read from its beginning.

    Args: budget: kept free for the answer.
    """
    return sum(
        outline.questions_to(cell) * (cell.length - budget)
        for outline in outlines
        for cell in outline.cells
    )


def reads_of(experiment: Experiment, outline: Outline, chunk: int | None) -> Iterable[Read]:
    """The stretches that a job computes, as run.py does it."""
    sizes = experiment.sizes
    if outline.kind == "alone":
        yield Read(0, sizes.before + sizes.needle + sizes.tail)
        return
    ends = [experiment.body_end(length) for length in outline.lengths]
    tails = [
        Read(end, end + sizes.tail)
        for cell in outline.cells
        for end in [experiment.body_end(cell.length)] * outline.questions_to(cell)
    ]
    if outline.mode != "single":
        yield Read(0, max(ends))
        yield from tails
        return
    (end,), (length,) = ends, outline.lengths
    changes = [
        Change(start, start + sizes.needle)
        for start in (experiment.target(length, depth) for depth in outline.depths)
    ]
    if "wrong_key" in outline.controls:
        changes.append(changes[-1])
    yield from reads_with_changes(end, changes, "no_needle" in outline.controls, chunk)
    yield from tails


def reads_with_changes(
    end: int, changes: Sequence[Change], with_plain: bool, chunk: int | None
) -> Iterable[Read]:
    """The stretches that are computed to know a text of `end` tokens under each of `changes`.

    In general: up to each change, then the change and all behind it, back, and on. Where only the
    last layer sees beyond a chunk: once the text, then the chunks that a change touches.
    Args: with_plain: the unchanged text is asked for too.
    Example: 11 even depths of L tokens -> 6.5 L.
    """
    ordered = sorted(changes, key=lambda change: change.start)
    if chunk is not None:
        yield Read(0, end)
        for change in ordered:
            yield chunks_around(change, end, chunk)
        return
    position = 0
    for change in ordered:
        yield Read(position, change.start)
        yield Read(change.start, end)
        position = change.start
    if with_plain or not ordered:
        yield Read(position, end)


def chunks_around(change: Change, end: int, chunk: int) -> Read:
    """The whole chunks that a change touches, within a text of `end` tokens.

    Example: tokens 500 to 520 in chunks of 512 -> 0 to 1023.
    """
    first = change.start // chunk * chunk
    return Read(first, min(end, -(-change.stop // chunk) * chunk))


def prefill_flops(layers: Sequence[LayerSpec], hidden_size: int, start: int, stop: int) -> float:
    """FLOPs to read tokens `start` to `stop - 1` behind a cache of the tokens before them.

    Two per weight and token, and 4 x heads x head_dim per pair of query and key. In the last
    layer only keys and values are computed; the vocabulary is left out.
    Example: Llama 3.1 8B, 0 to 131072 -> 6.2e15.
    """
    num_tokens = stop - start
    total = 0.0
    for layer in layers:
        width = layer.num_attention_heads * layer.head_dim
        keys_and_values = hidden_size * layer.kv_width
        if layer.index == layers[-1].index:
            total += 2 * keys_and_values * num_tokens
            continue
        weights = 2 * hidden_size * width + keys_and_values
        if layer.attention != "cross":
            total += 4 * width * _pairs(start, stop, layer.window)
        weights += _feed_forward_weights(layer, hidden_size)
        total += 2 * weights * num_tokens
    return total


def _feed_forward_weights(layer: LayerSpec, hidden_size: int) -> int:
    """Weights that one token passes through."""
    if layer.moe is None:
        return 3 * hidden_size * layer.intermediate_size
    routed = layer.moe.num_experts_per_tok * layer.intermediate_size
    shared = layer.moe.shared_intermediate_size
    return hidden_size * (3 * (routed + shared) + layer.moe.num_experts)


def _pairs(start: int, stop: int, window: int | None) -> float:
    """Pairs of a query of that stretch and a key it sees, half of the window on average."""
    if window is None:
        return (stop * stop - start * start) / 2
    return (stop - start) * min(window, stop) / 2
