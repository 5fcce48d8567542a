"""Tokenizers that are on this machine already: in given folders, in a package, in the hub's cache.

Nothing is downloaded. Whoever calls says where to look (`Places`); no environment is read here.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llamatool.errors import LlamatoolError
from llamatool.tokenizers import detect, load
from llamatool.tokenizers.base import Tokenizer

# Names that a user may give instead of a path, with the vocabulary that each must turn out to be.
GENERATIONS = {"llama2": "llama-2", "llama3": "llama-3", "llama4": "llama-4"}
TITLES = {"llama-2": "Meta Llama 2", "llama-3": "Meta Llama 3", "llama-4": "Meta Llama 4"}

_DEPTH = 3  # folders below a given one that are searched
_MOST_FILES = 200
_NAMES = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class Places:
    """Where to look, in this order: folders of the user, installed packages, the hub's cache."""

    folders: tuple[Path, ...] = ()
    hub_cache: Path | None = None


def find(name: str, places: Places) -> Tokenizer | None:
    """The first tokenizer on this machine with the vocabulary llama-2, llama-3 or llama-4."""
    for path in candidates(places):
        if _may_be(path, name):
            tokenizer = _loaded(path)
            if tokenizer is not None and tokenizer.identity.name == name:
                return tokenizer
    return None


def candidates(places: Places) -> Iterator[Path]:
    """Tokenizer files in the places, without opening them; each once."""
    seen: set[Path] = set()
    for path in _all_candidates(places):
        real = path.resolve()
        if real not in seen:
            seen.add(real)
            yield path


def _all_candidates(places: Places) -> Iterator[Path]:
    for folder in places.folders:
        yield from _below(folder, _DEPTH)
    yield from _in_packages()
    if places.hub_cache is not None:
        for model in sorted(places.hub_cache.glob("models--*")):
            for snapshot in sorted((model / "snapshots").glob("*")):
                yield from _below(snapshot, 1)


def _in_packages() -> Iterator[Path]:
    """Meta's files in the llama-models package, which is not imported for it."""
    spec = importlib.util.find_spec("llama_models")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for generation in ("llama3", "llama4"):
            path = Path(location) / generation / "tokenizer.model"
            if path.is_file():
                yield path


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if folder.is_file():
        yield folder
        return
    found = 0
    for level in range(depth + 1):
        for name in _NAMES:
            for path in sorted(folder.glob("*/" * level + name)):
                if path.is_file():
                    found += 1
                    yield path
                if found >= _MOST_FILES:
                    return


def _may_be(path: Path, name: str) -> bool:
    """Whether the kind of a file agrees with a name, from its first bytes."""
    try:
        kind = detect.file_kind(detect.read_head(path), where=str(path))
    except LlamatoolError:
        return False
    if kind == "tokenizer.json":
        return True
    return kind == ("sentencepiece" if name == "llama-2" else "tiktoken")


def _loaded(path: Path) -> Tokenizer | None:
    """The tokenizer of a file that was found; a damaged one is passed over, nobody asked for it."""
    try:
        return load.load(path)
    except LlamatoolError:
        return None
