"""Texts measured with tokenizers: how many tokens, how efficient, how they differ.

Pure values in, frozen results out; the command line reads the files and shows the results.
"""

import random
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from llamatool.config.model import Note
from llamatool.tokenizers.base import Identity, TokenCounter, Tokenizer
from llamatool.tokenizers.corpus import CorpusText
from llamatool.tokenizers.estimate import ESTIMATED, LARGEST_ERROR, Estimator, estimate
from llamatool.tokenizers.special import ControlStrings
from llamatool.tokenizers.texts import TextFacts

NFC_WORTH_SAYING = 0.02  # share of the tokens that composing the text must save

RESAMPLES = 1_000
INTERVAL = 0.95


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model matters for a text: its context, its vocabulary and its KV cache."""

    name: str
    context: int | None  # tokens
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    kv_bytes: Callable[[int], int]  # bytes of KV cache of that many tokens


@dataclass(frozen=True, slots=True)
class ContextUse:
    """What a text takes of one model, counted with a tokenizer of that model."""

    model: str
    context: int | None  # tokens
    share: float | None  # of the context that the text takes; above 1 it does not fit
    characters_that_fit: int | None  # of such text
    kv_bytes: int  # of the text's own tokens, BOS included where the model adds one


@dataclass(frozen=True, slots=True)
class Measurement:
    """One text counted with one tokenizer."""

    tokenizer: str
    identity: Identity | None  # None: an estimate, there was no file
    num_tokens: int
    exact: bool = True
    num_fragments: int | None = None  # tokens that are pieces of a character
    num_nfc_tokens: int | None = None  # of the composed text; None where it is composed already
    num_control_strings: int = 0
    control_strings: tuple[str, ...] = ()  # different ones, the first three
    error: float | None = None  # of an estimate: typical relative error
    uses: tuple[ContextUse, ...] = ()

    @property
    def fragment_share(self) -> float | None:
        """Share of the tokens that are byte fragments; None where it was not counted."""
        if self.num_fragments is None:
            return None
        return self.num_fragments / self.num_tokens if self.num_tokens else 0.0


@dataclass(frozen=True, slots=True)
class TextReport:
    """One text and its counts, in the order of the tokenizers."""

    name: str
    num_characters: int
    num_bytes: int
    nfc: bool
    num_words: int | None  # None for scripts without spaces
    results: tuple[Measurement, ...]
    notes: tuple[Note, ...] = ()

    def characters_per_token(self, result: Measurement) -> float | None:
        """Code points of the text for each token; None for no tokens."""
        return self.num_characters / result.num_tokens if result.num_tokens else None

    def bytes_per_token(self, result: Measurement) -> float | None:
        """UTF-8 bytes of the text for each token; None for no tokens."""
        return self.num_bytes / result.num_tokens if result.num_tokens else None

    def ratio_to_first(self, result: Measurement) -> float | None:
        """Tokens divided by those of the first tokenizer; None for no tokens.

        At an equal price for each token this is the ratio of the costs, too. An estimate is never
        divided by an exact count.
        """
        first = self.results[0]
        if first.exact != result.exact or not first.num_tokens:
            return None
        return result.num_tokens / first.num_tokens

    def tokens_per_word(self, result: Measurement) -> float | None:
        """Tokens for each word; None for scripts without spaces."""
        return result.num_tokens / self.num_words if self.num_words else None


@dataclass(slots=True)
class _Tally:
    """The counts of one tokenizer while a text passes by."""

    tokenizer: Tokenizer
    counter: TokenCounter
    strings: ControlStrings
    num_tokens: int = 0
    num_fragments: int = 0
    num_nfc_tokens: int = 0
    num_control: int = 0
    control: list[str] = field(default_factory=list)
    first: bool = True

    def add(self, parts: Iterable[tuple[str, list[int]]]) -> None:
        fragments = self.tokenizer.fragment_ids
        for part, ids in parts:
            self.num_tokens += len(ids)
            self.num_fragments += sum(map(fragments.__contains__, ids))
            self.num_nfc_tokens += self._nfc_tokens(part, ids)
            self._look_for_control(part)
            self.first = False

    def _nfc_tokens(self, part: str, ids: list[int]) -> int:
        # Parts begin and end where no character composes with its neighbour.
        if part.isascii() or unicodedata.is_normalized("NFC", part):
            return len(ids)
        composed = unicodedata.normalize("NFC", part)
        return len(self.counter.ids_of(composed, first=self.first))

    def _look_for_control(self, part: str) -> None:
        for name in self.strings.find(part):
            self.num_control += 1
            if len(self.control) < 3 and name not in self.control:
                self.control.append(name)


def measure(
    name: str,
    texts: Iterable[str],
    tokenizers: Sequence[Tokenizer],
    facts: TextFacts,
    *,
    estimators: Sequence[Estimator] = (),
    specials: Collection[str] | Literal["all"] = (),
    with_bos: bool = False,
) -> TextReport:
    """A text that arrives in pieces, counted with every tokenizer in one pass.

    Memory holds one part of the text for each tokenizer (and the whole text for a tokenizer whose
    texts cannot be cut, or if special tokens are to be honoured).

    Args: facts: filled by whoever yields the pieces (texts.py). estimators: for tokenizers without
    a file; their figures come after the exact ones. specials: names of control tokens
    that the text may hold. with_bos: count a BOS where the tokenizer has one.
    """
    tallies = [_Tally(t, t.counter(), ControlStrings(t.special_ids)) for t in tokenizers]
    if specials:
        whole = "".join(texts)
        for estimator in estimators:
            estimator.add(whole)
        for tally in tallies:
            tally.add([(whole, tally.tokenizer.encode(whole, specials=specials))])
    for text in texts if not specials else ():
        for tally in tallies:
            tally.add(tally.counter.push(text))
        for estimator in estimators:
            estimator.add(text)
    for tally in tallies:
        tally.add(tally.counter.finish())
        tally.num_tokens += with_bos and tally.tokenizer.bos_id is not None
    return TextReport(
        name=name,
        num_characters=facts.num_characters,
        num_bytes=facts.num_bytes,
        nfc=facts.nfc,
        num_words=facts.words,
        results=(
            *(_measurement(tally, facts) for tally in tallies),
            *(estimated_measurement(estimator) for estimator in estimators),
        ),
        notes=facts.notes(),
    )


def _measurement(tally: _Tally, facts: TextFacts) -> Measurement:
    return Measurement(
        tokenizer=tally.tokenizer.identity.label,
        identity=tally.tokenizer.identity,
        num_tokens=tally.num_tokens,
        num_fragments=tally.num_fragments,
        num_nfc_tokens=None if facts.nfc else tally.num_nfc_tokens,
        num_control_strings=tally.num_control,
        control_strings=tuple(tally.control),
    )


def estimated_measurement(estimator: Estimator) -> Measurement:
    """The figure of a tokenizer without a file, marked as an estimate."""
    return Measurement(
        tokenizer=ESTIMATED[estimator.name],
        identity=None,
        num_tokens=estimator.num_tokens,
        exact=False,
        error=LARGEST_ERROR[estimator.name],
    )


def context_use(model: Model, num_tokens: int, num_characters: int, *, add_bos: bool) -> ContextUse:
    """What `num_tokens` tokens of a text take of a model.

    share = tokens / context; characters that fit = characters / tokens x context, rounded down.
    Example: 6678 tokens on Llama 3 8B (131072 bytes a token) -> 875298816 bytes without BOS.
    """
    total = num_tokens + add_bos
    share = fit = None
    if model.context:
        share = total / model.context
        if num_tokens:
            fit = num_characters * (model.context - add_bos) // num_tokens
    return ContextUse(model.name, model.context, share, fit, model.kv_bytes(total))


def nfc_note(report: TextReport) -> Note | None:
    """A warning if composing the text (NFC) would save more than 2 % of the tokens.

    Example: a Vietnamese text in decomposed form, Llama 3 -> 6620 tokens, 2863 if composed.
    """
    saved = [
        (r.num_nfc_tokens / r.num_tokens, r)
        for r in report.results
        if r.num_nfc_tokens is not None and r.num_tokens
    ]
    if not saved:
        return None
    share, best = min(saved, key=lambda item: item[0])
    if best.num_nfc_tokens is None or 1 - share <= NFC_WORTH_SAYING:
        return None
    return Note(
        "text_not_nfc",
        f"decomposed characters: composed (NFC) the text is {best.num_nfc_tokens:,} tokens instead "
        f"of {best.num_tokens:,} with {best.tokenizer}; see --nfc",
    )


def control_note(report: TextReport) -> Note | None:
    """A warning if the text holds strings that a chat server would read as control tokens."""
    worst = max(report.results, key=lambda r: r.num_control_strings, default=None)
    if worst is None or not worst.num_control_strings:
        return None
    count = worst.num_control_strings
    strings = "a string" if count == 1 else f"{count:,} strings"
    return Note(
        "text_control_strings",
        f"the text holds {strings} that a chat server would read as control tokens "
        f"({', '.join(worst.control_strings)}); here they are counted as plain text",
    )


def model_notes(tokenizer: Tokenizer, model: Model) -> tuple[Note, ...]:
    """What speaks against this tokenizer being the one of this model.

    Example: Llama 3's tokenizer (128256 ids) beside a Llama 2 config (32000 rows) -> a note.
    """
    found = []
    if tokenizer.vocab_size > model.vocab_size:
        found.append(
            Note(
                "vocab_size",
                f"{tokenizer.identity.label} has ids up to {tokenizer.vocab_size - 1:,}, but "
                f"{model.name} has {model.vocab_size:,} rows: not its tokenizer",
            )
        )
    elif tokenizer.vocab_size < 0.9 * model.vocab_size:
        found.append(
            Note(
                "vocab_size",
                f"{tokenizer.identity.label} has {tokenizer.vocab_size:,} ids and {model.name} "
                f"{model.vocab_size:,} rows: probably not its tokenizer",
            )
        )
    bos, stated = tokenizer.bos_id, model.bos_token_id
    if bos is not None and stated is not None and bos != stated:
        found.append(Note("bos_id", f"BOS is {bos} in the tokenizer and {stated} in {model.name}"))
    odd = [i for i in model.eos_token_ids if i not in tokenizer.names_by_id]
    if odd and tokenizer.names_by_id:
        found.append(
            Note("eos_id", f"EOS {odd[0]} of {model.name} is no control token of the tokenizer")
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with the ends of its bootstrap interval."""

    value: float
    low: float | None  # None where there is nothing to resample
    high: float | None


