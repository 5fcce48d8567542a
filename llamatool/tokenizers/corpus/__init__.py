"""The built-in corpus: one short text in fourteen languages, and five samples of other writing.

Every language has the same sixteen sentences, one on each line, so that sentence N of one file says
what sentence N of another says. The texts were written for llamatool and are in the public domain
(CC0); all are in Unicode's composed form (NFC).
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

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


def _read(name: str) -> str:
    # No final newline: a text of sixteen sentences, not of sixteen lines.
    return files(__name__).joinpath(name).read_text(encoding="utf-8").removesuffix("\n")
