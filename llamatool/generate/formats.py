r"""How each generation wants a conversation written: the built-in chat formats.

A format turns messages into parts: control tokens, by name, and stretches of ordinary text, each
encoded on its own as the makers' code does. So a message that holds `<|eot_id|>` stays text, and
the ids are those of the makers even where text begins with a line end.

  llama-2        `<s>` [INST] user [/INST] answer `</s>`, one BOS and EOS for each completed turn
  codellama-70b  `<s>` and turns of `Source: role`, each ended by `<step>`
  llama-3        `<|start_header_id|>` role `<|end_header_id|>` \n\n content `<|eot_id|>`
  llama-4        the same with `<|header_start|>`, `<|header_end|>` and `<|eot|>`, but the result
                 of a tool ends with `<|eom|>`

Sources: meta-llama/llama generation.py, codellama generation.py, llama-models 0.3.0
llama3/chat_format.py and llama4/chat_format.py.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from llamatool.config.generation import Identity
from llamatool.errors import TokenizerError, UsageError
from llamatool.records import record
from llamatool.tokenizers.base import Tokenizer

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@record
class Message:
    """One turn of a conversation."""

    role: Role
    content: str
    num_images: int = 0  # they stand before the content


class Control(NamedTuple):
    """A control token; the first of the names that the tokenizer knows."""

    names: tuple[str, ...]


class Text(NamedTuple):
    """Ordinary text, encoded on its own; `continues`: without a SentencePiece dummy prefix."""

    text: str
    continues: bool = False


Part = Control | Text

IMAGE = "<|image|>"  # the control token in whose place an image is read


@record
class ChatFormat:
    """A built-in format and the control tokens that end a turn in it."""

    name: str
    title: str
    parts: Callable[[Sequence[Message]], list[Part]]
    stop_names: tuple[str, ...]  # besides the end of text


def format_of(identity: Identity | None) -> ChatFormat | None:
    """The format of the model that `identity` names; None if no format is known for it.

    Example: Llama 3.2 1B Instruct -> llama-3; Code Llama 70B -> codellama-70b; Llama 1 -> None.
    """
    if identity is None or identity.family != "llama" or identity.variant == "guard":
        return None
    if identity.model is not None and identity.model.startswith("codellama-70b"):
        return FORMATS["codellama-70b"]
    return FORMATS.get(_BY_GENERATION.get(identity.generation or "", ""))


def encode_parts(parts: Sequence[Part], tokenizer: Tokenizer) -> list[int]:
    """The ids of `parts`.

    Raises: TokenizerError if the tokenizer has none of the names of a control token.
    """
    ids: list[int] = []
    for part in parts:
        if isinstance(part, Control):
            ids.append(control_id(tokenizer, part.names))
        elif part.continues:
            ids += tokenizer.counter().ids_of(part.text, first=False)
        else:
            ids += tokenizer.encode(part.text)
    return ids


def control_id(tokenizer: Tokenizer, names: Sequence[str]) -> int:
    """The id of the first of `names` that `tokenizer` knows.

    Raises: TokenizerError if it knows none.
    """
    for name in names:
        found = find_control(tokenizer, name)
        if found is not None:
            return found
    raise TokenizerError(
        f"the tokenizer has no control token `{names[0]}`",
        where=tokenizer.identity.source,
        hint="the chat format is not that of this model; see --template and --raw",
    )


def find_control(tokenizer: Tokenizer, name: str) -> int | None:
    """The id of a control token by name, or None.

    Tokens count that the file adds without calling them special, and whole SentencePiece pieces:
    Code Llama's `<PRE>` is one or the other, depending on the file.
    """
    for table in (tokenizer.special_ids, getattr(tokenizer, "added_ids", {})):
        if name in table:
            return int(table[name])
    pieces: Sequence[str] = getattr(getattr(tokenizer, "model", None), "pieces", ())
    return pieces.index(name) if name in pieces else None


def infill_parts(prefix: str, suffix: str) -> list[Part]:
    """Code Llama's request to fill the gap between two texts.

    The suffix has no dummy prefix: its first characters are taken as they are.
    Source: codellama generation.py, infilling_prompt_tokens.
    """
    return [
        _BOS,
        Control(("\u2581<PRE>", "<PRE>")),
        Text(prefix),
        Control(("\u2581<SUF>", "<SUF>")),
        Text(suffix, continues=True),
        Control(("\u2581<MID>", "<MID>")),
    ]


INFILL_STOP_NAMES = ("\u2581<EOT>", "<EOT>")

_BOS = Control(("<s>",))
_EOS = Control(("</s>",))
_STEP = Control(("<step>",))


def _llama2(messages: Sequence[Message]) -> list[Part]:
    """Turns of user and assistant; the system text stands inside the first user turn."""
    system, turns = _split_system(messages)
    _require_alternating(turns)
    parts: list[Part] = []
    for number, turn in enumerate(turns):
        if turn.role == "assistant":
            continue
        content = turn.content
        if number == 0 and system is not None:
            content = f"<<SYS>>\n{system}\n<</SYS>>\n\n{content}"
        request = f"[INST] {content.strip()} [/INST]"
        parts.append(_BOS)
        if number + 1 < len(turns):
            parts += [Text(f"{request} {turns[number + 1].content.strip()} "), _EOS]
        else:
            parts.append(Text(request))
    return parts


def _codellama70b(messages: Sequence[Message]) -> list[Part]:
    """Turns with a `Source:` line; a system turn always comes first, if need be an empty one."""
    system, turns = _split_system(messages)
    _require_alternating(turns)
    parts: list[Part] = [_BOS]
    for message in (Message("system", system or ""), *turns):
        parts += [Text(f" Source: {message.role}\n\n {message.content.strip()}"), _STEP]
    return [*parts, Text(" Source: assistant\nDestination: user\n\n ")]


def _with_headers(
    bos: str, start: str, end: str, stop: str, tool_stop: str
) -> Callable[[Sequence[Message]], list[Part]]:
    def header(role: str) -> list[Part]:
        # Llama 3 and 4 know the results of tools as `ipython`.
        name = "ipython" if role == "tool" else role
        return [Control((start,)), Text(name), Control((end,)), Text("\n\n")]

    def parts(messages: Sequence[Message]) -> list[Part]:
        made: list[Part] = [Control((bos,))]
        for message in messages:
            last = tool_stop if message.role == "tool" else stop
            images = [Control((IMAGE,))] * message.num_images
            made += [*header(message.role), *images, Text(message.content), Control((last,))]
        return made + header("assistant")

    return parts


def _split_system(messages: Sequence[Message]) -> tuple[str | None, Sequence[Message]]:
    if messages and messages[0].role == "system":
        return messages[0].content, messages[1:]
    return None, messages


def _require_alternating(turns: Sequence[Message]) -> None:
    for number, turn in enumerate(turns):
        if turn.role != ("user", "assistant")[number % 2]:
            raise UsageError(
                f"turn {number + 1} is of `{turn.role}`: this model's format alternates between"
                " user and assistant, after one system text at most"
            )
    if len(turns) % 2 == 0:
        raise UsageError("the last turn of a conversation must be the user's")


FORMATS = {
    made.name: made
    for made in (
        ChatFormat("llama-2", "Llama 2", _llama2, ()),
        ChatFormat("codellama-70b", "Code Llama 70B", _codellama70b, ("<step>",)),
        ChatFormat(
            "llama-3",
            "Llama 3",
            _with_headers(
                "<|begin_of_text|>",
                "<|start_header_id|>",
                "<|end_header_id|>",
                stop="<|eot_id|>",
                tool_stop="<|eot_id|>",
            ),
            ("<|eom_id|>", "<|eot_id|>"),
        ),
        ChatFormat(
            "llama-4",
            "Llama 4",
            _with_headers(
                "<|begin_of_text|>",
                "<|header_start|>",
                "<|header_end|>",
                stop="<|eot|>",
                tool_stop="<|eom|>",
            ),
            ("<|eom|>", "<|eot|>"),
        ),
    )
}
_BY_GENERATION = {
    "2": "llama-2",
    "code": "llama-2",
    **dict.fromkeys(("3", "3.1", "3.2", "3.2-vision", "3.3"), "llama-3"),
    "4": "llama-4",
}
