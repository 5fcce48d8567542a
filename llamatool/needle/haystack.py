"""The haystack: whole sentences as token ids, and their sum made exact to the token.

A unit is one sentence with the white space that belongs to it, encoded once with the model's own
tokenizer. Ids are joined, never decoded and encoded again, so a length is exact by counting.
"""

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

from llamatool.checkpoint import files
from llamatool.errors import InputError, UsageError
from llamatool.needle.grammar import Language, sentences
from llamatool.records import record
from llamatool.tokenizers.base import Tokenizer

DOCUMENT_SUFFIXES = (".txt", ".md", ".rst")
MAX_DOCUMENT_BYTES = 256 * 2**20
LATEST_TEXTS = 8192  # whose ids are kept
WINDOW = 160  # units that are looked through for an exact sum
MAX_WINDOW = 4_000  # of generated sentences, where the sum needs a rare length
SLACK = 64  # tokens that generated sentences may make up for at the end of documents
IN_ORDER = 4  # mean sentences before a border from which on exact sums are sought

_SENTENCE = re.compile(
    r"\s*.+?(?:[.!?][\"'\u201d\u2019)\]]*(?=\s)|[。！？][」』”’）]*|(?=\n)|\Z)\n*", re.DOTALL
)


@record
class Unit:
    """A sentence: its text and its ids."""

    text: str
    ids: tuple[int, ...]


class Encoder:
    """Encodes texts that stand inside a longer one: no BOS, no dummy prefix."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._counter = tokenizer.counter()
        # Questions and samples come again for every length and trial.
        self._latest = lru_cache(maxsize=LATEST_TEXTS)(self._encode)

    def ids(self, text: str) -> tuple[int, ...]:
        """The ids of `text` where other text precedes it. Control tokens in it stay text."""
        return self._latest(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._counter.ids_of(text, first=False))

    def continuation(self, before: str, text: str) -> tuple[int, ...]:
        """The ids of `text` as it continues `before`.

        Example: ` 482913` behind `is` is [220, 21984, 24331] in Llama 3.
        """
        head, whole = self.ids(before), self.ids(before + text)
        return whole[len(head) :] if whole[: len(head)] == head else self.ids(text)

    def unit(self, text: str) -> Unit:
        """A sentence with its ids."""
        return Unit(text, self.ids(text))


class Haystack:
    """Where sentences come from: the grammar, or documents of the user's own."""

    name: str  # grammar, or the path
    language: Language
    sha256: str | None = None  # of the documents' text
    repeats: bool = False

    def __init__(self, encoder: Encoder, language: Language) -> None:
        self.encoder = encoder
        self.language = language

    def units(self, seed: int) -> Iterator[Unit]:
        """Sentences of one trial, in order."""
        raise NotImplementedError

    def fillers(self, seed: int) -> Iterator[Unit]:
        """Generated sentences that close a gap where the own ones cannot."""
        space = spacing(self.language)
        for text in sentences(self.language, seed):
            yield self.encoder.unit(space.format(text))

    def contains(self, text: str) -> bool:
        """Whether `text` stands in the haystack by itself, so that it is no needle."""
        raise NotImplementedError


class GrammarHaystack(Haystack):
    """Generated sentences that never repeat."""

    name = "grammar"

    def units(self, seed: int) -> Iterator[Unit]:
        """Sentences of one trial, in order."""
        return self.fillers(seed)

    def contains(self, text: str) -> bool:
        """False: the grammar has no digits and none of the keys' words side by side."""
        return False


class DocumentHaystack(Haystack):
    """Documents in the order of their names, from a sentence on that depends on the trial."""

    def __init__(
        self, encoder: Encoder, language: Language, name: str, text: str, *, repeats: bool
    ) -> None:
        super().__init__(encoder, language)
        self.name = name
        self.repeats = repeats
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self._text = text
        self._units = tuple(encoder.unit(part) for part in split_sentences(text))
        self.num_tokens = sum(len(unit.ids) for unit in self._units)
        if not self._units:
            raise InputError("the haystack holds no text", where=name)

    def units(self, seed: int) -> Iterator[Unit]:
        """Every sentence once, beginning at one that depends on the seed.

        The beginning of the text follows its end there. Repeated for ever if so asked.
        """
        first = (seed * 0x9E3779B1) % len(self._units) if seed else 0
        once = (*self._units[first:], *self._units[:first])
        return chain.from_iterable(_forever(once)) if self.repeats else iter(once)

    def contains(self, text: str) -> bool:
        """Whether `text` stands in the documents."""
        return text in self._text


