"""The answers of `kv-budget` as tables, sentences, JSON and plots."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llamatool.render.blocks import Block, Grid, Lines
from llamatool.sizing.budget import VLLM_VARIABLE, Budget, LayerCounts, name_of
from llamatool.sizing.curve import Crossing
from llamatool.sizing.fit import Fit, Line
from llamatool.sizing.kv_cache import POLICIES
from llamatool.units import format_bytes, format_gib, format_tokens

if TYPE_CHECKING:
    from llamatool.render.plot import Plot

_BINDING = {"weights": "weights", "kv_cache": "KV cache", "context": "trained context"}
_SHORT_BINDING = {"weights": "weights", "kv_cache": "KV cache", "context": "context"}
_UNSHARED = "split"  # what is in the way where so many devices cannot share a model


def to_blocks(
    budgets: Sequence[Budget], crossings: Sequence[Crossing], *, with_curve: bool = False
) -> list[Block]:
    """One model in full, two side by side, more as rows of a table of 80 columns."""
    if len(budgets) == 1:
        blocks = _details(budgets[0])
    elif len(budgets) == 2:
        blocks = [_side_by_side(budgets), *_all_notes(budgets)]
    else:
        blocks = _survey(budgets)
    if with_curve:
        from llamatool.render.plot import to_text

        picture = to_text(plot_of(budgets, crossings))
        blocks += [_curve_table(budgets), Lines(tuple(picture.split("\n")))]
    if crossings:
        blocks.append(Lines(tuple(_crossing(crossing) for crossing in crossings)))
    return blocks


def to_json(budgets: Sequence[Budget], crossings: Sequence[Crossing]) -> dict[str, Any]:
    """One object; bytes and tokens are integers."""
    question = budgets[0].question
    lengths = {budget.question.load.num_tokens for budget in budgets}
    result: dict[str, Any] = {
        "schema": 1,
        "tokens": lengths.pop() if len(lengths) == 1 else None,
        "batch_size": question.load.batch_size,
        "kv_dtype": _dtype_name(question.kv_dtype),
    }
    if question.load.num_images:
        result["images"] = question.load.num_images
    if question.scheme is not None:
        result["as"] = question.scheme
    result["models"] = [_model_json(budget) for budget in budgets]
    if question.curve:
        result["crossings"] = [
            {
                "tokens": crossing.num_tokens,
                "kv_bytes": crossing.num_bytes,
                "smaller": crossing.smaller,
                "larger": crossing.larger,
            }
            for crossing in crossings
        ]
    return result


def plot_of(budgets: Sequence[Budget], crossings: Sequence[Crossing]) -> "Plot":
    """The capped caches over the context length, with the lengths at which they cross."""
    from llamatool.render.plot import Axis, Mark, Plot, Series

    return Plot(
        title="KV cache by context length",
        x=Axis("tokens", lambda value: format_tokens(int(value)), log=True),
        y=Axis("GiB", "{:g}".format, log=True),
        series=tuple(
            Series(
                name_of(budget.subject),
                tuple((point.num_tokens, point.num_bytes / 2**30) for point in budget.plot),
            )
            for budget in budgets
        ),
        marks=tuple(
            Mark(
                crossing.num_tokens,
                crossing.num_bytes / 2**30,
                f"{crossing.num_tokens:,} tokens",
            )
            for crossing in crossings
        ),
    )


def _details(budget: Budget) -> list[Block]:
    blocks: list[Block] = [
        Grid(tuple(_figures(budget)), align="lrrl", title=_title(budget)),
        *_document(budget),
        Lines(_equation(budget), title="KV cache, line by line"),
    ]
    if budget.layers.window is not None:
        blocks.append(_policies(budget))
    if budget.fit is not None:
        blocks += _fit_blocks(budget.fit, budget.remedy)
    if budget.unshared is not None:
        why = ("DOES NOT FIT: the devices cannot share it", *budget.unshared.split("; "))
        blocks.append(Lines(why, title=f"On {budget.question.machine}"))
    return [*blocks, *_all_notes([budget])]


def _title(budget: Budget) -> str:
    load = budget.question.load
    sequences = f"{load.batch_size:,} sequences of " if load.batch_size > 1 else ""
    scheme = f" as {budget.question.scheme}" if budget.question.scheme else ""
    dtype = _dtype_name(budget.question.kv_dtype)
    return (
        f"{name_of(budget.subject)}{scheme}: {sequences}{_tokens(budget)} tokens, "
        f"KV cache in {dtype}"
    )


def _tokens(budget: Budget) -> str:
    """The length asked about, marked where it is only an estimate."""
    about = "" if budget.document is None or budget.document.exact else "≈ "
    return f"{about}{budget.question.load.num_tokens:,}"


def _figures(budget: Budget) -> list[tuple[str, ...]]:
    cache, windowed = budget.cache, budget.layers.window is not None
    certainty = "at most: capped" if windowed else "exact"
    if budget.document is not None and not budget.document.exact:
        certainty = "if the estimate of the tokens is right"
    rows = [_row("KV cache", budget.kv_bytes, certainty)]
    if windowed:
        rows += [
            _row("per token", cache.in_window_bytes_per_token, "while inside the window"),
            _row("per token", cache.growing_bytes_per_token, "for ever after"),
        ]
    else:
        rows.append(_row("per token", cache.growing_bytes_per_token, "exact"))
    if cache.bytes_per_image:
        rows.append(_row("per image", cache.bytes_per_image, "fixed, whatever the text"))
    kind = "" if budget.weights.exact else "estimate: "
    rows.append(_row("weights", budget.weights.num_bytes, kind + budget.weights.description))
    rows.append(("layers", "", "", _layers(budget.layers)))
    context = budget.context.max_position_embeddings
    rows.append(("context", "", "", f"{context:,} tokens" if context else "not in the file"))
    return rows


def _row(label: str, num_bytes: int, note: str) -> tuple[str, ...]:
    return label, f"{num_bytes:,} B", format_bytes(num_bytes), note


def _layers(layers: LayerCounts) -> str:
    windowed = f" of {layers.window:,} tokens" if layers.window is not None else ""
    kinds = (
        (layers.full, "full"),
        (layers.chunked, "chunked" + windowed),
        (layers.sliding, "sliding" + windowed),
        (layers.cross, "cross-attention"),
    )
    return ", ".join(f"{count} {kind}" for count, kind in kinds if count)


def _equation(budget: Budget) -> tuple[str, ...]:
    *lines, last = budget.kv_equation.split("\n")
    return (*lines, last, f"= {budget.kv_bytes:,} B")


def _document(budget: Budget) -> list[Block]:
    document = budget.document
    if document is None:
        return []
    lines = [
        f"{document.num_bytes:,} B of text, {_tokens(budget)} tokens",
        document.counted_by,
    ]
    if budget.context.answer is not None:
        lines.append(budget.context.answer)
    return [Lines(tuple(lines), title=f"Document {document.name}")]


def _policies(budget: Budget) -> Block:
    rows = [
        (policy.replace("_", " "), f"{num_bytes:,} B", format_gib(num_bytes), POLICIES[policy])
        for policy, num_bytes in budget.kv_bytes_by_policy.items()
    ]
    return Grid(tuple(rows), ("policy", "bytes", "GiB", "an engine of this kind"), "lrrl")


def _fit_blocks(fit: Fit, remedy: str | None) -> list[Block]:
    ranks = f", tensor parallel {fit.tensor_parallel}, per device" if fit.machine.count > 1 else ""
    rows = tuple(_equation_row(line) for line in fit.equation)
    return [
        Grid(rows, align="llrl", title=f"On {fit.machine}{ranks}"),
        Lines((*_verdict(fit), *_inverse(fit, remedy))),
    ]


def _equation_row(line: Line) -> tuple[str, ...]:
    approximately = "≈ " if line.estimate else ""
    return line.sign, line.label, f"{approximately}{line.num_bytes:,} B", line.how


def _verdict(fit: Fit) -> list[str]:
    spare = format_bytes(abs(fit.spare_bytes))
    if fit.fits:
        return [f"FITS, with {spare} to spare; what binds next: {_BINDING[fit.binding]}"]
    if fit.fits_memory:
        return [
            "DOES NOT FIT: the trained context binds",
            f"{fit.load.num_tokens:,} tokens asked, {fit.max_position_embeddings:,} trained; "
            f"in memory it would fit, {spare} to spare",
        ]
    each = " on each device" if fit.machine.count > 1 else ""
    if fit.binding == "weights":
        needed = fit.weights_bytes + fit.runtime_bytes + fit.activation_bytes
        return [
            "DOES NOT FIT: the weights bind",
            f"before any KV cache {format_bytes(needed)} are needed{each}, "
            f"{format_bytes(fit.usable_bytes)} usable",
        ]
    return [
        "DOES NOT FIT: the KV cache binds",
        f"it needs {format_bytes(fit.kv_bytes)}{each}, "
        f"{format_bytes(fit.kv_budget_bytes)} are left for it",
    ]


def _inverse(fit: Fit, remedy: str | None) -> list[str]:
    lines = _most_tokens(fit)
    lines.append(
        f"most sequences of {fit.load.num_tokens:,} tokens at once: {fit.max_batch_size:,}"
    )
    if fit.decode_tokens_per_second is not None and fit.fits_memory:
        lines.append(
            f"decoding: at most {fit.decode_tokens_per_second:,} tokens/s = bandwidth / "
            f"{format_bytes(fit.read_bytes)} read per step"
        )
    if not fit.fits_memory:
        known = f"{fit.smallest}" if fit.smallest else "none of up to 8 listed devices"
        lines.append(f"smallest listed set that holds it: {known}")
        if remedy is not None:
            lines.append(f"on this one it would fit with {remedy}")
    return lines


def _most_tokens(fit: Fit) -> list[str]:
    if fit.max_tokens is None:
        return ["most tokens that fit: no limit in memory, and the file states no context"]
    where = f" in each of {fit.load.batch_size:,} sequences" if fit.load.batch_size > 1 else ""
    bound_by_context = fit.max_tokens != fit.max_tokens_in_memory
    limit = "trained context" if bound_by_context else "memory"
    lines = [f"most tokens that fit: {fit.max_tokens:,}{where} (limit: {limit})"]
    if fit.max_tokens_in_memory and fit.needed_at_most and fit.needed_beyond:
        most = f"{fit.max_tokens_in_memory:,}"
        beyond = f"{fit.max_tokens_in_memory + fit.page_tokens:,}"
        lines += [
            f"  check: {most:>{len(beyond)}} tokens need {fit.needed_at_most:,} B "
            f"of {fit.usable_bytes:,} B",
            f"         {beyond} tokens need {fit.needed_beyond:,} B: too much",
        ]
    return lines


def _side_by_side(budgets: Sequence[Budget]) -> Block:
    windowed = any(budget.layers.window is not None for budget in budgets)
    columns = [_column(budget, windowed) for budget in budgets]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    rows = tuple((label, *(column.get(label, "-") for column in columns)) for label in labels)
    names = tuple(name_of(budget.subject) for budget in budgets)
    return Grid(rows, ("", *names), "l" + "r" * len(budgets), title=_asked(budgets))


def _column(budget: Budget, windowed: bool) -> dict[str, str]:
    cache, policies = budget.cache, budget.kv_bytes_by_policy
    cells = {"tokens": _tokens(budget)}
    cells["KV cache, bytes"] = f"{budget.kv_bytes:,}"
    cells["KV cache, GiB"] = format_gib(budget.kv_bytes)
    cells["bytes per token"] = f"{cache.in_window_bytes_per_token:,}"
    if windowed:
        cells["  beyond the window"] = f"{cache.growing_bytes_per_token:,}"
        for policy in ("live_chunk_only", "vllm_hybrid", "no_eviction"):
            cells[f"KV, {policy.replace('_', ' ')}"] = format_bytes(policies[policy])
    if cache.bytes_per_image:
        cells["per image"] = format_bytes(cache.bytes_per_image)
    cells["weights"] = format_bytes(budget.weights.num_bytes)
    context = budget.context.max_position_embeddings
    cells["context"] = f"{context:,}" if context else "?"
    if budget.document is not None:
        cells["document"] = "too long" if _beyond(budget) else "within the context"
    fit = budget.fit
    if fit is not None:
        cells["on"] = str(fit.machine)
        cells["fits"] = "yes" if fit.fits else "no"
        cells["binding"] = _BINDING[fit.binding]
        cells["most tokens"] = _tokens_or_dash(fit)
        cells["most sequences"] = f"{fit.max_batch_size:,}"
        if fit.decode_tokens_per_second is not None and fit.fits_memory:
            cells["decoding, at most"] = f"{fit.decode_tokens_per_second:,} tokens/s"
    elif budget.unshared is not None:
        cells["on"] = str(budget.question.machine)
        cells["fits"] = f"no: {_UNSHARED}"
    return cells


def _survey(budgets: Sequence[Budget]) -> list[Block]:
    if budgets[0].question.machine is None:
        grid, notes = _cost_table(budgets)
    elif budgets[0].question.machine == "smallest":
        grid, notes = _smallest_table(budgets)
    else:
        grid, notes = _fit_table(budgets)
    if any(budget.layers.window is not None for budget in budgets):
        notes.append("chunked and sliding layers count up to their window; name a model for more")
    blocks: list[Block] = [grid, Lines((_asked(budgets), *notes))]
    # Of all the published models the same few notes would be said again and again.
    return blocks + (_all_notes(budgets) if budgets[0].question.alternatives else [])


def _asked(budgets: Sequence[Budget]) -> str:
    """What was asked of every model: `4 sequences of 8,192 tokens, KV cache in bfloat16`."""
    question = budgets[0].question
    load = question.load
    lengths = {budget.question.load.num_tokens for budget in budgets}
    tokens = f"{load.num_tokens:,} tokens" if len(lengths) == 1 else "the document"
    sequences = f"{load.batch_size:,} sequences of " if load.batch_size > 1 else ""
    return f"{sequences}{tokens}, KV cache in {_dtype_name(question.kv_dtype)}"


def _cost_table(budgets: Sequence[Budget]) -> tuple[Grid, list[str]]:
    rows = tuple(
        (
            name_of(budget.subject),
            f"{budget.kv_bytes:,}",
            format_gib(budget.kv_bytes),
            format_gib(budget.weights.num_bytes),
            _context_cell(budget),
        )
        for budget in budgets
    )
    dtype = budgets[0].question.weights_dtype
    notes = [f"weights in GiB, {'as the files are stored' if dtype is None else 'in ' + dtype}"]
    if any(_beyond(budget) for budget in budgets):
        notes.append("* more tokens than the context the model is trained for")
    return Grid(rows, ("model", "KV bytes", "GiB", "weights", "context"), "lrrrr"), notes


def _fit_table(budgets: Sequence[Budget]) -> tuple[Grid, list[str]]:
    rows = tuple(
        (name_of(budget.subject), format_gib(budget.total_bytes), *_fit_cells(budget.fit))
        for budget in budgets
    )
    notes = [
        f"on {budgets[0].question.machine}; GiB: weights and KV cache together",
        "fits: yes, or no and what binds; at once: sequences of this length",
    ]
    if any(budget.unshared for budget in budgets):
        notes.append("split: so many devices cannot share the model; name it to see how many can")
    return Grid(rows, ("model", "GiB", "fits", "most tokens", "at once"), "lrlrr"), notes


def _fit_cells(fit: Fit | None) -> tuple[str, str, str]:
    if fit is None:
        return f"no: {_UNSHARED}", "-", "-"
    verdict = "yes" if fit.fits else f"no: {_SHORT_BINDING[fit.binding]}"
    return verdict, _tokens_or_dash(fit), f"{fit.max_batch_size:,}"


def _smallest_table(budgets: Sequence[Budget]) -> tuple[Grid, list[str]]:
    rows = tuple(
        (
            name_of(budget.subject),
            format_gib(budget.total_bytes),
            str(fit.machine) if fit.fits_memory else "none",
            _tokens_or_dash(fit) + ("*" if _beyond(budget) else ""),
        )
        for budget, fit in _fits(budgets)
    )
    notes = [
        "GiB: weights and KV cache; smallest: of the listed devices, up to 8 together",
        "* its memory would do, but its trained context is shorter than what is asked",
    ]
    return Grid(rows, ("model", "GiB", "smallest", "most tokens"), "lrlr"), notes


def _fits(budgets: Sequence[Budget]) -> list[tuple[Budget, Fit]]:
    return [(budget, budget.fit) for budget in budgets if budget.fit is not None]


def _tokens_or_dash(fit: Fit) -> str:
    return "no limit" if fit.max_tokens is None else f"{fit.max_tokens:,}"


def _context_cell(budget: Budget) -> str:
    context = budget.context.max_position_embeddings
    if context is None:
        return "?"
    return format_tokens(context) + ("*" if _beyond(budget) else "")


def _beyond(budget: Budget) -> bool:
    return budget.context.fits is False


def _all_notes(budgets: Sequence[Budget]) -> list[Block]:
    lines = []
    several = len(budgets) > 1
    for budget in budgets:
        name = f"{name_of(budget.subject)}: " if several else ""
        shown = set() if several else {budget.unshared}
        if budget.document is not None and not several:
            shown.add(budget.context.answer)
        lines += [f"{name}{note.message}" for note in budget.notes if note.message not in shown]
        if budget.document is not None and several:
            lines.append(f"{name}{budget.document.counted_by}")
    if any(budget.layers.chunked for budget in budgets):
        lines.append(
            "vLLM is `vllm hybrid` where its chunked manager is on, else `no eviction`; the"
        )
        lines.append(f"switch is {VLLM_VARIABLE}")
    return [Lines(tuple(dict.fromkeys(lines)), title="Notes")] if lines else []


def _curve_table(budgets: Sequence[Budget]) -> Block:
    cells: dict[int, list[str]] = {}
    for number, budget in enumerate(budgets):
        for point in budget.curve:
            row = cells.setdefault(point.num_tokens, ["-"] * len(budgets))
            row[number] = format_gib(point.num_bytes)
    rows = tuple((f"{tokens:,}", *row) for tokens, row in sorted(cells.items()))
    names = tuple(name_of(budget.subject) for budget in budgets)
    return Grid(rows, ("tokens", *names), "r" * (1 + len(names)), title="KV cache in GiB")


def _crossing(crossing: Crossing) -> str:
    return (
        f"from {crossing.num_tokens:,} tokens the cache of {crossing.smaller} is smaller than "
        f"that of {crossing.larger}"
    )


def _model_json(budget: Budget) -> dict[str, Any]:
    layers: dict[str, Any] = {"full": budget.layers.full, "chunked": budget.layers.chunked}
    if budget.layers.sliding:
        layers["sliding"] = budget.layers.sliding
    layers["window"] = budget.layers.window
    layers["cross"] = budget.layers.cross
    result: dict[str, Any] = {
        "source": budget.subject.source,
        "model": budget.subject.model,
        "bytes_per_token": {
            "growing": budget.cache.growing_bytes_per_token,
            "while_in_window": budget.cache.in_window_bytes_per_token,
        },
        "kv_bytes": budget.kv_bytes,
        "kv_bytes_by_policy": dict(budget.kv_bytes_by_policy),
        "fixed_bytes_per_image": budget.cache.bytes_per_image,
        "layers": layers,
        "weights_bytes": budget.weights.num_bytes,
        "fit": None if budget.fit is None else _fit_json(budget.fit),
    }
    if budget.document is not None:
        document = budget.document
        result["document"] = {
            "name": document.name,
            "bytes": document.num_bytes,
            "tokens": document.num_tokens,
            "exact": document.exact,
            "counted_by": document.counted_by,
            "fits_context": not _beyond(budget),
        }
    if budget.curve:
        result["curve"] = [
            {"tokens": point.num_tokens, "kv_bytes": point.num_bytes} for point in budget.curve
        ]
    return result


def _fit_json(fit: Fit) -> dict[str, Any]:
    smallest = fit.smallest
    return {
        "fits": fit.fits,
        "fits_memory": fit.fits_memory,
        "binding": fit.binding,
        "device": fit.machine.gpu.name,
        "devices": fit.machine.count,
        "tensor_parallel": fit.tensor_parallel,
        "utilization": float(fit.utilization),
        "per_device": {
            "memory_bytes": fit.machine.gpu.memory_bytes,
            "usable_bytes": fit.usable_bytes,
            "weights_bytes": fit.weights_bytes,
            "runtime_bytes": fit.runtime_bytes,
            "activation_bytes": fit.activation_bytes,
            "kv_budget_bytes": fit.kv_budget_bytes,
            "kv_bytes": fit.kv_bytes,
            "spare_bytes": fit.spare_bytes,
        },
        "max_tokens": fit.max_tokens,
        "max_tokens_in_memory": fit.max_tokens_in_memory,
        "max_batch_size": fit.max_batch_size,
        "decode_tokens_per_second_limit": fit.decode_tokens_per_second,
        "smallest": None
        if smallest is None
        else {"device": smallest.gpu.name, "devices": smallest.count},
    }


def _dtype_name(name: str) -> str:
    from llamatool.dtypes import by_name

    found = by_name(name)
    return found.name if found is not None else name
