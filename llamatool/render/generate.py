"""Answers of `llamatool generate`: JSON, and the figures and ids that go to standard error."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llamatool.render.blocks import Block, Grid, Lines
from llamatool.units import format_bytes

if TYPE_CHECKING:
    from llamatool.generate.batch import Summary
    from llamatool.generate.stats import Stats
    from llamatool.generate.stop import StopIds
    from llamatool.generate.text_model import Generation, TextModel

SCHEMA = 1


def to_json(model: "TextModel", generation: "Generation", stats: "Stats") -> dict[str, Any]:
    """One object for one answer."""
    timing = stats.timing
    return {
        "schema": SCHEMA,
        "model": model.name,
        "layout": model.layout,
        "device": _devices(model),
        "num_ranks": _num_ranks(model),
        "dtype": dtype_name(model),
        "mode": generation.mode,
        "prompt_ids": list(generation.prompt_ids),
        "output_ids": list(generation.output_ids),
        "text": generation.text,
        "stop_reason": generation.stop_reason,
        "stop_ids": sorted(generation.stop_ids.ids),
        "stats": {
            "load_seconds": stats.load_seconds,
            "time_to_first_token_seconds": timing.prefill_seconds,
            "prefill_tokens_per_second": timing.prefill_tokens_per_second,
            "decode_tokens_per_second": timing.decode_tokens_per_second,
            "bandwidth_limit_share": stats.bandwidth_limit_share,
            "kv_bytes": stats.kv_bytes,
            "peak_memory_bytes": stats.peak_memory_bytes,
        },
    }


def stats_blocks(model: "TextModel", generation: "Generation", stats: "Stats") -> list[Block]:
    """The figures of `--stats` as a table, and the stop ids with their sources."""
    timing, ranks = stats.timing, _num_ranks(model)
    rows = [
        ("model", f"{model.name} ({dtype_name(model)} on {_devices(model)})"),
        *([("ranks", f"{ranks}; memory and limit are those of one")] if ranks > 1 else ()),
        ("prompt", f"{len(generation.prompt_ids):,} tokens, {generation.mode}"),
        (
            "answer",
            f"{len(generation.output_ids):,} tokens, ended by {_REASONS[generation.stop_reason]}",
        ),
        ("load", _seconds(stats.load_seconds)),
        ("time to first token", _seconds(timing.prefill_seconds)),
        ("prefill", _rate(timing.prefill_tokens_per_second)),
        ("decode", _rate(timing.decode_tokens_per_second)),
        ("bandwidth limit", _limit(stats)),
        ("KV cache", format_bytes(stats.kv_bytes)),
        ("peak memory", _bytes(stats.peak_memory_bytes)),
        ("stop ids", _stops(generation.stop_ids)),
    ]
    return [Grid(tuple(rows), title="Statistics")]


def id_lines(generation: "Generation") -> list[Block]:
    """Prompt and answer as ids, one line each."""
    lines = (
        f"prompt ids: {_ids(generation.prompt_ids)}",
        f"output ids: {_ids(generation.output_ids)}",
    )
    return [Lines(lines)]


def batch_json(model: "TextModel", summary: "Summary", out: str) -> dict[str, Any]:
    """One object for a file of answers."""
    return {
        "schema": SCHEMA,
        "model": model.name,
        "out": out,
        "prompts": summary.num_rows,
        "answered_now": summary.num_answered,
        "tokens_now": summary.num_tokens,
    }


def batch_line(summary: "Summary", out: str) -> str:
    """What a run over a file of prompts has done, in one sentence."""
    before = summary.num_rows - summary.num_answered
    earlier = f", {before:,} were there before" if before else ""
    return (
        f"{summary.num_answered:,} of {summary.num_rows:,} prompts answered now{earlier}:"
        f" {summary.num_tokens:,} tokens in {out}"
    )


def dtype_name(model: "TextModel") -> str:
    """The dtype as the command line names it, with int8 where weights are packed."""
    name = str(model.decoder.dtype).removeprefix("torch.")
    return f"{name}, int8 weights" if model.is_quantized else name


_REASONS = {
    "stop_token": "a stop token",
    "stop_text": "a stop text",
    "length": "--max-new-tokens",
    "interrupted": "an interruption",
}


def _num_ranks(model: "TextModel") -> int:
    return 1 if model.decoder.ranks is None else model.decoder.ranks.size


def _devices(model: "TextModel") -> str:
    return ", ".join(map(str, model.decoder.devices))


def _stops(stops: "StopIds") -> str:
    named = "; ".join(f"{source}: {_ids(ids)}" for source, ids in stops.sources)
    return f"{_ids(sorted(stops.ids))} ({named})" if named else "none"


def _limit(stats: "Stats") -> str:
    share, measured = stats.bandwidth_limit_share, stats.bandwidth_bytes_per_second
    if share is None or measured is None:
        return "not measured"
    read = format_bytes(stats.read_bytes_per_token)
    return f"{share:.0%} of it: {read} per token at {measured / 1e9:.1f} GB/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s"


def _rate(rate: float | None) -> str:
    return "too few tokens to tell" if rate is None else f"{rate:.1f} tokens/s"


def _bytes(num_bytes: int | None) -> str:
    return "not told by the system" if num_bytes is None else format_bytes(num_bytes)


def _ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))