def open_haystack(
    encoder: Encoder, source: str, language: Language, *, repeats: bool = False
) -> Haystack:
    """The haystack that `--haystack` names: `grammar`, a file, or a folder of documents.

    Raises: InputError if it cannot be read as UTF-8 or holds no text.
    """
    if source == "grammar":
        if repeats:
            raise UsageError("generated sentences never run out: --repeat is for documents")
        return GrammarHaystack(encoder, language)
    return DocumentHaystack(
        encoder, language, source, read_documents(Path(source)), repeats=repeats
    )


def read_documents(path: Path) -> str:
    """The text of a file, or of a folder's .txt, .md and .rst files in the order of their paths.

    Raises: InputError if there is none, or one is too large or no UTF-8.
    """
    if not path.exists():
        raise InputError(
            "there is no such file or folder",
            where=str(path),
            hint="--haystack takes `grammar`, a text file, or a folder of them",
        )
    if not path.is_dir():
        return _read(path)
    found = sorted(
        (p for p in path.rglob("*") if p.suffix.lower() in DOCUMENT_SUFFIXES and p.is_file()),
        key=lambda p: p.relative_to(path).as_posix(),
    )
    if not found:
        raise InputError(
            f"the folder holds no documents ({', '.join(DOCUMENT_SUFFIXES)})", where=str(path)
        )
    return "\n".join(_read(p).rstrip("\n") for p in found) + "\n"


def split_sentences(text: str) -> list[str]:
    r"""`text` cut behind the ends of sentences and at line ends; the parts add up to it.

    Example: `One. Two?\nThree` -> `One.`, ` Two?\n`, `Three`.
    """
    return _SENTENCE.findall(text)


def spacing(language: Language) -> str:
    """How a sentence stands in a text: behind a space; in Chinese on a line of its own.

    A space or a line end is where all the tokenizers cut, so that the ids of the sentences are
    those of the whole text.
    """
    return " {}" if language == "en" else "{}\n"


