"""Tokenizer files from one form into another, with the ids unchanged.

    tiktoken ranks          <->  tokenizer.json (byte-level BPE)
    SentencePiece model      ->  tokenizer.json (legacy form)
    tokenizer.json (SentencePiece style) -> SentencePiece model
    GGUF metadata            ->  any of them

Two choices matter, because the usual ones change ids in silence. A tokenizer.json made from ranks
carries the expression of its own generation (the default of transformers is Llama 3's) and
`ignore_merges`, without which 588 tokens of Llama 3 cannot be reached. One made from SentencePiece
has the legacy normaliser (prepend U+2581, replace spaces): the newer `Metaspace(prepend_scheme=
"first")` loses one space of every text that begins with a space.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llamatool.errors import TokenizerError, UnsupportedError
from llamatool.tokenizers import bytelevel, gguf
from llamatool.tokenizers.modelproto import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
)
from llamatool.tokenizers.tiktoken import Ranks

Json = dict[str, object]

SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token of a tokenizer.json that is matched as a whole."""

    content: str
    token_id: int
    special: bool = True


def tiktoken_to_json(
    ranks: Ranks, *, pattern: str, specials: Mapping[str, int], bos: str | None
) -> Json:
    """The tokenizer.json with the ids of tiktoken ranks; takes some seconds (merge list).

    Args: bos: name of the token that the post-processor puts first, None for none.
    Example: Llama 3 -> 128000 entries, 280147 merges, 256 added tokens.
    """
    merges = [
        f"{bytelevel.to_text(a)} {bytelevel.to_text(b)}" for a, b in bytelevel.derive_merges(ranks)
    ]
    vocabulary = {
        bytelevel.to_text(token): rank for token, rank in sorted(ranks.items(), key=lambda r: r[1])
    }
    added = [AddedToken(name, token_id) for name, token_id in specials.items()]
    return byte_level_json(
        vocabulary, merges, patterns=(pattern,), added=added, bos=bos, ignore_merges=True
    )


def byte_level_json(
    vocabulary: Mapping[str, int],
    merges: Sequence[str],
    *,
    patterns: Sequence[str],
    added: Iterable[AddedToken],
    bos: str | None,
    ignore_merges: bool,
) -> Json:
    """A tokenizer.json of byte-level BPE; `patterns` split the text one after the other."""
    splits: list[Json] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]
    added = sorted(added, key=lambda token: token.token_id)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token) for token in added],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, {**byte_level, "use_regex": False}],
        },
        "post_processor": _post_processor(bos, added),
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": dict(vocabulary),
            "merges": list(merges),
        },
    }


def sentencepiece_to_json(model: SentencePieceModel, *, where: str) -> Json:
    """The tokenizer.json with the ids of a SentencePiece BPE model, in the legacy form.

    Example: Llama 2 -> 32000 entries, 61249 merges.
    Raises: UnsupportedError if the model is not of the kind that the legacy form expresses.
    """
    if model.model_type != BPE or not model.identity or model.remove_extra_whitespaces:
        raise UnsupportedError(
            "only byte-pair models without normalisation become a tokenizer.json",
            where=where,
            hint="this one uses Unigram scores, or its normaliser changes the text",
        )
    vocabulary = {piece: i for i, piece in enumerate(model.pieces)}
    if len(vocabulary) != len(model.pieces):
        raise TokenizerError("a piece occurs twice", where=where)
    specials = [
        AddedToken(piece, i, special=kind != USER_DEFINED)
        for i, (piece, kind) in enumerate(zip(model.pieces, model.types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    bos = model.pieces[model.bos_id] if 0 <= model.bos_id < len(model.pieces) else None
    steps: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    strip: list[Json] = []
    if model.add_dummy_prefix:
        steps.insert(0, {"type": "Prepend", "prepend": SPACE})
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token) for token in specials],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": _template(bos, specials) if bos else None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": model.pieces[model.unk_id],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": model.byte_fallback,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": sentencepiece_merges(model),
        },
    }


def sentencepiece_merges(model: SentencePieceModel) -> list[str]:
    """Every way to make a normal piece of two pieces, best score first, then by id.

    Example: Llama 2 -> 61249 merges.
    """
    ids = {
        piece: i
        for i, (piece, kind) in enumerate(zip(model.pieces, model.types, strict=True))
        if kind == NORMAL
    }
    order = sorted(ids.values(), key=lambda i: (-model.scores[i], i))
    merges = []
    for piece in (model.pieces[i] for i in order):
        halves = [
            (ids[piece[:i]], ids[piece[i:]], i)
            for i in range(1, len(piece))
            if piece[:i] in ids and piece[i:] in ids
        ]
        merges += [f"{piece[:i]} {piece[i:]}" for _, _, i in sorted(halves)]
    return merges


