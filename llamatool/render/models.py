"""The list of published models as a table and as JSON."""

from collections.abc import Sequence
from typing import Any

from llamatool.listing import ListedModel
from llamatool.render.blocks import Block, Grid, Lines
from llamatool.units import format_bytes, format_count, format_tokens


def to_blocks(models: Sequence[ListedModel]) -> list[Block]:
    """A table of 80 columns: name, parameters, context, cache per token, release, shards."""
    rows = tuple(
        (
            model.entry.id,
            format_count(model.parameters.total),
            format_tokens(model.context) if model.context else "?",
            format_bytes(model.kv.in_window_bytes_per_token),
            model.entry.released,
        )
        for model in models
    )
    columns = ("model", "params", "context", "KV/token", "released")
    notes = Lines(
        (
            "k is 1,024 tokens; the KV cache is in bfloat16, per token inside every window.",
            "Names are accepted in any spelling: llama-3.1-8b, Llama 3.1 8B, meta-llama/...",
        )
    )
    return [Grid(rows, columns, "lrrrl"), notes]


def to_json(models: Sequence[ListedModel]) -> dict[str, Any]:
    """One object; counts and bytes as integers."""
    return {"schema": 1, "models": [_row(model) for model in models]}


def _row(model: ListedModel) -> dict[str, Any]:
    entry, count = model.entry, model.parameters
    return {
        "model": entry.id,
        "name": entry.name,
        "hub_id": entry.hub_id,
        "generation": entry.generation,
        "variant": entry.variant,
        "released": entry.released,
        "license": entry.license,
        "max_position_embeddings": model.context,
        "parameters": count.total,
        "active_parameters": count.active.total if count.active else None,
        "published_parameters": entry.published_total,
        "kv_bytes_per_token": {
            "growing": model.kv.growing_bytes_per_token,
            "while_in_window": model.kv.in_window_bytes_per_token,
        },
        "meta_shards": entry.meta_shards,
        "training_tokens": entry.training_tokens,
        "assumed": list(entry.assumed),
    }
