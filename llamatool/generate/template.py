"""A checkpoint's own chat template: rendered in a sandbox, and encoded without being fooled.

Only what the template itself writes may become a control token. Before rendering, every place of
a message that could be read as one, alone or together with what the template puts beside it, is
replaced by an unguessable mark; afterwards the text is cut at the control tokens that are left,
and the marks are turned back. So the stretches between control tokens are encoded whole, as they
would be without any of this, and a message cannot end its own turn.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from llamatool.errors import InputError
from llamatool.generate.formats import Message
from llamatool.records import record
from llamatool.tokenizers.base import Tokenizer

MAX_TEMPLATE_CHARACTERS = 2**18  # the longest published templates have some 20,000


@record
class ChatTemplate:
    """The source text of a template and where it was found."""

    source: str
    where: str  # for messages: chat_template.jinja, tokenizer_config.json, ...
    variables: Mapping[str, str]  # bos_token, eos_token, ... as the checkpoint names them


def encode_template(
    template: ChatTemplate,
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    now: datetime | None = None,
) -> list[int]:
    """The ids of `messages` in `template`, ready for the assistant's answer.

    No token is added: the template writes BOS itself.
    Args: now: what templates see as the present; the system's time if None.
    Raises: InputError if the template is broken or refuses the messages.
    """
    names = _names(tokenizer)
    marks = _Marks(names)
    guarded = [{"role": m.role, "content": _content(m, marks)} for m in messages]
    text = render(template, guarded, now=now)
    ids: list[int] = []
    for part in _split(text, names):
        if part in names:
            ids.append(names[part])
        elif part:
            ids += tokenizer.encode(marks.restore(part))
    return ids


def render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, object]],
    *,
    now: datetime | None = None,
) -> str:
    """The text that `template` makes of `messages`, with the opening of the assistant's turn.

    Raises: InputError if the template is broken, refuses the messages or tries to leave its box.
    """
    import jinja2
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if len(template.source) > MAX_TEMPLATE_CHARACTERS:
        raise InputError("the chat template is too long", where=template.where)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = (now or datetime.now()).strftime
    try:
        return environment.from_string(template.source).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=True,
            tools=None,
            documents=None,
            **template.variables,
        )
    except _RefusedError as error:
        raise InputError(
            f"the chat template refuses this conversation: {error}",
            where=template.where,
            hint=None if template.where == "--template" else "see --template and --raw",
        ) from None
    except jinja2.TemplateSyntaxError as error:
        raise InputError(
            f"the chat template is broken at line {error.lineno}: {error.message}",
            where=template.where,
        ) from None
    except SecurityError as error:
        raise InputError(
            f"the chat template tries what a template must not: {error}", where=template.where
        ) from None
    except (
        jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError,
        ArithmeticError, RecursionError, MemoryError,
    ) as error:  # fmt: skip  # whatever an expression of the template can run into
        raise InputError(
            f"the chat template fails: {str(error) or type(error).__name__}", where=template.where
        ) from None


def _content(message: Message, marks: "_Marks") -> object:
    """The content as templates know it: a text, or a list where there are images."""
    text = marks.guard(message.content)
    if not message.num_images:
        return text
    return [{"type": "image"}] * message.num_images + [{"type": "text", "text": text}]


class _RefusedError(Exception):
    """The template called raise_exception."""


def _refuse(message: str) -> str:
    raise _RefusedError(message)


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML; templates want plain JSON.
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, indent=indent, **options)


def _names(tokenizer: Tokenizer) -> dict[str, int]:
    """The control tokens by name, those included that the file does not call special."""
    added: Mapping[str, int] = getattr(tokenizer, "added_ids", {})
    return {**added, **tokenizer.special_ids}


def _split(text: str, names: Mapping[str, int]) -> list[str]:
    """`text` cut before and after every name, the longest first where two begin alike."""
    if not names:
        return [text]
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.split(f"({pattern})", text)


class _Marks:
    """Marks of private-use characters that stand for stretches of a message."""

    _OPEN, _CLOSE = "\ue000", "\ue001"

    def __init__(self, names: Mapping[str, int]) -> None:
        self._names = sorted(names, key=len, reverse=True)
        secret = secrets.token_bytes(8)
        self._secret = "".join(chr(0xE100 + byte) for byte in secret)
        self._stretches: list[str] = []

    def guard(self, content: str) -> str:
        """`content` in which nothing can be read as a control token or as a half of one."""
        head = self._half(content, at_start=True)
        tail = self._half(content[head:], at_start=False)
        middle = content[head : len(content) - tail]
        pieces = _split(middle, dict.fromkeys(self._names, 0))
        guarded = [
            self._mark(piece) if number % 2 else piece for number, piece in enumerate(pieces)
        ]
        if head:
            guarded.insert(0, self._mark(content[:head]))
        if tail:
            guarded.append(self._mark(content[len(content) - tail :]))
        return "".join(guarded)

    def restore(self, text: str) -> str:
        """`text` with every mark turned back into what it stands for."""
        pattern = f"{self._OPEN}{self._secret}([\ue200-\ue2ff]+){self._CLOSE}"
        return re.sub(pattern, lambda match: self._stretches[_number(match[1])], text)

    def _mark(self, stretch: str) -> str:
        self._stretches.append(stretch)
        digits = "".join(chr(0xE200 + int(d, 16)) for d in f"{len(self._stretches) - 1:x}")
        return f"{self._OPEN}{self._secret}{digits}{self._CLOSE}"

    def _half(self, content: str, *, at_start: bool) -> int:
        """Characters at one end of `content` that could complete a name begun outside it."""
        longest = 0
        for name in self._names:
            for length in range(min(len(name) - 1, len(content)), longest, -1):
                half = name[-length:] if at_start else name[:length]
                if content.startswith(half) if at_start else content.endswith(half):
                    longest = length
                    break
        return longest


def _number(digits: str) -> int:
    return int("".join(f"{ord(d) - 0xE200:x}" for d in digits), 16)
