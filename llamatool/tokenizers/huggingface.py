"""`tokenizer.json` of a Hugging Face folder, encoded by the tokenizers library.

A Llama 3 or 4 file whose ids are proven to be those of tiktoken is given to tiktoken, which is
several times faster. The proof is by content (`as_tiktoken`): model, expression, ids and the
complete merge list. Everything else (Digits pre-tokenizers, NFC
normalisers, added tokens that are not special) stays with tokenizers.

Special added tokens are not looked for in ordinary text (`encode_special_tokens`). Added tokens
that the file does not call special, such as Qwen's `<tool_call>`, are: tokenizers has no switch for
them, and Hugging Face gives their ids for any text.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from llamatool import strictjson
from llamatool.config.model import Note
from llamatool.errors import InputError, TokenizerError
from llamatool.tokenizers import bytelevel
from llamatool.tokenizers.base import ByteStreamDecoder, Identity, StreamDecoder, Tokenizer
from llamatool.tokenizers.chunks import SPACES_AND_LINES, CutRule, cut_points
from llamatool.tokenizers.gguf import PRE_TOKENIZERS
from llamatool.tokenizers.special import bos_and_stops
from llamatool.tokenizers.tiktoken import LLAMA3_PATTERN, LLAMA4_PATTERN, Ranks

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

Content = Mapping[str, Any]

# sha256 of the merge lists ("left right" joined by newlines) that are known to equal the ranks:
# Llama 3 (280147 merges, as published) and Llama 4 (439802, derived and checked).
_KNOWN_MERGES = frozenset(
    (
        "0cd100e0ab7dbd83c3b668a7cfb2aed1f63f2aec66dae6ec4b63de2c552bb82d",
        "c764d0b89fe342cb9c0fe69cd027ef70b0318fd9ce80a6c8fedb98c848768f51",
    )
)
_LLAMA_PATTERNS = (LLAMA3_PATTERN, LLAMA4_PATTERN)
SPACE = "\u2581"

BATCH_FROM = 16_384  # characters: longer texts are cut and encoded side by side
PART = 4_096


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json as the tokenizers library reads it."""

    def __init__(self, content: Content, text: str, identity: Identity) -> None:
        self.content = content
        self._engine = _engine(text, identity.source)
        added = content.get("added_tokens") or []
        vocabulary = content["model"]["vocab"]
        self.special_ids = {t["content"]: t["id"] for t in added if t.get("special")}
        self.added_ids = {t["content"]: t["id"] for t in added if not t.get("special")}
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        self.vocab_size = max(*ids, *(t["id"] for t in added), 0) + 1
        self.identity = replace(identity, vocab_size=self.vocab_size)
        bos, self.eos_ids = bos_and_stops(self.special_ids)
        template = template_bos(content)
        self.bos_id = bos if template is None else template
        self.add_bos = template is not None
        self.byte_level = is_byte_level(content)
        self._prefixed = _legacy_prefix(content)
        self.cut_rule = _cut_rule(content)

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        if not self.byte_level:
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                raise self._unknown_id(min(ids) if min(ids) < 0 else max(ids))
            text: str = self._engine.decode(list(ids), skip_special_tokens=not specials)
            return text
        names = self.names_by_id
        parts = []
        for token_id in ids:
            if token_id not in names:
                parts.append(self.token_bytes(token_id))
            elif specials:
                parts.append(names[token_id].encode())
        return b"".join(parts).decode("utf-8", "replace")

    def stream(self, after: Sequence[int] = ()) -> StreamDecoder:
        """A decoder of ids that arrive one by one, behind the ids `after`."""
        return ByteStreamDecoder(self) if self.byte_level else _GrowingDecoder(self, after)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; nothing for a special token."""
        token = self._engine.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            if 0 <= token_id < self.vocab_size:
                return b""
            raise self._unknown_id(token_id)
        if token in self.special_ids:
            return b""
        if token in self.added_ids:
            return str(token).encode()
        if self.byte_level:
            return bytelevel.to_bytes(token) or str(token).encode()
        if _is_byte_piece(token):
            return bytes([int(token[3:5], 16)])
        return str(token).replace(SPACE, " ").encode()

    def ordinary_ids(self) -> Iterable[int]:
        """The ids that ordinary text can become."""
        special = self.names_by_id
        return (i for i in range(self.vocab_size) if i not in special)

    @cached_property
    def fragment_ids(self) -> frozenset[int]:
        """Ids that are byte fragments: not valid UTF-8 on their own, or a `<0xNN>` piece."""
        if self.byte_level:
            return super().fragment_ids
        pieces = ((i, self._engine.id_to_token(i)) for i in self.ordinary_ids())
        return frozenset(i for i, piece in pieces if piece and _is_byte_piece(piece))

    def _encode(self, text: str, *, first: bool) -> list[int]:
        engine = self._engine if first or not self._prefixed else self._continuing
        if len(text) < BATCH_FROM or self.cut_rule is CutRule.NEVER:
            return list(engine.encode(text, add_special_tokens=False).ids)
        parts = [text[start:end] for start, end in cut_points(text, self.cut_rule, PART)]
        ids = list(engine.encode(parts[0], add_special_tokens=False).ids)
        rest = self._continuing if self._prefixed else engine
        for encoding in rest.encode_batch_fast(parts[1:], add_special_tokens=False):
            ids += encoding.ids
        return ids

    @cached_property
    def _continuing(self) -> "Engine":
        """The same tokenizer for text behind a cut: without the prepended U+2581."""
        content = {**self.content, "normalizer": _LEGACY_REPLACE}
        return _engine(json.dumps(content), self.identity.source)


class _GrowingDecoder(StreamDecoder):
    """Decodes a short, growing window and returns the difference.

    Needed where a token's text depends on its neighbours: byte pieces, the stripped first space.
    """

    WINDOW = 8  # tokens of left context that are kept

    def __init__(self, tokenizer: HuggingFaceTokenizer, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(after)
        self._done = len(tokenizer.decode(self._window))

    def feed(self, *ids: int) -> str:
        self._window += ids
        if self._in_bytes():
            return ""
        text = self._tokenizer.decode(self._window)
        if text.endswith("\ufffd"):
            return ""  # perhaps an incomplete character
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._tokenizer.decode(self._window))

    def _in_bytes(self) -> bool:
        """Whether the window ends in a run of byte pieces, control tokens passed over.

        The library decodes a run as one: a bad byte spoils the good ones before it, so nothing of
        a run is final before its end.
        """
        special = self._tokenizer.names_by_id
        last = next((i for i in reversed(self._window) if i not in special), None)
        return last in self._tokenizer.fragment_ids

    def _advance(self, text: str) -> str:
        new = text[self._done :]
        if new and len(self._window) > 4 * self.WINDOW:
            self._window = self._window[-self.WINDOW :]
            text = self._tokenizer.decode(self._window)
        self._done = len(text)
        return new


def parse_json(data: bytes, *, where: str) -> dict[str, Any]:
    """The content of a tokenizer.json.

    Raises: TokenizerError if it is no JSON object with a `model` and its vocabulary.
    """
    try:
        content = strictjson.parse_object(data, where=where, what="a tokenizer.json")
    except InputError as error:
        raise TokenizerError(error.what, where=error.where, hint=error.hint) from None
    model = content.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise TokenizerError(
            "this JSON has no `model` with a `vocab`: no tokenizer.json",
            where=where,
            hint="tokenizer_config.json and special_tokens_map.json hold no vocabulary",
        )
    if isinstance(vocab := model["vocab"], dict) and not _are_ids(vocab.values()):
        raise TokenizerError("the vocabulary maps a token to something that is no id", where=where)
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or not all(_is_added(token) for token in added):
        raise TokenizerError("`added_tokens` is no list of tokens with id and content", where=where)
    return content


def as_tiktoken(content: Content, *, where: str) -> tuple[Ranks, str, dict[str, int]] | None:
    """Ranks, expression and special tokens if tiktoken provably gives the same ids, else None.

    All must hold: BPE with `ignore_merges`, no byte fallback, dropout, unknown token or affixes; no
    normaliser; exactly the Llama 3 or 4 expression, isolated, then ByteLevel without prefix;
    consecutive ids; a merge list that equals the one derived from the ranks; no truncation or
    padding; every added token special and outside the vocabulary.
    """
    model = content["model"]
    pattern = _llama_pattern(content)
    if pattern is None or not _plain_bpe(content) or not model.get("ignore_merges"):
        return None
    vocabulary, added = model["vocab"], content.get("added_tokens") or []
    if not isinstance(vocabulary, dict):
        return None
    if any(not t.get("special") or t["content"] in vocabulary for t in added):
        return None
    if any(t["id"] < len(vocabulary) for t in added):
        return None
    try:
        ranks = bytelevel.ranks_from_vocabulary(vocabulary, where=where)
    except TokenizerError:
        return None
    if not _merges_are_derived(model.get("merges") or [], ranks, where):
        return None
    return ranks, pattern, {t["content"]: t["id"] for t in added}


def unreachable_note(content: Content, *, where: str) -> Note | None:
    """A note if the file has ranks but no `ignore_merges`: some tokens can then never come out.

    Example: Llama 3's vocabulary with `ignore_merges` false -> 588 tokens unreachable.
    """
    model = content["model"]
    if _llama_pattern(content) is None or model.get("ignore_merges") or model["type"] != "BPE":
        return None
    pairs = list(bytelevel.merge_pairs(model.get("merges") or [], where=where))
    made = {left + right for left, right in pairs}
    order = {pair: rank for rank, pair in enumerate(pairs)}
    count = sum(1 for token in model["vocab"] if not _reachable(token, order, made))
    if not count:
        return None
    return Note(
        "ignore_merges_false",
        f"`ignore_merges` is false: {count} tokens unreachable, so some words become more tokens "
        "than in the model's training",
    )


def file_notes(content: Content, *, where: str) -> tuple[Note, ...]:
    """What is odd about a file that stays with the tokenizers library."""
    notes = (unreachable_note(content, where=where), missing_bytes_note(content))
    return tuple(note for note in notes if note is not None)


def missing_bytes_note(content: Content) -> Note | None:
    """A note if bytes that occur in UTF-8 are no tokens: the library drops them in silence.

    Example: SmolLM2 -> 8 bytes, six of them control characters.
    """
    model = content["model"]
    if not is_byte_level(content) or model.get("type") != "BPE" or model.get("unk_token"):
        return None
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}
    missing = [
        byte
        for byte in range(256)
        if byte not in never and bytelevel.ALPHABET[byte] not in model["vocab"]
    ]
    if not missing:
        return None
    names = ", ".join(f"0x{byte:02X}" for byte in missing[:8])
    return Note(
        "bytes_missing",
        f"{len(missing)} bytes are no tokens ({names}): characters with them vanish from a text",
    )


def is_byte_level(content: Content) -> bool:
    """Whether the tokens are written in GPT-2's byte alphabet."""
    return _has(content.get("decoder"), "ByteLevel")


