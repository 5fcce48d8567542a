"""Plans and reports of `convert` and comparisons of `verify` as tables, sentences and JSON."""

from dataclasses import dataclass
from typing import Any

from llamatool.checkpoint.plan import Block as TensorBlock
from llamatool.checkpoint.plan import TensorPlan
from llamatool.checkpoint.verify import Comparison, Difference
from llamatool.conversion import Conversion, ConversionReport
from llamatool.render.blocks import Block, Grid, Lines
from llamatool.units import format_bytes

_LAYOUTS = {"hf": "Hugging Face", "huggingface": "Hugging Face", "meta": "Meta", "gguf": "GGUF"}
_WAYS = {
    "pairs": "rows of each head reordered, pairs to halves",
    "halves": "rows of each head reordered, halves to pairs",
}
_MAX_DIFFERENCES = 20


def plan_blocks(conversion: Conversion) -> list[Block]:
    """What `--dry-run` prints: the summary, every tensor, what is lost and what is derived."""
    rows = tuple(_tensor_rows(conversion.plan))
    tensors = Grid(rows, columns=("tensor", "type", "from", "how"), title="Tensors")
    return [_summary(conversion), tensors, *_remarks(conversion)]


def report_blocks(report: ConversionReport) -> list[Block]:
    """What `convert` prints when it is done."""
    written = report.written
    rows = [
        ("written to", str(report.destination)),
        ("model", conversion_name(report.conversion)),
        ("files", f"{len(written.files)}, {_size(sum(f.num_bytes for f in written.files))}"),
        ("verified", _verdict(report)),
    ]
    if written.casts is not None and written.casts.num_rounded:
        casts = written.casts
        rows.append(
            (
                "cast",
                f"{casts.num_rounded:,} of {casts.num_elements:,} values rounded,"
                f" {casts.num_overflowed:,} became infinite, {casts.num_underflowed:,} zero",
            )
        )
    return [Grid(tuple(rows)), *_remarks(report.conversion)]


def plan_json(conversion: Conversion) -> dict[str, Any]:
    """The plan as one object."""
    return {
        "schema": 1,
        **_head(conversion),
        "dry_run": True,
        "bytes": conversion.num_bytes,
        "files": [
            {"name": layout.name, "bytes": layout.num_bytes} for layout in conversion.plan.files
        ],
        "small_files": sorted(conversion.small_files),
        "tensors": [
            {"name": name, "dtype": dtype, "from": source, "operation": how}
            for name, dtype, source, how in _tensor_rows(conversion.plan)
        ],
        **_tail(conversion),
    }


def report_json(report: ConversionReport) -> dict[str, Any]:
    """The report as one object."""
    written = report.written
    casts = written.casts
    return {
        "schema": 1,
        **_head(report.conversion),
        "destination": str(report.destination),
        "files": [
            {"name": file.name, "bytes": file.num_bytes, "sha256": file.sha256}
            for file in written.files
        ],
        "verify": {
            "mode": report.verify,
            "ok": written.problem is None,
            "problem": written.problem,
        },
        "bytes_read": written.num_bytes_read,
        "bytes_written": written.num_bytes_written,
        "cast": None
        if casts is None
        else {
            "elements": casts.num_elements,
            "rounded": casts.num_rounded,
            "overflowed": casts.num_overflowed,
            "underflowed": casts.num_underflowed,
        },
        "seconds": round(report.seconds, 3),
        **_tail(report.conversion),
    }


def comparison_blocks(comparison: Comparison) -> list[Block]:
    """What `verify` prints."""
    compared = f"{comparison.num_tensors:,} tensors, {comparison.num_elements:,} elements compared"
    if comparison.is_equal:
        verdict = "equal, bit for bit"
        if comparison.num_rounded:
            verdict = (
                f"equal; {comparison.num_rounded:,} tensors are of different types and equal after"
                " the wider one is narrowed"
            )
        return [Lines((f"{verdict}: {compared}",))]
    rows = tuple(_difference_row(d) for d in comparison.differences[:_MAX_DIFFERENCES])
    more = len(comparison.differences) - len(rows)
    lines = [f"{len(comparison.differences):,} tensors differ: {compared}"]
    blocks: list[Block] = [
        Lines(tuple(lines)),
        Grid(rows, columns=("tensor", "differs in", "elements", "by at most"), align="llrr"),
    ]
    if more > 0:
        blocks.append(Lines((f"and {more:,} more; --json lists all",)))
    return blocks


