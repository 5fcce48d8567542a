"""A loaded tokenizer written as files of another kind, checked before it is given out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from llamatool.config.model import Note
from llamatool.errors import TokenizerError, UnsupportedError
from llamatool.tokenizers import bytelevel, convert, detect, load
from llamatool.tokenizers.base import Tokenizer
from llamatool.tokenizers.corpus import builtin
from llamatool.tokenizers.huggingface import Content, HuggingFaceTokenizer
from llamatool.tokenizers.modelproto import (
    NORMAL,
    SentencePieceModel,
    build_llama2_model,
    build_model,
)
from llamatool.tokenizers.sentencepiece import SPACE, SentencePieceTokenizer
from llamatool.tokenizers.tiktoken import TiktokenTokenizer, ranks_file
from llamatool.tokenizers.verify import HARD_STRINGS, compare_ids

Target = Literal["json", "tiktoken", "spm"]
TARGETS: tuple[Target, ...] = ("json", "tiktoken", "spm")

_LEGACY_NOTE = Note(
    "legacy_normalizer",
    "written in SentencePiece's legacy form (prepend U+2581, replace spaces), which keeps the "
    "first space of a text; transformers' newer form loses it",
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a converted tokenizer, by name, and what should be known about them."""

    files: Mapping[str, bytes]
    notes: tuple[Note, ...] = ()


def export(tokenizer: Tokenizer, to: Target, *, eos: str | None = None) -> TokenizerFiles:
    """The tokenizer as `tokenizer.json` (with its config), or as `tokenizer.model` of two kinds.

    The result is read back and must give the ids of the original on the built-in corpus and on
    strings where conversions usually fail.

    Args: eos: name of the control token for `eos_token` of the tokenizer_config.json; the first
    that ends a text if not given.
    Raises: UnsupportedError if the two kinds do not fit together (SentencePiece has no ranks);
    TokenizerError if the check fails.
    Example: a GGUF with Llama 2's vocabulary, `spm` -> Meta's file, sha256 9e556afd...
    """
    converted = _CONVERT[to](tokenizer, eos)
    model = converted.files.get("tokenizer.json") or converted.files["tokenizer.model"]
    _check(tokenizer, load.from_bytes(model, where=f"the converted {tokenizer.identity.source}"))
    return converted


def _to_json(tokenizer: Tokenizer, eos: str | None) -> TokenizerFiles:
    names = tokenizer.names_by_id
    bos = names.get(tokenizer.bos_id) if tokenizer.bos_id is not None else None
    eos = eos or next((names[i] for i in tokenizer.eos_ids if i in names), None)
    notes: tuple[Note, ...] = ()
    if isinstance(tokenizer, TiktokenTokenizer):
        content = convert.tiktoken_to_json(
            tokenizer.ranks, pattern=tokenizer.pattern, specials=tokenizer.special_ids, bos=bos
        )
    elif isinstance(tokenizer, SentencePieceTokenizer):
        content = convert.sentencepiece_to_json(tokenizer.model, where=tokenizer.identity.source)
        notes = (_LEGACY_NOTE,)
    else:
        content = dict(_content(tokenizer))
    config = convert.tokenizer_config(tokenizer.special_ids, bos=bos, eos=eos)
    files = {
        "tokenizer.json": convert.json_bytes(content),
        "tokenizer_config.json": convert.json_bytes(config),
    }
    return TokenizerFiles(files, notes)


def _to_tiktoken(tokenizer: Tokenizer, eos: str | None) -> TokenizerFiles:
    if isinstance(tokenizer, TiktokenTokenizer):
        ranks = tokenizer.ranks
    else:
        content = _content(tokenizer)
        where = tokenizer.identity.source
        ranks = bytelevel.ranks_from_vocabulary(content["model"]["vocab"], where=where)
    return TokenizerFiles({"tokenizer.model": ranks_file(ranks)})


def _to_sentencepiece(tokenizer: Tokenizer, eos: str | None) -> TokenizerFiles:
    is_llama2 = tokenizer.identity.name == detect.LLAMA2.name
    if isinstance(tokenizer, SentencePieceTokenizer):
        if tokenizer.identity.kind == "sentencepiece":
            return TokenizerFiles({"tokenizer.model": tokenizer.data})
        model = tokenizer.model
    else:
        where = tokenizer.identity.source
        model = convert.json_to_sentencepiece(_content(tokenizer), where=where)
    if is_llama2:
        return TokenizerFiles({"tokenizer.model": build_llama2_model(_llama2_scores(model))})
    return TokenizerFiles({"tokenizer.model": build_model(model)})


def _content(tokenizer: Tokenizer) -> Content:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UnsupportedError(
            "this tokenizer cannot be written in that form: SentencePiece scores and byte-pair "
            "ranks are different kinds",
            where=tokenizer.identity.source,
            hint="`json` can hold every kind",
        )
    return tokenizer.content


def _llama2_scores(model: SentencePieceModel) -> SentencePieceModel:
    """The model with the scores of Meta's file: 259 minus the id, -1e9 for pieces of spaces."""
    scores = [
        0.0 if kind != NORMAL else -1e9 if not piece.strip(SPACE) else float(259 - i)
        for i, (piece, kind) in enumerate(zip(model.pieces, model.types, strict=True))
    ]
    return replace(model, scores=scores)


def _check(original: Tokenizer, converted: Tokenizer) -> None:
    texts = [(text.code, text.text) for text in builtin()]
    texts += [("a hard string", text) for text in HARD_STRINGS]
    verdict = compare_ids(original, converted, texts)
    if verdict.first is not None:
        raise TokenizerError(
            f"the converted tokenizer gives other ids on {verdict.num_different} of "
            f"{verdict.num_texts} texts: {verdict.first.cause}",
            where=original.identity.source,
            hint="nothing was written",
        )


_CONVERT: dict[Target, Callable[[Tokenizer, str | None], TokenizerFiles]] = {
    "json": _to_json,
    "tiktoken": _to_tiktoken,
    "spm": _to_sentencepiece,
}
