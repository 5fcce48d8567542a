"""The tokenizer inside a GGUF: its metadata turned into one of the three real forms.

This module takes the metadata as plain values (strings, integers, lists), read by whoever opened
the file: the header reader belongs to `checkpoint`, the tokenizers to this room, and neither
imports the other. llama.cpp stores

    tokenizer.ggml.model = "llama"   SentencePiece: tokens, scores, token_type
    tokenizer.ggml.model = "gpt2"    byte-level BPE: tokens, merges, and in `pre` the name of the
                                     expression that splits the text first
"""

from collections.abc import Mapping, Sequence

from llamatool.errors import TokenizerError, UnsupportedError
from llamatool.tokenizers.modelproto import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
)
from llamatool.tokenizers.tiktoken import LLAMA3_PATTERN, LLAMA4_PATTERN

Metadata = Mapping[str, object]

_PREFIX = "tokenizer.ggml."

# The expressions by the name in `tokenizer.ggml.pre`, as the Split steps of a tokenizer.json.
# Source: llama.cpp, llama-vocab.cpp (names and expressions), checked against its test vectors.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = r"\p{N}"
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), (LLAMA3_PATTERN,)),
    **dict.fromkeys(("llama4",), (LLAMA4_PATTERN,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (_DIGITS, _GPT2)),
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo"), (_GPT2,)),
}
# llama.cpp looks a whole piece up before it merges (as `ignore_merges` in a tokenizer.json).
_IGNORES_MERGES = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "llama4"))


def is_sentencepiece(metadata: Metadata, *, where: str) -> bool:
    """Whether the GGUF's tokenizer is SentencePiece (True) or byte-level BPE (False).

    Raises: TokenizerError if there is no tokenizer; UnsupportedError for another kind.
    """
    kind = metadata.get(_PREFIX + "model")
    if kind is None or _PREFIX + "tokens" not in metadata:
        raise TokenizerError("this GGUF holds no tokenizer", where=where)
    if kind not in ("llama", "gpt2"):
        raise UnsupportedError(
            f"its tokenizer is of the kind `{kind}`",
            where=where,
            hint="llamatool reads `llama` (SentencePiece) and `gpt2` (byte-level BPE)",
        )
    return kind == "llama"


def sentencepiece_model(metadata: Metadata, *, where: str) -> SentencePieceModel:
    """The SentencePiece model of a GGUF whose `tokenizer.ggml.model` is `llama`.

    Raises: TokenizerError if the lists are missing or differ in length.
    Example: llama-spm -> the 32000 pieces, scores and types of Meta's Llama 2 file.
    """
    tokens = strings(metadata, "tokens", where)
    scores = _numbers(metadata, "scores", len(tokens), where)
    types = [int(t) for t in _numbers(metadata, "token_type", len(tokens), where)]
    if odd := {t for t in types if not NORMAL <= t <= BYTE}:
        raise TokenizerError(f"token type {min(odd)} is none of SentencePiece's", where=where)
    unk_id = _id(metadata, "unknown_token_id", types.index(UNKNOWN) if UNKNOWN in types else 0)
    if not 0 <= unk_id < len(tokens):
        raise TokenizerError(f"`unknown_token_id` is {unk_id}", where=where)
    # SentencePiece wants exactly one unknown piece; GGUF files mark padding rows so, too.
    types = [UNUSED if kind == UNKNOWN else kind for kind in types]
    types[unk_id] = UNKNOWN
    return SentencePieceModel(
        pieces=tokens,
        scores=scores,
        types=types,
        byte_fallback=BYTE in types,
        unk_id=unk_id,
        bos_id=_id(metadata, "bos_token_id", 1),
        eos_id=_id(metadata, "eos_token_id", 2),
        pad_id=_id(metadata, "padding_token_id", -1),
        add_dummy_prefix=metadata.get(_PREFIX + "add_space_prefix", True) is not False,
    )


