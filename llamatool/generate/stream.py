"""Text of an answer while it is written: whole characters only, cut at a stop text."""

from collections.abc import Sequence

from llamatool.generate.stop import StopTexts
from llamatool.tokenizers.base import Tokenizer


class TextStream:
    """Turns ids that arrive one by one into text that can be shown at once.

    What `feed` and `finish` return adds up to the decoded answer, byte for byte, up to the first
    stop text. An id may end inside a character; the rest is awaited, and only what never became
    complete turns into U+FFFD at the end.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, after: Sequence[int] = (), stops: Sequence[str] = ()
    ) -> None:
        # The prompt decides whether a first SentencePiece piece loses its space.
        self._decoder = tokenizer.stream(after)
        self._stops = StopTexts(stops)

    @property
    def stopped_at(self) -> str | None:
        """The stop text that was met."""
        return self._stops.found

    def feed(self, *ids: int) -> str:
        """The text that is certain now."""
        return self._stops.feed(self._decoder.feed(*ids))

    def finish(self) -> str:
        """The rest; to be called once, at the end."""
        return self._stops.feed(self._decoder.finish()) + self._stops.finish()
