"""The model under test before its weights are read: configuration, tokenizer, way of asking."""

import hashlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal

from llamatool.config.layers import LayerSpec, plan_layers
from llamatool.config.model import ModelConfig
from llamatool.errors import InputError
from llamatool.generate.formats import Message
from llamatool.generate.prompt import Writing, choose_writing, encode_chat
from llamatool.generate.stop import stop_ids
from llamatool.generate.text_model import local_path, read_tokenizer
from llamatool.records import record
from llamatool.source import Progress, load_source
from llamatool.tokenizers.base import Tokenizer

Template = Literal["auto", "raw", "chat"]

POCKETS = ("pocket", "pocket-rope")
POCKET_NOTE = (
    "{name} is the built-in model of 1 M parameters, trained on generated sentences: it proves the"
    " pipeline and is no language model. A real one: llamatool needle FOLDER"
)
# Templates that print the date must give the same prompt tomorrow.
_DATE = datetime(2025, 1, 1)
_WHOLE_BYTES = 64 * 2**20  # files up to this size are hashed whole


@record
class Frame:
    """The ids around a question: before the text, and between question and answer."""

    before: tuple[int, ...]  # BOS, and what a chat template writes first
    after: tuple[int, ...]  # what it writes behind the user's turn; nothing in raw prompts
    is_chat: bool
    why: str  # which template, in words


@record
class Subject:
    """A model to be tested."""

    name: str  # as the user gave it
    path: str
    is_pocket: bool
    config: ModelConfig
    layers: tuple[LayerSpec, ...]
    tokenizer: Tokenizer
    frame: Frame
    stop_ids: frozenset[int]
    sha256: str  # of the configuration and the weight files
    tokenizer_sha256: str

    @property
    def chunk(self) -> int | None:
        """The chunk size of the model's chunked layers, None if it has none."""
        chunks = {layer.window for layer in self.layers if layer.attention == "chunked"}
        return max((chunk for chunk in chunks if chunk is not None), default=None)

    @property
    def is_local_below_top(self) -> bool:
        """Whether only the last layer sees beyond a chunk, so that a change stays in its chunk."""
        below = self.layers[:-1]
        return (
            self.layers[-1].attention == "full"
            and bool(below)
            and all(layer.attention == "chunked" for layer in below)
            and len({layer.window for layer in below}) == 1
        )


def pocket_folder(name: str) -> Path:
    """The folder of an embedded model. Example: `pocket` -> .../llamatool/pocket/pocket."""
    return Path(__file__).parent.parent / "pocket" / name


def open_subject(
    source: str | None, *, template: Template = "auto", progress: Progress | None = None
) -> Subject:
    """The model that `source` names; None and the names of POCKETS are the embedded ones.

    Raises: the errors of reading a source; TokenizerError if there is no tokenizer;
    UnsupportedError if chat is asked for and no format is known.
    """
    name = source or POCKETS[0]
    is_pocket = source is None or (name in POCKETS and not Path(name).exists())
    path = str(pocket_folder(name)) if is_pocket else local_path(name, progress)
    loaded = load_source(path)
    config, identity = loaded.need_config()
    tokenizer, settings = read_tokenizer(loaded)
    names = (Path(name).name, Path(path).resolve().name, config.name_or_path or "", *settings.names)
    writing = choose_writing(
        identity,
        template=settings.template,
        names=names,
        raw=template == "raw",
        chat=template == "chat",
    )
    frame, stop_names = _frame(writing, tokenizer)
    stops = stop_ids(
        tokenizer,
        generation_config=settings.generation_eos,
        config=config.eos_token_ids,
        tokenizer_config=settings.tokenizer_eos,
        is_instruct=writing.is_instruct or frame.is_chat,
        names=stop_names,
    )
    return Subject(
        name=name,
        path=path,
        is_pocket=is_pocket,
        config=config,
        layers=plan_layers(config),
        tokenizer=tokenizer,
        frame=frame,
        stop_ids=stops.ids,
        sha256=_fingerprint(loaded.located.path),
        tokenizer_sha256=tokenizer.identity.sha256 or _ids_sha256(tokenizer),
    )


def _frame(writing: Writing, tokenizer: Tokenizer) -> tuple[Frame, tuple[str, ...]]:
    """What the prompt format writes around a user's text: equal in two prompts that differ."""
    if writing.mode == "raw":
        bos = tokenizer.bos_id
        before: tuple[int, ...] = (bos,) if tokenizer.add_bos and bos is not None else ()
        return Frame(before, (), False, f"raw, {writing.why}"), ()
    prompts = [
        encode_chat(writing, [Message("user", text)], tokenizer, now=_DATE)
        for text in ("One way.", "Another road?")
    ]
    first, second = (prompt.ids for prompt in prompts)
    before = _common(first, second)
    after = _common(first[::-1], second[::-1])[::-1]
    frame = Frame(before, after, True, f"chat, {writing.why}")
    if tokenizer.bos_id is not None and list(before + after).count(tokenizer.bos_id) > 1:
        raise InputError(f"the chat template writes BOS more than once ({writing.why})")
    return frame, prompts[0].stop_names


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return first[:place]
    return first[: min(len(first), len(second))]


def _fingerprint(path: Path | None) -> str:
    """sha256 over the model's files: small ones whole, of large ones size, head and tail."""
    digest = hashlib.sha256()
    for file in _model_files(path):
        num_bytes = file.stat().st_size
        digest.update(f"{file.name} {num_bytes}\n".encode())
        with file.open("rb") as stream:
            if num_bytes <= _WHOLE_BYTES:
                digest.update(stream.read())
            else:
                digest.update(stream.read(2**20))
                stream.seek(-(2**20), 2)
                digest.update(stream.read())
    return digest.hexdigest()


def _model_files(path: Path | None) -> Iterator[Path]:
    if path is None:
        return
    if path.is_file():
        yield path
        return
    patterns = ("config.json", "params.json", "*.safetensors", "*.pth", "*.gguf")
    yield from sorted({file for pattern in patterns for file in path.glob(pattern)})


def _ids_sha256(tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256()
    for token_id in tokenizer.ordinary_ids():
        token = tokenizer.token_bytes(token_id)
        digest.update(len(token).to_bytes(4, "little") + token)
    return digest.hexdigest()