class Filler:
    """Takes sentences from a haystack so that they add up to the tokens asked for."""

    def __init__(self, haystack: Haystack, seed: int) -> None:
        self._haystack = haystack
        self._source = haystack.units(seed)
        self._window: deque[Unit] = deque()
        self._window_tokens = 0
        self._spare_source = haystack.fillers(seed + 0x5EED)
        self._spare: deque[Unit] = deque()
        self.num_foreign = 0  # generated sentences within documents
        self.num_tokens = 0

    def exact(self, num_tokens: int) -> list[Unit]:
        """Sentences of exactly `num_tokens` tokens.

        Most in the order of the haystack; the last few are chosen by their lengths among the
        next ones, and generated ones stand in where that has no solution.

        Raises: InputError if the documents are too short, or no sentences have that sum.
        Example: 0 -> none; 23 -> perhaps sentences of 11 and 12 tokens.
        """
        taken: list[Unit] = []
        left = num_tokens
        while left:
            self._fill_window(WINDOW)
            in_order = self._next_in_order(left)
            if in_order is not None:
                taken.append(in_order)
                left -= len(in_order.ids)
                continue
            chosen = self._sum(left)
            if chosen is None:
                raise self._no_sum(left)
            taken += chosen
            break
        self.num_tokens += num_tokens
        return taken

    def _fill_window(self, size: int) -> None:
        for unit in islice(self._source, max(0, size - len(self._window))):
            self._window.append(unit)
            self._window_tokens += len(unit.ids)

    def _next_in_order(self, left: int) -> Unit | None:
        """The next sentence, while the border is far enough for exact sums."""
        if not self._window:
            return None
        mean = self._window_tokens / len(self._window)
        for place, unit in enumerate(self._window):
            if left - len(unit.ids) >= IN_ORDER * mean:
                del self._window[place]
                self._window_tokens -= len(unit.ids)
                return unit
            if place > 8:
                break
        return None

    def _sum(self, left: int) -> list[Unit] | None:
        places = subset_with_sum([len(unit.ids) for unit in self._window], left)
        if places is not None:
            return self._take_own(places)
        # The window is short only where the documents end.
        if self._window_tokens + SLACK < left:
            raise self._too_short(left)
        size = WINDOW
        while size <= MAX_WINDOW:
            missing = max(0, size - len(self._spare))
            self._spare.extend(islice(self._spare_source, missing))
            pool = [*self._window, *self._spare]
            places = subset_with_sum([len(unit.ids) for unit in self._spare], left)
            if places is not None:
                if not isinstance(self._haystack, GrammarHaystack):
                    self.num_foreign += len(places)
                return _take(self._spare, places)
            places = subset_with_sum([len(unit.ids) for unit in pool], left)
            if places is not None:
                own = len(self._window)
                self.num_foreign += sum(place >= own for place in places)
                chosen = [pool[place] for place in places]
                _take(self._spare, [place - own for place in places if place >= own])
                self._take_own([place for place in places if place < own])
                return chosen
            size *= 5
        return None

    def _take_own(self, places: Iterable[int]) -> list[Unit]:
        units = _take(self._window, places)
        self._window_tokens -= sum(len(unit.ids) for unit in units)
        return units

    def _too_short(self, left: int) -> InputError:
        return InputError(
            f"the haystack is {left:,} tokens too short",
            where=self._haystack.name,
            hint="name more documents, ask for shorter lengths, or allow --repeat",
        )

    def _no_sum(self, left: int) -> InputError:
        return InputError(
            f"no sentences of together {left} tokens were found", where=self._haystack.name
        )


def subset_with_sum(lengths: Sequence[int], total: int) -> list[int] | None:
    """Places of elements that add up to `total`, or None.

    Sums that can be reached are bits of one integer, which each element shifts by its length.
    Example: [5, 9, 7], 12 -> [0, 2].
    """
    mask = (1 << (total + 1)) - 1
    reached = [1]
    for length in lengths:
        reached.append(reached[-1] | (reached[-1] << length) & mask)
        if reached[-1] >> total & 1:
            break
    if not reached[-1] >> total & 1:
        return None
    places = []
    for place in range(len(reached) - 2, -1, -1):
        if not reached[place] >> total & 1:
            places.append(place)
            total -= lengths[place]
    return places[::-1]


def smallest_gap(haystack: Haystack, sample: int = 400) -> int:
    """The number of tokens from which on every gap can be closed by generated sentences.

    Example: 6 for the pocket tokenizer, whose shortest sentence has 6 tokens.
    """
    lengths = {len(unit.ids) for unit in islice(haystack.fillers(0), sample)}
    sums = 1
    span = 4 * max(lengths)
    mask = (1 << span) - 1
    for _ in range(4):
        for length in lengths:
            sums |= (sums << length) & mask
    gap = span
    while gap > 1 and sums >> (gap - 1) & 1:
        gap -= 1
    return gap


def seams_are_natural(haystack: Haystack, sample: int = 200) -> bool:
    """Whether joined ids are those of the joined text, on `sample` sentences."""
    units = list(islice(haystack.units(0), sample))
    text = "".join(unit.text for unit in units)
    return haystack.encoder.ids(text) == tuple(chain.from_iterable(unit.ids for unit in units))


def _take(window: "deque[Unit]", places: Iterable[int]) -> list[Unit]:
    ordered = sorted(places)
    units = [window[place] for place in ordered]
    for place in reversed(ordered):
        del window[place]
    return units


def _forever(units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
    while True:
        yield units


def _read(path: Path) -> str:
    with files.open_regular(path) as stream:
        data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise InputError(
            f"larger than {MAX_DOCUMENT_BYTES >> 20} MiB: no document", where=str(path)
        )
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"no UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}", where=str(path)
        ) from None
