"""The published models: looked up by name, forgivingly, and by shape.

The data lie in catalog.json, written by tools/make_catalog.py; a configuration is parsed only
when it is asked for.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from llamatool.config.huggingface import parse_huggingface
from llamatool.config.model import ModelConfig
from llamatool.records import record

_DATA = Path(__file__).with_name("catalog.json")


@record
class CatalogEntry:
    """One published model."""

    id: str  # llamatool's name for it
    name: str
    hub_id: str
    generation: str
    variant: Literal["base", "instruct", "guard"] | None
    license: str
    released: str  # ISO date
    meta_shards: int  # files consolidated.NN.pth of Meta's own download
    training_tokens: str
    published_total: int | None  # parameters as Meta or the hub publishes them
    unique_total: int | None  # parameters without copies, where the files hold heads twice
    trained_context: int | None  # tokens, where the stated context is an extrapolation
    lookalikes: tuple[str, ...]  # models with the same configuration: ids, or names of others'
    aliases: tuple[str, ...]
    assumed: tuple[str, ...]  # fields that no public copy of the file confirms
    license_note: str | None

    @property
    def config_values(self) -> Mapping[str, Any]:
        """The object of its config.json."""
        return _config_values(self.id)

    @property
    def config(self) -> ModelConfig:
        """Its parsed configuration."""
        return _parsed(self.id)


@cache
def entries() -> tuple[CatalogEntry, ...]:
    """Every published model, oldest generation first."""
    return tuple(
        CatalogEntry(
            id=row["id"],
            name=row["name"],
            hub_id=row["hub_id"],
            generation=row["generation"],
            variant=row.get("variant"),
            license=row["license"],
            released=row["released"],
            meta_shards=row["meta_shards"],
            training_tokens=row["training_tokens"],
            published_total=row.get("published_total"),
            unique_total=row.get("unique_total"),
            trained_context=row.get("trained_context"),
            lookalikes=tuple(row.get("lookalikes", ())),
            aliases=tuple(row.get("aliases", ())),
            assumed=tuple(row.get("assumed", ())),
            license_note=row.get("license_note"),
        )
        for row in _rows().values()
    )


def find(name: str) -> CatalogEntry | None:
    """The model called `name`, in any usual spelling.

    A name with an organisation must be that of the model's own: others publish other weights
    under the same name.
    Example: `llama-3.1-8b`, `Llama 3.1 8B`, `meta-llama/Llama-3.1-8B` and
    `meta-llama/Meta-Llama-3.1-8B` are one; `unsloth/Llama-3.1-8B` is not among them.
    """
    return _by_name().get(_normalised(name))


def suggest(name: str) -> list[str]:
    """Ids of models whose names are near `name`, nearest first."""
    from difflib import get_close_matches

    table = _by_name()
    wanted = _normalised(name).rpartition("/")[2]
    keys = [key for key in table if "/" not in key]
    near = [key for key in keys if wanted and re.search(word_pattern(wanted), key)]
    near += get_close_matches(wanted, keys, n=6, cutoff=0.6)
    if not near:  # a word of a name, misspelt
        words = {word: key for key in keys for word in key.split("-")}
        near = [words[word] for word in get_close_matches(wanted, words, n=3, cutoff=0.75)]
    return list(dict.fromkeys(table[key].id for key in near))[:3]


def word_pattern(word: str) -> str:
    """A pattern that finds `word` in a name where a word begins, a number only whole.

    Example: `llama-1` is found in `llama-1-7b`, not in `codellama-13b`; `3` in `llama-3.1-8b`.
    """
    end = r"(?!\d)" if word[-1:].isdigit() else ""
    return r"(?<![a-z0-9.])" + re.escape(word) + end


def by_shape(config: ModelConfig) -> tuple[CatalogEntry, ...]:
    """The published models with the tensor shapes of `config`, its vocabulary set aside."""
    shape = _shape_of(config)
    return tuple(
        entry
        for entry in entries()
        if _quick(entry.config_values) == shape[:2] and _shape_of(entry.config) == shape
    )


def relative(config: ModelConfig) -> str | None:
    """The name of another maker's well-known model with exactly the shape of `config`."""
    row = [
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
        config.vocab_size,
        config.rope.theta,
    ]
    return next((name for name, *shape in _data()["relatives"] if shape == row), None)


def _shape_of(config: ModelConfig) -> tuple[object, ...]:
    return (
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        config.intermediate_size_mlp,
        config.moe.num_local_experts if config.moe else 0,
        config.cross_attention_layers,
    )


def _quick(values: Mapping[str, Any]) -> tuple[int, int]:
    """The two sizes that rule out most models before their configuration is parsed."""
    text = values.get("text_config", values)
    return text["hidden_size"], text["num_hidden_layers"]


def _normalised(name: str) -> str:
    """`name` in one spelling; an organisation stays, since others publish under equal names."""
    words = re.sub(r"[\s_]+", "-", name.strip().lower())
    if words.startswith(("/", ".", "~")):  # a path that a model was saved from
        words = words.rpartition("/")[2]
    organisation, slash, words = words.rpartition("/")
    words = words.removeprefix("meta-").removesuffix("-hf")
    words = words.replace("code-llama", "codellama").replace("llama3", "llama-3")
    words = words.replace("llama2", "llama-2").replace("llama4", "llama-4").replace("--", "-")
    return organisation + slash + words


@cache
def _by_name() -> dict[str, CatalogEntry]:
    table: dict[str, CatalogEntry] = {}
    for entry in entries():
        hub_name = entry.hub_id.rpartition("/")[2]
        for name in (entry.id, entry.name, entry.hub_id, hub_name, *entry.aliases):
            table.setdefault(_normalised(name), entry)
    return table


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_DATA.read_bytes())
    return data


@cache
def _rows() -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in _data()["models"]}


@cache
def _config_values(model_id: str) -> dict[str, Any]:
    row = _rows()[model_id]
    return _merged(_data()["configs"][row["config"]], row.get("changes", {}))


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = _merged(base[key], value) if nested else value
    return result


@cache
def _parsed(model_id: str) -> ModelConfig:
    return parse_huggingface(_config_values(model_id), where=f"built-in model {model_id}")