def json_to_sentencepiece(content: Mapping[str, object], *, where: str) -> SentencePieceModel:
    """The SentencePiece model with the ids of a SentencePiece-style tokenizer.json.

    A piece's score is minus the rank of the first merge that makes it; pieces that no merge makes
    (single characters) come last. Compare the two on your own text before you rely on it
    (`llamatool tokens verify`): the tokenizer.json orders pairs, SentencePiece pieces.
    Raises: UnsupportedError if the file is not of that style.
    """
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not model.get("byte_fallback"):
        raise UnsupportedError("not a BPE tokenizer.json of the SentencePiece style", where=where)
    vocabulary: dict[str, int] = dict(model["vocab"])
    added = content.get("added_tokens") or []
    assert isinstance(added, list)
    types_of = {t["content"]: CONTROL if t["special"] else USER_DEFINED for t in added}
    for token in added:
        vocabulary.setdefault(token["content"], token["id"])
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    if [vocabulary[p] for p in pieces] != list(range(len(pieces))):
        raise UnsupportedError("the ids of the vocabulary have gaps", where=where)
    unknown = model.get("unk_token") or "<unk>"
    types = [_piece_type(piece, unknown, types_of) for piece in pieces]
    made: dict[str, int] = {}
    for rank, (left, right) in enumerate(bytelevel.merge_pairs(model["merges"], where=where)):
        made.setdefault(left + right, rank)
    last = len(made)
    scores = []
    for piece, kind in zip(pieces, types, strict=True):
        if kind != NORMAL:
            scores.append(0.0)
        elif piece in made:
            scores.append(-float(made[piece]))
        else:
            scores.append(-float(last))
            last += 1
    return SentencePieceModel(
        pieces=pieces,
        scores=scores,
        types=types,
        unk_id=vocabulary.get(unknown, 0),
        bos_id=vocabulary.get("<s>", -1),
        eos_id=vocabulary.get("</s>", -1),
        add_dummy_prefix='"Prepend"' in json.dumps(content.get("normalizer")),
    )


def gguf_to_json(metadata: gguf.Metadata, *, where: str) -> Json:
    """The tokenizer.json with the ids of a GGUF's vocabulary."""
    if gguf.is_sentencepiece(metadata, where=where):
        return sentencepiece_to_json(gguf.sentencepiece_model(metadata, where=where), where=where)
    ordinary, control, user_defined = gguf.bpe_vocabulary(metadata, where=where)
    patterns = gguf.split_patterns(metadata, where=where)
    added = [AddedToken(name, token_id) for name, token_id in control.items()]
    added += [AddedToken(name, token_id, special=False) for name, token_id in user_defined.items()]
    bos_id = gguf.special_id(metadata, "bos_token_id")
    bos = None
    if gguf.adds_bos(metadata, default=gguf.ignores_merges(metadata)):
        bos = next((name for name, token_id in control.items() if token_id == bos_id), None)
    # Some vocabularies number control tokens among the ordinary ones (SmolLM2: 0 to 16).
    vocabulary = dict(sorted({**ordinary, **control}.items(), key=lambda item: item[1]))
    return byte_level_json(
        vocabulary if min(control.values(), default=0) < len(ordinary) else ordinary,
        [f"{a} {b}" for a, b in gguf.merges(metadata, where=where)],
        patterns=patterns,
        added=added,
        bos=bos,
        ignore_merges=gguf.ignores_merges(metadata),
    )


def gguf_to_ranks(metadata: gguf.Metadata, *, where: str) -> dict[bytes, int]:
    """The tiktoken ranks of a byte-level GGUF vocabulary.

    Example: llama-bpe -> the 128000 ranks of Meta's Llama 3 file.
    """
    ordinary, _, _ = gguf.bpe_vocabulary(metadata, where=where)
    return bytelevel.ranks_from_vocabulary(ordinary, where=where)


def tokenizer_config(
    specials: Mapping[str, int], *, bos: str | None, eos: str | None, max_length: int | None = None
) -> Json:
    """The tokenizer_config.json that belongs to a converted tokenizer.json.

    `clean_up_tokenization_spaces` is off: on, it takes spaces before punctuation out of decoded
    text.
    """
    config: Json = {
        "added_tokens_decoder": {
            str(token_id): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for name, token_id in sorted(specials.items(), key=lambda item: item[1])
        },
        "bos_token": bos,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if max_length is not None:
        config["model_max_length"] = max_length
    return config


def json_bytes(content: Json) -> bytes:
    """A JSON file as Hugging Face writes it: indented by two, characters as they are."""
    return json.dumps(content, ensure_ascii=False, indent=2).encode() + b"\n"


def _added(token: AddedToken) -> Json:
    return {
        "id": token.token_id,
        "content": token.content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": token.special,
    }


def _post_processor(bos: str | None, added: Sequence[AddedToken]) -> Json:
    byte_level: Json = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": True,
    }
    if bos is None:
        return byte_level
    return {"type": "Sequence", "processors": [byte_level, _template(bos, added)]}


def _template(bos: str, added: Sequence[AddedToken]) -> Json:
    bos_id = next(token.token_id for token in added if token.content == bos)

    def part(kind: str, name: str, type_id: int) -> Json:
        return {kind: {"id": name, "type_id": type_id}}

    single = [part("SpecialToken", bos, 0), part("Sequence", "A", 0)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, part("SpecialToken", bos, 1), part("Sequence", "B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _piece_type(piece: str, unknown: str, types_of: Mapping[str, int]) -> int:
    if piece == unknown:
        return UNKNOWN
    if piece in types_of:
        return types_of[piece]
    return BYTE if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">") else NORMAL