def comparison_json(first: str, second: str, comparison: Comparison) -> dict[str, Any]:
    """The comparison as one object."""
    return {
        "schema": 1,
        "first": first,
        "second": second,
        "equal": comparison.is_equal,
        "tensors": comparison.num_tensors,
        "elements": comparison.num_elements,
        "equal_after_narrowing": comparison.num_rounded,
        "differences": [
            {
                "name": d.name,
                "kind": d.kind,
                "elements": d.num_different,
                "of": d.num_elements,
                "max_difference": d.max_difference,
            }
            for d in comparison.differences
        ],
    }


def conversion_name(conversion: Conversion) -> str:
    """The model, as far as it is known: `llama-3.1-8b, instruct`."""
    kind = "instruct" if conversion.instruct else "base"
    return f"{conversion.identity.model or 'a model of its own'}, taken as {kind}"


def _summary(conversion: Conversion) -> Grid:
    plan = conversion.plan
    rows = (
        ("from", f"{_LAYOUTS[conversion.source_layout]} layout, {_count_shards(plan)}"),
        ("to", f"{_LAYOUTS[conversion.target]} layout, {_plural(len(plan.files), 'file')}"),
        ("model", conversion_name(conversion)),
        ("type", conversion.dtype),
        ("needs", _size(conversion.num_bytes)),
        ("tensors", f"{len({t.name for f in plan.files for t in f.targets}):,}"),
        ("beside them", ", ".join(sorted(conversion.small_files)) or "nothing"),
    )
    return Grid(rows)


def _count_shards(plan: TensorPlan) -> str:
    files = {path for table in plan.resolved.checkpoint.tables for path in table.files}
    return _plural(len(files), "file")


@dataclass(slots=True)
class _Way:
    """How one tensor of the output comes about."""

    block: TensorBlock
    sources: set[str]
    read_from: set[str]
    written_to: set[str]


def _tensor_rows(plan: TensorPlan) -> list[tuple[str, str, str, str]]:
    """Name, type, sources and operation of every tensor that is written."""
    ways: dict[str, _Way] = {}
    for block in plan.blocks:
        for write in block.writes:
            way = ways.setdefault(write.stored.name, _Way(block, set(), set(), set()))
            way.written_to.add(write.stored.file)
            for read in block.reads:
                way.sources.add(read.stored.name)
                way.read_from.add(str(read.stored.file))
    return [
        (name, way.block.dtype.name, " + ".join(sorted(way.sources)) or "zeros", _how(way))
        for name, way in ways.items()
    ]


def _how(way: _Way) -> str:
    block, steps = way.block, []
    if len(way.read_from) > 1:
        across = block.reads and block.reads[0].num_columns < block.num_columns
        steps.append(f"{'columns of ' if across else ''}{len(way.read_from)} files joined")
    if len(way.written_to) > 1:
        whole = len(block.writes) == len(way.written_to) and all(
            write.num_columns == block.num_columns for write in block.writes
        )
        steps.append(f"{'copied' if whole else 'shared out'} to {len(way.written_to)} files")
    if block.reorder is not None:
        steps.append(_WAYS[block.reorder[0]])
    if block.transposed:
        steps.append("axes exchanged")
    if block.reads and block.reads[0].stored.dtype != block.dtype:
        steps.append(f"from {block.reads[0].stored.dtype.name}")
    return ", ".join(steps) or "as it is"


def _remarks(conversion: Conversion) -> list[Block]:
    blocks: list[Block] = []
    if conversion.lost:
        blocks.append(Lines(conversion.lost, title="Not in the output"))
    if conversion.notes:
        blocks.append(Lines(tuple(note.message for note in conversion.notes), title="Notes"))
    return blocks


def _verdict(report: ConversionReport) -> str:
    if report.written.problem is not None:
        return f"FAILED: {report.written.problem}"
    return {
        "none": "no",
        "size": "names, shapes and sizes",
        "hash": "every piece of the source found again in the output",
        "full": "compared with the source, bit for bit",
    }[report.verify]


def _head(conversion: Conversion) -> dict[str, Any]:
    return {
        "source": conversion.source,
        "from": conversion.source_layout,
        "to": conversion.target,
        "model": conversion.identity.model,
        "variant": "instruct" if conversion.instruct else "base",
        "dtype": conversion.dtype,
    }


def _tail(conversion: Conversion) -> dict[str, Any]:
    resolved = conversion.plan.resolved
    return {
        "lost": list(conversion.lost),
        "dropped": [{"name": name, "reason": reason} for name, reason in resolved.dropped],
        "notes": [{"code": n.code, "message": n.message} for n in conversion.notes],
    }


def _difference_row(difference: Difference) -> tuple[str, str, str, str]:
    elements = f"{difference.num_different:,}" if difference.num_different else ""
    largest = "" if difference.max_difference is None else f"{difference.max_difference:.3g}"
    return difference.name, difference.kind, elements, largest


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _size(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} ({num_bytes:,} bytes)"
