"""The published models with their main figures, for `models`."""

import re
from collections.abc import Sequence

from llamatool.config.catalog import CatalogEntry, entries, suggest, word_pattern
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


def list_models(words: Sequence[str] = ()) -> tuple[ListedModel, ...]:
    """The models whose id, name or hub id has each of `words`, all without any.

    A word is found where a word of the name begins: `llama-1` lists Llama 1 and not Code Llama 13B.
    Raises: InputError if there is none, with near names.
    """
    patterns = [word_pattern(word) for text in words for word in text.lower().split()]
    found = tuple(
        _listed(entry)
        for entry in entries()
        if all(
            any(re.search(pattern, text.lower()) for text in (entry.id, entry.name, entry.hub_id))
            for pattern in patterns
        )
    )
    if not found:
        wanted = " ".join(words)
        near = suggest(wanted)
        raise InputError(
            f"no published model's name contains `{wanted}`",
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
