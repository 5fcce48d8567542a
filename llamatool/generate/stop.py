"""When an answer ends: the union of all stop ids that any file names, and stop texts."""

from collections.abc import Iterable, Sequence

from llamatool.generate.formats import find_control
from llamatool.records import record
from llamatool.tokenizers.base import Tokenizer
from llamatool.tokenizers.special import STOP_NAMES

# The end of a text, as base models learn it; the other STOP_NAMES end a turn or a message.
TEXT_ENDS = ("<|end_of_text|>", "</s>", "<|endoftext|>")


@record
class StopIds:
    """Ids that end an answer, and which source names which."""

    ids: frozenset[int]
    sources: tuple[tuple[str, tuple[int, ...]], ...]  # (source, its ids)


def stop_ids(
    tokenizer: Tokenizer,
    *,
    generation_config: Sequence[int] = (),
    config: Sequence[int] = (),
    tokenizer_config: str | None = None,
    is_instruct: bool = False,
    names: Iterable[str] = (),
) -> StopIds:
    """The union of what the files say and what the tokenizer's well-known names mean.

    One source is not enough: the tokenizer of Llama 3 Instruct names 128001 as its end, and the
    model ends its turns with 128009.

    Args:
    generation_config, config: `eos_token_id` of generation_config.json and config.json.
    tokenizer_config: the name that tokenizer_config.json gives as `eos_token`.
    is_instruct: whether the names that end a turn count too (`<|eot_id|>`, `<|eom_id|>`, ...).
    names: further control tokens, by name; those that the tokenizer lacks are passed over.

    Example: Llama 3.1 8B Instruct -> 128001, 128008, 128009; Llama 2 -> 2.
    """
    well_known = STOP_NAMES if is_instruct else TEXT_ENDS
    named = [] if tokenizer_config is None else _found(tokenizer, [tokenizer_config])
    sources = (
        ("generation_config.json", tuple(generation_config)),
        ("config.json", tuple(config)),
        ("tokenizer_config.json", tuple(named)),
        ("the tokenizer's names", tuple(_found(tokenizer, well_known))),
        ("the prompt format", tuple(_found(tokenizer, names))),
    )
    ids = frozenset(i for _, found in sources for i in found if i >= 0)
    return StopIds(ids, tuple(source for source in sources if source[1]))


def _found(tokenizer: Tokenizer, names: Iterable[str]) -> list[int]:
    ids = (find_control(tokenizer, name) for name in names)
    return [i for i in ids if i is not None]


class StopTexts:
    """Looks for stop texts in a text that arrives in pieces, and holds back what may become one."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None  # the stop text that ended the answer

    def feed(self, piece: str) -> str:
        """The text that is certain now; nothing more once a stop text is found."""
        if self.found is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        # What is complete first ends the answer, however the text is cut into pieces; of those that
        # end together, the longest.
        hits = [
            (place + len(stop), place, stop)
            for stop in self._stops
            if (place := text.find(stop)) >= 0
        ]
        if hits:
            _, place, self.found = min(hits)
            self._held = ""
            return text[:place]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and is no stop text after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop text could begin with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