def template_bos(content: Content) -> int | None:
    """The id that the post-processor puts in front of a text, None if it puts none."""
    for step in _steps(content.get("post_processor"), "processors"):
        if step.get("type") != "TemplateProcessing":
            continue
        match step:
            case {"single": [{"SpecialToken": {"id": str(name)}}, *_], "special_tokens": tokens}:
                match _object(_object(tokens).get(name)):
                    case {"ids": [int(token_id)]}:
                        return token_id
    return None


def _plain_bpe(content: Content) -> bool:
    model = content["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        return False
    odd = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if any(model.get(key) for key in odd):
        return False
    outer = ("normalizer", "truncation", "padding")
    return not any(content.get(key) for key in outer)


def _llama_pattern(content: Content) -> str | None:
    """The expression of Llama 3 or 4 if the pre-tokenizer is exactly its split, else None."""
    patterns = _byte_level_patterns(content)
    if patterns is not None and len(patterns) == 1 and patterns[0] in _LLAMA_PATTERNS:
        return patterns[0]
    return None


def _byte_level_patterns(content: Content) -> tuple[str, ...] | None:
    """The split expressions of a byte-level pre-tokenizer, None if it does anything else."""
    steps = _steps(content.get("pre_tokenizer"), "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    patterns = []
    for step in steps[:-1]:
        if step.get("type") == "Digits" and step.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif (
            step.get("type") == "Split"
            and step.get("behavior") == "Isolated"
            and not step.get("invert")
            and isinstance(_object(step.get("pattern")).get("Regex"), str)
        ):
            patterns.append(step["pattern"]["Regex"])
        else:
            return None
    if steps[-1].get("use_regex", True):
        patterns.append(PRE_TOKENIZERS["gpt-2"][0])
    return tuple(patterns)


def _cut_rule(content: Content) -> CutRule:
    """Where the texts of this file may be cut; NEVER for every form that is not known here."""
    added = content.get("added_tokens") or []
    for token in added:
        if token.get("special"):
            continue
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            return CutRule.NEVER
        if SPACES_AND_LINES.search(f"a{token['content']}a") or " " in token["content"]:
            return CutRule.NEVER
    if _legacy_prefix(content) and _pieces_can_be_cut(content["model"]):
        return CutRule.SPACES_AND_LINES
    normalizer = content.get("normalizer")
    if normalizer is not None and _object(normalizer).get("type") != "NFC":
        return CutRule.NEVER
    patterns = _byte_level_patterns(content)
    if patterns is None or content["model"].get("type") != "BPE":
        return CutRule.NEVER
    if len(patterns) == 1 and patterns[0] in (*_LLAMA_PATTERNS, *PRE_TOKENIZERS["qwen2"]):
        return CutRule.SPACES_AND_LINES
    if patterns in (PRE_TOKENIZERS["gpt-2"], PRE_TOKENIZERS["smollm"]):
        return CutRule.SPACES
    return CutRule.NEVER


_LEGACY_REPLACE: dict[str, object] = {
    "type": "Replace",
    "pattern": {"String": " "},
    "content": SPACE,
}
_LEGACY = [{"type": "Prepend", "prepend": SPACE}, _LEGACY_REPLACE]


def _legacy_prefix(content: Content) -> bool:
    """Whether the normaliser is SentencePiece's legacy form: prepend U+2581, replace spaces."""
    normalizer = _object(content.get("normalizer"))
    return normalizer.get("normalizers") == _LEGACY and content.get("pre_tokenizer") is None


def _pieces_can_be_cut(model: Mapping[str, Any]) -> bool:
    if model.get("type") != "BPE" or not model.get("byte_fallback"):
        return False
    return not any(
        "\n" in piece or " " in piece or SPACE in piece.lstrip(SPACE) for piece in model["vocab"]
    )


def _merges_are_derived(merges: object, ranks: Ranks, where: str) -> bool:
    try:
        lines = [f"{a} {b}" for a, b in bytelevel.merge_pairs(merges, where=where)]
    except TokenizerError:
        return False
    if hashlib.sha256("\n".join(lines).encode()).hexdigest() in _KNOWN_MERGES:
        return True
    derived = bytelevel.derive_merges(ranks)
    if len(derived) != len(lines):
        return False
    return all(
        line == f"{bytelevel.to_text(a)} {bytelevel.to_text(b)}"
        for line, (a, b) in zip(lines, derived, strict=True)
    )


def _reachable(token: str, order: Mapping[tuple[str, str], int], made: set[str]) -> bool:
    """Whether merging the characters of `token` ends in `token` itself."""
    if len(token) == 1:
        return True
    if token not in made:
        return False
    parts = list(token)
    while len(parts) > 1:
        ranked = [(order[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in order]
        if not ranked:
            return False
        _, i = min(ranked)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return True


def _engine(text: str, where: str) -> "Engine":
    from tokenizers import Tokenizer as Engine

    try:
        engine = Engine.from_str(text)
    except Exception as error:
        # tokenizers raises plain Exception for a file that it does not understand.
        if type(error) is not Exception:
            raise
        raise TokenizerError(f"tokenizers refuses the file: {error}", where=where) from None
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True
    return engine


def _steps(component: object, key: str) -> list[dict[str, Any]]:
    """The steps of a component that may be one step or a Sequence of them."""
    if not isinstance(component, dict):
        return []
    steps = component.get(key) if component.get("type") == "Sequence" else [component]
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _object(value: object) -> dict[str, Any]:
    """`value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _has(component: object, kind: str) -> bool:
    return any(step.get("type") == kind for step in _steps(component, "decoders"))


def _is_byte_piece(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _are_ids(values: Iterable[object]) -> bool:
    return all(type(value) is int and 0 <= value < 2**31 for value in values)


def _is_added(token: object) -> bool:
    return (
        isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and bool(token["content"])
        and _are_ids([token.get("id")])
    )
