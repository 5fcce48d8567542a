"""From messages or text to prompt ids: which way to write them, and the check of BOS.

A conversation is written with the checkpoint's own template if it has one, else with the built-in
format of its generation; a base model gets the text as it is. What was decided, and why, is part
of the result: nothing is applied in silence.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from llamatool.config.generation import Identity
from llamatool.errors import InputError, UnsupportedError
from llamatool.generate.formats import (
    FORMATS,
    IMAGE,
    INFILL_STOP_NAMES,
    ChatFormat,
    Message,
    control_id,
    encode_parts,
    format_of,
    infill_parts,
)
from llamatool.generate.template import ChatTemplate, encode_template
from llamatool.records import record
from llamatool.tokenizers.base import Tokenizer
from llamatool.tokenizers.special import ControlStrings

if TYPE_CHECKING:
    from llamatool.model.images import Tiles

Mode = Literal["chat", "raw"]

_SAYS_CHAT = re.compile(r"(?<![a-z])(instruct|chat)(?![a-z])", re.IGNORECASE)


@record
class Writing:
    """How prompts of a model are written, and the evidence."""

    mode: Mode
    why: str  # one phrase for the user
    format: ChatFormat | None = None
    template: ChatTemplate | None = None
    is_instruct: bool = False  # whether anything says that the model was trained on turns

    @property
    def stop_names(self) -> tuple[str, ...]:
        """Control tokens that end a turn in the built-in format."""
        return self.format.stop_names if self.mode == "chat" and self.format else ()


@record
class Prompt:
    """The ids of a prompt and what is to be said about them."""

    ids: tuple[int, ...]
    mode: Mode
    stop_names: tuple[str, ...] = ()  # control tokens that end the answer, besides the usual ones
    warnings: tuple[str, ...] = ()
    images: "tuple[Tiles, ...]" = ()  # whose ids stand among the others, in their order


def choose_writing(
    identity: Identity | None,
    *,
    template: ChatTemplate | None = None,
    names: Sequence[str] = (),
    raw: bool = False,
    chat: bool = False,
    format_name: str | None = None,
) -> Writing:
    """Chat or raw, and how: by what the user says, else by evidence.

    The evidence, strongest first: the checkpoint has a chat template; its configuration is that
    of an instruction-tuned model; one of its names says `Instruct` or `Chat`. A base model is
    given the text as it is, never a template.

    Args: names: of the checkpoint: its folder, name_or_path, general.name.
    Raises: UnsupportedError if a conversation is asked for and no way to write it is known.
    """
    evidence = _evidence(identity, template, names)
    instruct = evidence is not None
    if raw:
        return Writing("raw", "as asked for", is_instruct=instruct)
    if format_name is not None:
        return Writing(
            "chat", f"{format_name} format, as asked for", FORMATS[format_name], None, True
        )
    built_in = format_of(identity)
    if template is not None:
        return Writing("chat", f"template of {template.where}", None, template, True)
    if built_in is not None and (evidence or chat):
        why = f"built-in {built_in.title} format; {evidence or 'as asked for'}"
        return Writing("chat", why, built_in, None, instruct or chat)
    if chat:
        raise UnsupportedError(
            "this checkpoint has no chat template, and no built-in format is known for it",
            hint="give a template with --template FILE, or one of " + ", ".join(FORMATS),
        )
    if evidence:
        return Writing(
            "raw", f"{evidence}, but no chat template or format is known", None, None, True
        )
    return Writing("raw", "no chat template, and nothing says that it is a chat model")


def _evidence(
    identity: Identity | None, template: ChatTemplate | None, names: Sequence[str]
) -> str | None:
    if template is not None:
        return "it has a chat template"
    if identity is not None and identity.variant == "instruct":
        return "its configuration is that of an Instruct model"
    for name in names:
        match = _SAYS_CHAT.search(name)
        if match is not None:
            return f"its name says `{match[0]}`"
    return None


def encode_chat(
    writing: Writing,
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    now: datetime | None = None,
) -> Prompt:
    """The prompt that asks for the assistant's answer to `messages`.

    Raises: UsageError or InputError if the format does not allow such a conversation;
    TokenizerError if the tokenizer lacks a control token of the format.
    """
    if writing.template is not None:
        ids = encode_template(writing.template, messages, tokenizer, now=now)
        return _checked(ids, "chat", tokenizer, (), one_bos=True)
    assert writing.format is not None
    ids = encode_parts(writing.format.parts(messages), tokenizer)
    one_bos = writing.format.name != "llama-2"  # which has one for each turn
    return _checked(ids, "chat", tokenizer, writing.format.stop_names, one_bos=one_bos)


def encode_raw(text: str, tokenizer: Tokenizer, *, num_images: int = 0) -> Prompt:
    """The prompt that lets the model continue `text`: its ids behind one BOS and the images.

    There is none where the tokenizer's file says so (SmolLM2).
    Raises: TokenizerError if there are images and the tokenizer has no token for their place.
    Example: Llama 3, `hi` -> (128000, 6151).
    """
    ids = tokenizer.encode(text)
    if num_images:
        ids = [control_id(tokenizer, (IMAGE,))] * num_images + ids
    bos = tokenizer.bos_id
    if tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
        ids = [bos, *ids]
    prompt = _checked(ids, "raw", tokenizer, (), one_bos=True)
    found = ControlStrings(tokenizer.special_ids).find(text)
    if not found:
        return prompt
    note = f"`{found[0]}` in the prompt is taken as text, not as a control token"
    return Prompt(prompt.ids, "raw", (), (*prompt.warnings, note))


def encode_infill(prefix: str, suffix: str, tokenizer: Tokenizer) -> Prompt:
    """The prompt that asks Code Llama for what stands between `prefix` and `suffix`.

    Raises: TokenizerError for a tokenizer without the tokens for it (all but Code Llama 7B and
    13B, and 70B).
    """
    ids = encode_parts(infill_parts(prefix, suffix), tokenizer)
    return Prompt(tuple(ids), "raw", INFILL_STOP_NAMES)


def _checked(
    ids: Sequence[int],
    mode: Mode,
    tokenizer: Tokenizer,
    stop_names: tuple[str, ...],
    *,
    one_bos: bool,
) -> Prompt:
    """The prompt, with a warning unless BOS stands where this tokenizer wants it."""
    if not ids:
        raise InputError("the prompt is empty", hint="give it some text")
    bos, warnings = tokenizer.bos_id, []
    if bos is not None and tokenizer.add_bos:
        count = list(ids).count(bos)
        if ids[0] != bos:
            warnings.append("the prompt does not begin with BOS, which this tokenizer expects")
        elif (one_bos and count > 1) or ids[1:2] == [bos]:
            warnings.append(f"the prompt holds BOS {count} times: one is right")
    return Prompt(tuple(ids), mode, stop_names, tuple(warnings))