@dataclass(frozen=True, slots=True)
class CorpusCell:
    """One text of a corpus with one tokenizer."""

    num_tokens: int
    characters_per_token: float
    premium: Interval | None  # tokens / tokens of the reference; None for what is no translation
    tokens_per_word: float | None
    exact: bool = True


@dataclass(frozen=True, slots=True)
class CorpusRow:
    """One text of a corpus with every tokenizer."""

    code: str
    name: str
    num_characters: int
    num_bytes: int
    cells: tuple[CorpusCell, ...]
    worse: tuple[bool, ...]  # more tokens than one column before, with a larger vocabulary


@dataclass(frozen=True, slots=True)
class CorpusReport:
    """A corpus, text by text, with the tokenizers as columns."""

    corpus: str
    reference: str | None  # code of the language that premiums refer to
    tokenizers: tuple[str, ...]
    identities: tuple[Identity | None, ...]
    rows: tuple[CorpusRow, ...]
    notes: tuple[Note, ...] = ()


Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Column:
    """How one column of the corpus table counts: an exact tokenizer, or an estimate."""

    name: str
    identity: Identity | None
    count: Count  # tokens of a text
    count_lines: Callable[[Sequence[str]], list[int]]  # tokens of each line, adding up to the text
    exact: bool
    vocab_size: int = 0