def bpe_vocabulary(
    metadata: Metadata, *, where: str
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Of a GGUF whose model is `gpt2`: ordinary tokens, control tokens, and user-defined ones.

    Ordinary tokens are in the alphabet of GPT-2's byte map. Padding entries (`unused`) are left
    out.
    """
    tokens = strings(metadata, "tokens", where)
    types = [int(t) for t in _numbers(metadata, "token_type", len(tokens), where)]
    of_type: dict[int, dict[str, int]] = {NORMAL: {}, CONTROL: {}, USER_DEFINED: {}}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        of_type.setdefault(kind, {})[token] = token_id
    ordinary = of_type[NORMAL]
    if not ordinary:
        raise TokenizerError("no ordinary tokens in the vocabulary", where=where)
    return ordinary, of_type[CONTROL], of_type[USER_DEFINED]


def merges(metadata: Metadata, *, where: str) -> list[tuple[str, str]]:
    """The merge list in order. Raises: TokenizerError for an entry that is no pair."""
    pairs = []
    for entry in strings(metadata, "merges", where):
        # A half may itself begin with a space in no known file, since the byte map has none.
        left, _, right = entry.partition(" ")
        if not left or not right or " " in right:
            raise TokenizerError(f"merge `{entry[:40]}` is not a pair", where=where)
        pairs.append((left, right))
    return pairs


def split_patterns(metadata: Metadata, *, where: str) -> tuple[str, ...]:
    """The expressions that split a text before the merges, applied one after the other.

    Raises: UnsupportedError for a name that is not known; a wrong expression gives wrong ids in
    silence, so there is no default.
    """
    pre = metadata.get(_PREFIX + "pre")
    patterns = PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
    if patterns is None:
        raise UnsupportedError(
            f"`tokenizer.ggml.pre` is {pre!r}, whose splitting rule is not known here"
            if pre is not None
            else "`tokenizer.ggml.pre` is missing, so the splitting rule is not known",
            where=where,
            hint="use the model's `tokenizer.json`; known are " + ", ".join(PRE_TOKENIZERS),
        )
    return patterns


def ignores_merges(metadata: Metadata) -> bool:
    """Whether a piece that is a token as a whole is taken before any merge."""
    return metadata.get(_PREFIX + "pre") in _IGNORES_MERGES


def special_id(metadata: Metadata, name: str) -> int | None:
    """A special id of the file, such as `bos_token_id`; None where it has none."""
    value = metadata.get(_PREFIX + name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def adds_bos(metadata: Metadata, *, default: bool) -> bool:
    """The file's own rule whether a prompt begins with BOS."""
    value = metadata.get(_PREFIX + "add_bos_token")
    return value if isinstance(value, bool) else default


def strings(metadata: Metadata, name: str, where: str) -> list[str]:
    """A list of strings of the metadata. Raises: TokenizerError if it is missing or is not one."""
    values = metadata.get(_PREFIX + name)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise TokenizerError(f"`{_PREFIX}{name}` is missing or no list", where=where)
    if not all(isinstance(value, str) for value in values):
        raise TokenizerError(f"`{_PREFIX}{name}` holds more than strings", where=where)
    if any("\udc80" <= max(value, default="") <= "\udcff" for value in values):
        raise TokenizerError(f"`{_PREFIX}{name}` holds bytes that are no UTF-8", where=where)
    return list(values)


def _numbers(metadata: Metadata, name: str, length: int, where: str) -> list[float]:
    values = metadata.get(_PREFIX + name)
    if values is None or isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise TokenizerError(f"`{_PREFIX}{name}` is missing or no list", where=where)
    numbers = list(values)  # type: ignore[call-overload]  # a list, tuple, array or ndarray
    if len(numbers) != length:
        raise TokenizerError(
            f"`{_PREFIX}{name}` has {len(numbers)} entries for {length} tokens", where=where
        )
    return [float(number) for number in numbers]


def _id(metadata: Metadata, name: str, default: int) -> int:
    value = special_id(metadata, name)
    return default if value is None else value
