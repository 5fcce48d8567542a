"""A tokenizer from a file, a folder or a GGUF's metadata, whatever it is called.

load(path)                      file or model folder
from_bytes(data, where=...)     the content of a tokenizer.json or tokenizer.model
from_gguf(metadata, where=...)  the metadata of a GGUF, as plain values
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from llamatool.config.model import Note
from llamatool.errors import TokenizerError, UnsupportedError
from llamatool.tokenizers import bytelevel, convert, detect, gguf, huggingface, special
from llamatool.tokenizers.base import Engine, Identity, Kind, Tokenizer
from llamatool.tokenizers.huggingface import HuggingFaceTokenizer
from llamatool.tokenizers.modelproto import (
    BYTE,
    NORMAL,
    SentencePieceModel,
    build_model,
    parse_model,
)
from llamatool.tokenizers.sentencepiece import SentencePieceTokenizer
from llamatool.tokenizers.tiktoken import (
    LLAMA3_PATTERN,
    LLAMA4_PATTERN,
    Ranks,
    TiktokenTokenizer,
    parse_ranks,
)

ReadGguf = Callable[[Path], gguf.Metadata]

# In a folder the tokenizer.json comes first: it is what Hugging Face loads, and it may hold added
# tokens that the SentencePiece model beside it does not have.
FOLDER_FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")


def load(path: Path, *, read_gguf: ReadGguf | None = None) -> Tokenizer:
    """The tokenizer in a file, or in a folder that holds one.

    Args: read_gguf: gives the metadata of a GGUF file; needed for GGUF only.
    Raises: TokenizerError if there is none, or the file is damaged; UnsupportedError for a kind
    that is understood but not handled.
    """
    file = tokenizer_file(path)
    where = str(file)
    kind = detect.file_kind(detect.read_head(file), where=where)
    if kind != "gguf":
        return from_bytes(detect.read_file(file), where=where)
    if read_gguf is None:
        raise UnsupportedError("a GGUF is not read here", where=where)
    return from_gguf(read_gguf(file), where=where)


def tokenizer_file(path: Path) -> Path:
    """The tokenizer file that `path` is or holds.

    Raises: TokenizerError if a folder holds none.
    """
    if not path.is_dir():
        return path
    for name in FOLDER_FILES:
        if (path / name).is_file():
            return path / name
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        return ggufs[0]
    raise TokenizerError(
        "the folder holds no tokenizer",
        where=str(path),
        hint=f"looked for {', '.join(FOLDER_FILES)} and *.gguf",
    )


def from_bytes(data: bytes, *, where: str) -> Tokenizer:
    """The tokenizer in the content of a `tokenizer.json` or `tokenizer.model`."""
    kind = detect.file_kind(data[: detect.HEAD_BYTES], where=where)
    sha256 = hashlib.sha256(data).hexdigest()
    if kind == "tiktoken":
        return _from_ranks_file(data, sha256, where)
    if kind == "sentencepiece":
        model = parse_model(data, where=where)
        return _sentencepiece(data, model, kind="sentencepiece", sha256=sha256, where=where)
    if kind == "tekken":
        raise detect.unsupported_tekken(where)
    if kind == "tokenizer.json":
        return _from_json(data, sha256, where)
    raise UnsupportedError("a GGUF is read through its metadata", where=where)


def from_gguf(metadata: gguf.Metadata, *, where: str) -> Tokenizer:
    """The tokenizer in the metadata of a GGUF, given as plain values.

    A SentencePiece vocabulary becomes a model for sentencepiece, Llama 3's and 4's become ranks for
    tiktoken, and any other byte-level one a tokenizer.json for tokenizers.
    """
    if gguf.is_sentencepiece(metadata, where=where):
        model = gguf.sentencepiece_model(metadata, where=where)
        tokenizer: Tokenizer = _sentencepiece(
            build_model(model), model, kind="gguf", sha256=None, where=where
        )
        tokenizer.add_bos = gguf.adds_bos(metadata, default=True)
    else:
        tokenizer = _byte_level_gguf(metadata, where)
    bos, eos = gguf.special_id(metadata, "bos_token_id"), gguf.special_id(metadata, "eos_token_id")
    if bos is not None:
        tokenizer.bos_id = bos
    if eos is not None and eos not in tokenizer.eos_ids:
        tokenizer.eos_ids = (eos, *tokenizer.eos_ids)
    return tokenizer


def _from_ranks_file(data: bytes, sha256: str, where: str) -> Tokenizer:
    ranks = parse_ranks(data, where=where)
    known, notes = recognise_ranks(ranks)
    if len(ranks) not in (special.LLAMA3_FIRST_ID, special.LLAMA4_FIRST_ID):
        raise UnsupportedError(
            f"a tiktoken file of {len(ranks):,} ranks, which is neither Llama 3 nor Llama 4",
            where=where,
            hint="the file does not hold the expression that splits the text; "
            "use the model's `tokenizer.json`",
        )
    is_llama4 = len(ranks) == special.LLAMA4_FIRST_ID
    return TiktokenTokenizer(
        ranks,
        pattern=LLAMA4_PATTERN if is_llama4 else LLAMA3_PATTERN,
        specials=special.llama4_specials() if is_llama4 else special.llama3_specials(),
        identity=_identity("tiktoken", where, sha256, known, "tiktoken", notes),
    )


def _from_json(data: bytes, sha256: str, where: str) -> Tokenizer:
    content = huggingface.parse_json(data, where=where)
    routed = huggingface.as_tiktoken(content, where=where)
    known, notes = recognise_json(content)
    if routed is not None:
        ranks, pattern, specials = routed
        if known is detect.LLAMA3 and (note := special.llama3_release_note(specials)):
            notes = (*notes, note)
        identity = _identity("tokenizer.json", where, sha256, known, "tiktoken", notes)
        tokenizer = TiktokenTokenizer(ranks, pattern=pattern, specials=specials, identity=identity)
        tokenizer.add_bos = huggingface.template_bos(content) is not None
        return tokenizer
    notes = (*notes, *huggingface.file_notes(content, where=where))
    identity = _identity("tokenizer.json", where, sha256, known, "tokenizers", notes)
    return HuggingFaceTokenizer(content, data.decode("utf-8-sig"), identity)


def _byte_level_gguf(metadata: gguf.Metadata, where: str) -> Tokenizer:
    patterns = gguf.split_patterns(metadata, where=where)
    if gguf.ignores_merges(metadata):
        ranks = convert.gguf_to_ranks(metadata, where=where)
        known, notes = recognise_ranks(ranks)
        if known in (detect.LLAMA3, detect.LLAMA4):
            _, control, added = gguf.bpe_vocabulary(metadata, where=where)
            identity = _identity("gguf", where, None, known, "tiktoken", notes)
            if not added:
                tokenizer = TiktokenTokenizer(
                    ranks, pattern=patterns[0], specials=control, identity=identity
                )
                tokenizer.add_bos = gguf.adds_bos(metadata, default=True)
                return tokenizer
    content = convert.gguf_to_json(metadata, where=where)
    known, notes = recognise_json(content)
    notes = (*notes, *huggingface.file_notes(content, where=where))
    identity = _identity("gguf", where, None, known, "tokenizers", notes)
    text = convert.json_bytes(content).decode()
    return HuggingFaceTokenizer(content, text, identity)


def _sentencepiece(
    data: bytes, model: SentencePieceModel, *, kind: Kind, sha256: str | None, where: str
) -> SentencePieceTokenizer:
    known, notes = recognise_pieces(model)
    return SentencePieceTokenizer(
        data, model, _identity(kind, where, sha256, known, "sentencepiece", notes)
    )


def recognise_ranks(ranks: Ranks) -> tuple[detect.Known | None, tuple[Note, ...]]:
    """The known vocabulary that byte-pair ranks (in order) are."""
    return detect.recognise(detect.vocabulary_sha256(ranks), len(ranks))


def recognise_pieces(model: SentencePieceModel) -> tuple[detect.Known | None, tuple[Note, ...]]:
    """The known vocabulary that the normal and byte pieces of a SentencePiece model are."""
    ordinary = (NORMAL, BYTE)
    pieces = [p.encode() for p, t in zip(model.pieces, model.types, strict=True) if t in ordinary]
    return detect.recognise(detect.vocabulary_sha256(pieces), len(model.pieces))


def recognise_json(content: huggingface.Content) -> tuple[detect.Known | None, tuple[Note, ...]]:
    """The known vocabulary of a tokenizer.json, its added tokens left out."""
    vocabulary = content["model"]["vocab"]
    if not isinstance(vocabulary, dict):
        return None, ()
    added = {token["content"] for token in content.get("added_tokens") or []}
    in_order = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens = [token for token in in_order if token not in added]
    if huggingface.is_byte_level(content):
        raw = [bytelevel.to_bytes(token) or token.encode() for token in tokens]
    else:
        raw = [token.encode() for token in tokens]
    return detect.recognise(detect.vocabulary_sha256(raw), len(vocabulary))


def _identity(
    kind: Kind,
    where: str,
    sha256: str | None,
    known: detect.Known | None,
    engine: Engine,
    notes: tuple[Note, ...],
) -> Identity:
    return Identity(
        kind=kind,
        source=where,
        sha256=sha256,
        name=known.name if known else None,
        title=known.title if known else None,
        engine=engine,
        notes=notes,
    )
