"""SentencePiece's model file: a protobuf message, read and written with the standard library.

Only what a tokenizer needs is read: the pieces with scores and types, the ids of the control
pieces, and the rules for spaces. Numbers of the fields: sentencepiece_model.proto (ModelProto 1
pieces, 2 trainer_spec, 3 normalizer_spec).
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llamatool.errors import TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2

MAX_PIECES = 2_000_000

# protobuf merges repeated messages, so these four bytes behind a model turn its dummy prefix off:
# field 3 (normalizer_spec), 2 bytes, field 3 (add_dummy_prefix) = 0.
WITHOUT_DUMMY_PREFIX = b"\x1a\x02\x18\x00"

# What Meta's Llama 1/2 file says about its training, so that the file can be rebuilt byte for byte
# from a GGUF. Numbers are fields of TrainerSpec; read from the published tokenizer.model.
_LLAMA2_TRAINER: tuple[tuple[int, int | float | str], ...] = (
    (1, "/large_experiments/theorem/datasets/MERGED/all.test1.merged"),
    (2, "spm_model_32k_200M_charcov099995_allowWSO__v2"),
    (3, BPE), (4, 32000), (6, 0), (7, "text"), (10, 0.99995), (11, 200000000), (14, 1000000),
    (15, 0.75), (16, 80), (17, 2), (18, 4192), (19, 1), (20, 16), (21, 1), (22, 1), (23, 1),
    (24, 0), (25, 1), (26, 1), (32, 1), (33, 1), (34, 0), (35, 1), (36, ""), (40, 0), (41, 1),
    (42, 2), (43, -1), (44, " \u2047 "), (45, "<unk>"), (46, "<s>"), (47, "</s>"), (48, "<pad>"),
    (49, 0), (50, 0), (51, 0.0), (52, 0),
)  # fmt: skip
_LLAMA2_NORMALIZER: tuple[tuple[int, int | float | str], ...] = (
    (1, "identity"), (2, ""), (3, 1), (4, 0), (6, ""),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """A SentencePiece vocabulary with its rules."""

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]  # NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE
    model_type: int = BPE
    byte_fallback: bool = True
    unk_id: int = 0
    bos_id: int = 1  # -1 where there is none
    eos_id: int = 2
    pad_id: int = -1
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False
    escape_whitespaces: bool = True
    treat_whitespace_as_suffix: bool = False
    identity: bool = True  # the normaliser changes no character


def parse_model(data: bytes, *, where: str) -> SentencePieceModel:
    """The model in a SentencePiece file.

    Raises: TokenizerError if it is no complete model.
    Example: Llama 2 -> 32000 pieces, of which 256 are bytes, add_dummy_prefix true.
    """
    try:
        return _parse(data, where)
    except (IndexError, struct.error, UnicodeDecodeError):
        raise TokenizerError("the SentencePiece model is damaged or cut off", where=where) from None


def build_model(model: SentencePieceModel) -> bytes:
    """The bytes of a minimal model file that gives the same ids as the original.

    Example: the vocabulary of a llama-spm GGUF -> 46 of 46 of llama.cpp's vectors.
    """
    trainer = _fields(
        (
            (3, model.model_type), (4, len(model.pieces)),
            (24, int(model.treat_whitespace_as_suffix)),
            (35, int(model.byte_fallback)), (40, model.unk_id), (41, model.bos_id),
            (42, model.eos_id), (43, model.pad_id), (44, " \u2047 "),
            *((field, model.pieces[i]) for field, i in
              ((45, model.unk_id), (46, model.bos_id), (47, model.eos_id), (48, model.pad_id))
              if i >= 0),
        )
    )  # fmt: skip
    normalizer = _fields(
        (
            (1, "identity"), (2, ""), (3, int(model.add_dummy_prefix)),
            (4, int(model.remove_extra_whitespaces)), (5, int(model.escape_whitespaces)), (6, ""),
        )
    )  # fmt: skip
    return _pieces(model) + _message(2, trainer) + _message(3, normalizer)


def build_llama2_model(model: SentencePieceModel) -> bytes:
    """The bytes of Meta's Llama 1/2 `tokenizer.model`, from its vocabulary.

    Example: the vocabulary of a llama-spm GGUF -> 499723 bytes with sha256 9e556afd...
    """
    trainer, normalizer = _fields(_LLAMA2_TRAINER), _fields(_LLAMA2_NORMALIZER)
    return _pieces(model) + _message(2, trainer) + _message(3, normalizer)


def _parse(data: bytes, where: str) -> SentencePieceModel:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int | float | bytes] = {}
    normalizer: dict[int, int | float | bytes] = {}
    for field, value in _read(data):
        if field == 1 and isinstance(value, bytes):
            piece = _piece(value)
            pieces.append(piece[0])
            scores.append(piece[1])
            types.append(piece[2])
        elif field == 2 and isinstance(value, bytes):
            trainer.update(_read(value))
        elif field == 3 and isinstance(value, bytes):
            normalizer.update(_read(value))
        if len(pieces) > MAX_PIECES:
            raise TokenizerError(f"more than {MAX_PIECES} pieces", where=where)
    if not pieces:
        raise TokenizerError("the SentencePiece model holds no pieces", where=where)
    name = normalizer.get(1, b"")
    return SentencePieceModel(
        pieces=pieces,
        scores=scores,
        types=types,
        model_type=_int(trainer, 3, UNIGRAM),
        byte_fallback=bool(_int(trainer, 35, 0)),
        unk_id=_int(trainer, 40, 0),
        bos_id=_int(trainer, 41, 1),
        eos_id=_int(trainer, 42, 2),
        pad_id=_int(trainer, 43, -1),
        add_dummy_prefix=bool(_int(normalizer, 3, 1)),
        remove_extra_whitespaces=bool(_int(normalizer, 4, 1)),
        escape_whitespaces=bool(_int(normalizer, 5, 1)),
        treat_whitespace_as_suffix=bool(_int(trainer, 24, 0)),
        identity=not normalizer.get(2) and name in (b"identity", b""),
    )


def _piece(data: bytes) -> tuple[str, float, int]:
    """Text, score and type of one piece; the usual layout is read without a loop."""
    length = data[1]
    end = 2 + length
    if data[0] == 0x0A and length < 0x80 and len(data) in (end + 5, end + 7) and data[end] == 0x15:
        score = struct.unpack_from("<f", data, end + 1)[0]
        if len(data) == end + 5:
            return data[2:end].decode(), score, NORMAL
        if data[end + 5] == 0x18:
            return data[2:end].decode(), score, data[end + 6]
    text, score, piece_type = b"", 0.0, NORMAL
    for field, value in _read(data):
        if field == 1 and isinstance(value, bytes):
            text = value
        elif field == 2 and isinstance(value, float):
            score = value
        elif field == 3 and isinstance(value, int):
            piece_type = value
    return text.decode(), score, piece_type


def _int(fields: dict[int, int | float | bytes], number: int, default: int) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int):
        return default
    return value - 2**64 if value >= 2**63 else value


def _read(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """(field number, value) of a protobuf message. Raises IndexError where it is cut off."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        field, wire = key >> 3, key & 7
        value: int | float | bytes
        if wire == 0:
            value, position = _varint(data, position)
        elif wire == 2:
            length, position = _varint(data, position)
            if position + length > len(data):
                raise IndexError(position)
            value, position = data[position : position + length], position + length
        elif wire in (1, 5):
            width = 8 if wire == 1 else 4
            value = struct.unpack_from("<d" if wire == 1 else "<f", data, position)[0]
            position += width
        else:
            raise IndexError(position)
        yield field, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise IndexError(position)


def _pieces(model: SentencePieceModel) -> bytes:
    out = bytearray()
    for piece, score, kind in zip(model.pieces, model.scores, model.types, strict=True):
        body = _message(1, piece.encode()) + b"\x15" + struct.pack("<f", score)
        if kind != NORMAL:
            body += b"\x18" + _encode_varint(kind)
        out += _message(1, body)
    return bytes(out)


def _fields(fields: Sequence[tuple[int, int | float | str]]) -> bytes:
    out = bytearray()
    for number, value in fields:
        if isinstance(value, str):
            out += _message(number, value.encode())
        elif isinstance(value, float):
            out += _encode_varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            out += _encode_varint(number << 3) + _encode_varint(value % 2**64)
    return bytes(out)


def _message(field: int, body: bytes) -> bytes:
    return _encode_varint(field << 3 | 2) + _encode_varint(len(body)) + body


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
