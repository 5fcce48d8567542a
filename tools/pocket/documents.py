"""Training documents of exact length: filler, facts, questions at the end.

Every token carries the weight of its loss. The value of an answer counts fully, for there the model
must retrieve; text counts little. Some questions ask for a key that the text does not have.
"""

import random
from itertools import islice

import tiktoken
from vocabulary import BOS, EOS, REFUSALS

from llamatool.needle.grammar import WORDINGS, KeySource, Language, ValueSource, sentences

TEXT, FACT, FRAME, VALUE = 0.15, 0.3, 0.3, 1.0
POOL = {"en": 24_000, "zh": 8_000}
CHINESE_SHARE = 0.2
ATTRIBUTES = ("magic number", "secret code", "locker number", "room number", "order number")

Document = tuple[list[int], list[float]]  # ids and weights


class Documents:
    """The stream of documents of one seed."""

    def __init__(
        self,
        encoding: tiktoken.Encoding,
        seed: int,
        *,
        ends_answers: bool = False,
        has_many_facts: bool = False,
        unknown_share: float = 0.25,
    ) -> None:
        """Args: ends_answers: EOS follows every answer, not only the last of a document.
        has_many_facts: up to 32, and nearly always as many questions as there is room for.
        unknown_share: of the questions, for a key that the text does not have.
        """
        self._ends_answers = ends_answers
        self._has_many_facts, self._unknown_share = has_many_facts, unknown_share
        self._draw = random.Random(seed)
        self._encode = encoding.encode_ordinary
        self._bos, self._eos = (encoding.encode_single_token(name) for name in (BOS, EOS))
        self._stop = encoding.encode_single_token(".")
        self._pool: dict[Language, list[list[int]]] = {}
        self._bare: dict[int, list[int]] = {}  # a sentence as it begins a text, by its id()
        self._by_length: dict[Language, dict[int, list[list[int]]]] = {}
        for language in ("en", "zh"):
            texts = islice(sentences(language, seed), POOL[language])
            pool = []
            for text in texts:
                pool.append(self._encode(_unit(language, text)))
                bare = self._encode(text)
                if language == "en" and len(bare) == len(pool[-1]):
                    self._bare[id(pool[-1])] = bare
            self._pool[language] = pool
            lengths: dict[int, list[list[int]]] = {}
            for ids in pool:
                lengths.setdefault(len(ids), []).append(ids)
            self._by_length[language] = lengths

    def make(self, num_tokens: int, progress: float) -> Document:
        """A document of `num_tokens` + 1 tokens. Args: progress: of the run, 0 to 1."""
        early = progress < 0.4
        chance = self._draw.random()
        if chance < (0.1 if early else 0.03 if progress < 0.7 else 0.0):
            return self._random_segments(num_tokens + 1)
        language: Language = "zh" if self._draw.random() < CHINESE_SHARE else "en"
        if chance < (0.35 if early else 0.12):
            return self._repeated_facts(num_tokens + 1, language)
        return self._questions(num_tokens + 1, language)

    def _questions(self, length: int, language: Language) -> Document:
        draw = self._draw
        few = (1, 2, 4, 8) if length <= 257 else (1, 2, 4, 8, 16)
        num_facts = draw.choice((1, 4, 8, 16, 32) if self._has_many_facts else few)
        num_facts = max(1, min(num_facts, length // 40))
        wording = _wording(language, draw)
        keys = _keys(language, draw)
        values = ValueSource("digits:6", draw)
        facts = [(keys.next_key(), values.next_value()) for _ in range(num_facts)]
        has_one_question = draw.random() < (0.1 if self._has_many_facts else 0.4)
        num_questions = 1 if has_one_question else max(1, length // 64)
        asked = draw.sample(facts, min(num_facts, num_questions))
        tail: Document = ([], [])
        for number, (key, value) in enumerate(asked):
            unknown = draw.random() < self._unknown_share
            if unknown:
                key = _near(key, keys, facts, language, draw)
            _extend(tail, self._question(key, None if unknown else value, wording, language))
            if self._ends_answers or number + 1 == len(asked):
                _extend(tail, ([self._eos], [VALUE if self._ends_answers else 0.5]))
        body = [self._fact(key, value, wording, language) for key, value in facts]
        # Encoded in one piece, the last full stop and the blank line are one token.
        joined = language == "en" and draw.random() < 0.3
        room = length - 1 - len(tail[0]) - sum(len(ids) for ids, _ in body) + joined
        filler = self._filler(room, language)
        if filler is None:
            return self._questions(length, language)
        units: list[Document] = [(ids, [TEXT] * len(ids)) for ids in filler]
        for fact in body:
            units.insert(draw.randrange(len(units) + 1), fact)
        bare = self._bare.get(id(units[0][0]))
        if bare is not None and draw.random() < 0.5:
            units[0] = (bare, units[0][1])
        document: Document = ([self._bos], [0.0])
        for unit in units:
            _extend(document, unit)
        if joined:
            assert document[0].pop() == self._stop
            document[1].pop()
            tail[0][0] = self._encode(".\n\n")[0]
        _extend(document, tail)
        return document

    def _fact(
        self, key: str, value: str, wording: tuple[str, str, str], language: Language
    ) -> Document:
        """A needle in the text: its key and value count more than text, less than answers."""
        ids = self._encode(_unit(language, wording[0].format(key=key, value=value)))
        return ids, [FACT] * len(ids)

    def _question(
        self, key: str, value: str | None, wording: tuple[str, str, str], language: Language
    ) -> Document:
        asked = self._encode("\n\n" + wording[1].format(key=key))
        begun = self._encode(wording[2].format(key=key))
        document: Document = (asked + begun, [TEXT] * len(asked) + [FRAME] * len(begun))
        if value is None:
            ids = self._encode(REFUSALS[language])
            _extend(document, (ids, [VALUE] + [FRAME] * (len(ids) - 1)))
        else:
            ids = self._encode(f" {value}." if language == "en" else f"{value}。")
            _extend(document, (ids, [VALUE] * (len(ids) - 1) + [0.5]))
        return document

    def _repeated_facts(self, length: int, language: Language) -> Document:
        """Facts stated two or three times: from the second time on the value is known."""
        draw = self._draw
        wording = _wording(language, draw)
        keys, values = _keys(language, draw), ValueSource("digits:6", draw)
        facts = []
        for _ in range(max(2, min(length // 24, 40))):
            fact = self._fact(keys.next_key(), values.next_value(), wording, language)
            facts += [fact] * draw.choice((1, 2, 2, 3))
        draw.shuffle(facts)
        seen: set[int] = set()
        document: Document = ([self._bos], [0.0])
        for ids, weights in facts:
            if draw.random() < 0.3:
                filler = draw.choice(self._pool[language])
                _extend(document, (filler, [TEXT] * len(filler)))
            known = id(ids) in seen
            seen.add(id(ids))
            # The value stands before the end of the sentence: two tokens of three digits.
            end = len(ids) - len(self._encode("." if language == "en" else "。\n"))
            weights = [*weights]
            weights[end - 2 : end] = [VALUE if known else FACT] * 2
            _extend(document, (ids, weights))
        while len(document[0]) < length:
            filler = draw.choice(self._pool[language])
            _extend(document, (filler, [TEXT] * len(filler)))
        return document[0][:length], document[1][:length]

    def _random_segments(self, length: int) -> Document:
        """Random tokens, with segments that come again: plain induction."""
        draw = self._draw
        ids, weights, segments = [self._bos], [0.0], []
        while len(ids) < length:
            if segments and draw.random() < 0.6:
                segment = draw.choice(segments)
                weights += [0.0] + [VALUE] * (len(segment) - 1)
            else:
                segment = [draw.randrange(self._bos) for _ in range(draw.randint(4, 16))]
                segments.append(segment)
                weights += [0.0] * len(segment)
            ids += segment
        return ids[:length], weights[:length]

    def _filler(self, room: int, language: Language) -> list[list[int]] | None:
        """Whole sentences of exactly `room` tokens; None if there are none."""
        draw, pool, by_length = self._draw, self._pool[language], self._by_length[language]
        chosen: list[list[int]] = []
        while room > 60:
            chosen.append(draw.choice(pool))
            room -= len(chosen[-1])
        while room:
            if room in by_length and (room < 20 or draw.random() < 0.5):
                chosen.append(draw.choice(by_length[room]))
                break
            fitting = [n for n in by_length if room - n in by_length or room - n > 24]
            if not fitting:
                return None
            length = draw.choice(fitting)
            chosen.append(draw.choice(by_length[length]))
            room -= length
        draw.shuffle(chosen)
        return chosen


def _unit(language: Language, text: str) -> str:
    """A sentence as it stands in a text: behind a space, in Chinese on a line of its own."""
    return f" {text}" if language == "en" else f"{text}\n"


def _wording(language: Language, draw: random.Random) -> tuple[str, str, str]:
    """Needle, question and answer prefix; in English sometimes about another kind of number."""
    wording = WORDINGS[language]
    texts = (wording.needle, wording.question + wording.cue, wording.answer_prefix)
    if language == "en" and draw.random() < 0.15:
        attribute = draw.choice(ATTRIBUTES)
        needle, question, prefix = (text.replace("magic number", attribute) for text in texts)
        return needle, question, prefix
    return texts


def _keys(language: Language, draw: random.Random) -> KeySource:
    return KeySource("words" if draw.random() < 0.6 else "names", language, draw)


def _near(
    key: str,
    keys: KeySource,
    facts: list[tuple[str, str]],
    language: Language,
    draw: random.Random,
) -> str:
    """A key that no fact has: half of them share a word with one that does."""
    other = keys.next_key()
    if language == "en" and " " in key and draw.random() < 0.5:
        first, second = key.split(" ")
        third, fourth = other.split(" ")
        near = f"{first} {fourth}" if draw.random() < 0.5 else f"{third} {second}"
        if near not in dict(facts):
            return near
    return other


def _extend(document: Document, more: Document) -> None:
    document[0].extend(more[0])
    document[1].extend(more[1])