def exact_column(tokenizer: Tokenizer) -> Column:
    """A column that counts with a tokenizer."""
    return Column(
        tokenizer.identity.label,
        tokenizer.identity,
        tokenizer.count,
        lambda lines: _line_counts(tokenizer, lines),
        exact=True,
        vocab_size=tokenizer.vocab_size,
    )


def estimated_column(name: str) -> Column:
    """A column of the corpus table that estimates."""
    return Column(
        ESTIMATED[name],
        None,
        lambda text: estimate(name, text),
        lambda lines: [estimate(name, line) for line in lines],
        exact=False,
    )


def measure_corpus(
    name: str, texts: Sequence[CorpusText], columns: Sequence[Column], *, reference: str
) -> CorpusReport:
    """Every text with every column: density, premium over the reference, and its interval.

    premium = tokens of a translation / tokens of the reference text, both with one tokenizer; its
    interval is a bootstrap over the sentences (1000 resamples, fixed seed), which both texts share.
    Example: UDHR, Llama 3, Burmese over English -> 14.54.
    """
    base = next((text for text in texts if text.code == reference and text.aligned), None)
    base_lines = [column.count_lines(base.lines) if base else [] for column in columns]
    rows = []
    for text in texts:
        words = _words(text.text)
        cells = tuple(
            _cell(text, column, base, lines, words)
            for column, lines in zip(columns, base_lines, strict=True)
        )
        worse = (False, *map(_is_worse, pairwise(columns), pairwise(cells)))
        rows.append(
            CorpusRow(text.code, text.name, len(text.text), len(text.text.encode()), cells, worse)
        )
    return CorpusReport(
        corpus=name,
        reference=reference if base else None,
        tokenizers=tuple(column.name for column in columns),
        identities=tuple(column.identity for column in columns),
        rows=tuple(rows),
    )


