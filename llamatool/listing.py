"""The published models with their main figures, for `models`."""

from llamatool.config.catalog import CatalogEntry, entries, suggest
from llamatool.config.layers import plan_layers
from llamatool.errors import InputError
from llamatool.records import record
from llamatool.sizing.kv_cache import KvCache, kv_cache
from llamatool.sizing.parameters import ParameterCount, count_parameters


@record
class ListedModel:
    """One row of the list."""

    entry: CatalogEntry
    parameters: ParameterCount
    kv: KvCache
    context: int | None  # tokens


def list_models(pattern: str | None = None) -> tuple[ListedModel, ...]:
    """The models whose id, name or hub id contains `pattern`, all without one.

    Raises: InputError if there is none, with near names.
    """
    words = (pattern or "").lower().split()
    found = tuple(
        _listed(entry)
        for entry in entries()
        if all(
            any(word in text.lower() for text in (entry.id, entry.name, entry.hub_id))
            for word in words
        )
    )
    if not found:
        near = suggest(pattern or "")
        raise InputError(
            f"no published model's name contains `{pattern}`",
            hint=f"near names: {', '.join(near)}" if near else "`llamatool models` lists all",
        )
    return found


def _listed(entry: CatalogEntry) -> ListedModel:
    config = entry.config
    return ListedModel(
        entry=entry,
        parameters=count_parameters(config),
        kv=kv_cache(plan_layers(config), vision=config.vision),
        context=config.max_position_embeddings,
    )