def _cell(
    text: CorpusText,
    column: Column,
    base: CorpusText | None,
    base_lines: Sequence[int],
    words: int | None,
) -> CorpusCell:
    num_tokens = column.count(text.text)
    premium = None
    if base is not None and text.aligned and sum(base_lines) > 0:
        value = num_tokens / column.count(base.text)
        low = high = None
        lines = column.count_lines(text.lines)
        if len(lines) == len(base_lines) > 2 and text.code != base.code:
            low, high = bootstrap_ratio(lines, base_lines)
        premium = Interval(value, low, high)
    return CorpusCell(
        num_tokens=num_tokens,
        characters_per_token=len(text.text) / num_tokens if num_tokens else 0.0,
        premium=premium,
        tokens_per_word=num_tokens / words if words else None,
        exact=column.exact,
    )


def _is_worse(columns: tuple[Column, Column], cells: tuple[CorpusCell, CorpusCell]) -> bool:
    """Whether the second needs more tokens, although its vocabulary is larger."""
    exact = columns[0].exact and columns[1].exact
    larger = columns[1].vocab_size >= columns[0].vocab_size
    return exact and larger and cells[1].num_tokens > cells[0].num_tokens


def bootstrap_ratio(numerators: Sequence[int], denominators: Sequence[int]) -> tuple[float, float]:
    """The 95 % interval of sum(numerators) / sum(denominators), pairs resampled together.

    Example: equal sequences -> (1.0, 1.0).
    """
    generator = random.Random(0)
    pairs = list(zip(numerators, denominators, strict=True))
    ratios = []
    for _ in range(RESAMPLES):
        above, below = zip(*generator.choices(pairs, k=len(pairs)), strict=True)
        ratios.append(sum(above) / sum(below))
    ratios.sort()
    cut = round(RESAMPLES * (1 - INTERVAL) / 2)
    return ratios[cut], ratios[-cut - 1]


def _line_counts(tokenizer: Tokenizer, lines: Sequence[str]) -> list[int]:
    # Between a line end and the next visible character no token crosses (chunks.py).
    counter = tokenizer.counter()
    return [len(counter.ids_of(line, first=i == 0)) for i, line in enumerate(lines)]


def _words(text: str) -> int | None:
    facts = TextFacts()
    facts.add(text)
    return facts.words
