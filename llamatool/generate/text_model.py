"""A model with its tokenizer: text in, text out.

model = llamatool.load_generator("./Llama-3.2-1B-Instruct")
print(model.generate("What is the capital of France?").text)
for piece in model.stream("Tell me a story."):
    print(piece, end="", flush=True)
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from llamatool.config.model import ModelConfig
from llamatool.errors import (
    CheckpointError,
    ResourceError,
    TokenizerError,
    UnsupportedError,
    UsageError,
)
from llamatool.generate.engine import DEFAULT_NEW_TOKENS, Plan, Run, StopReason, Timing, fit_context
from llamatool.generate.formats import Message
from llamatool.generate.images import with_images
from llamatool.generate.prompt import (
    Prompt,
    Writing,
    choose_writing,
    encode_chat,
    encode_infill,
    encode_raw,
)
from llamatool.generate.sampling import Sampling
from llamatool.generate.settings import Settings, chosen_template, read_folder, read_gguf
from llamatool.generate.stop import StopIds, stop_ids
from llamatool.generate.stream import TextStream
from llamatool.records import record
from llamatool.units import format_bytes

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch.distributed.device_mesh import DeviceMesh

    from llamatool.generate.engine import Step
    from llamatool.model.cache import KVCache
    from llamatool.model.decoder import Decoder
    from llamatool.model.images import Tiles
    from llamatool.model.load import Announce
    from llamatool.model.static import StaticStep
    from llamatool.sizing.ranks import RankMemory
    from llamatool.source import LoadedSource, Progress
    from llamatool.tokenizers.base import Tokenizer

    Picture = str | Path | Image | Tiles  # a file, or what was made of one

_LAYOUTS = {"huggingface": "huggingface", "meta": "meta", "gguf": "gguf"}


class Options(TypedDict, total=False):
    """How to answer. What is left out, or None, is as the checkpoint's files say."""

    max_new_tokens: int | None  # 512, or what is left of the context
    stops: Sequence[str]  # texts that end the answer; they are not part of it
    seed: int | None  # same seed, same text
    beyond_context: bool  # allows more than the model's context
    temperature: float | None  # 0: always the most likely token
    top_p: float | None
    top_k: int | None  # 0: off
    min_p: float | None  # 0: off
    repetition_penalty: float | None  # 1: off


@record
class Request:
    """What to answer, and how; see Options."""

    prompt: Prompt
    sampling: Sampling
    max_new_tokens: int | None = None
    stops: tuple[str, ...] = ()
    seed: int | None = None
    beyond_context: bool = False


@record
class Generation:
    """An answer."""

    text: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]  # without the stop token
    stop_reason: StopReason
    stop_ids: StopIds
    mode: str  # chat or raw
    timing: Timing
    kv_bytes: int


class Answer:
    """An answer while it is written: iterate for its text, then ask for the `result`."""

    def __init__(self, run: Run, text: TextStream, prompt: Prompt, stops: StopIds) -> None:
        self._run = run
        self._text = text
        self._prompt = prompt
        self._stops = stops
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self.when_done: Callable[[Run, Sequence[int]], None] | None = None

    def __iter__(self) -> Iterator[str]:
        """The text, piece by piece: whole characters, none of a stop text."""
        for (token_id,) in self._run:
            if token_id in self._stops.ids:
                continue  # the run notes it and ends
            self._ids.append(token_id)
            if piece := self._keep(self._text.feed(token_id)):
                yield piece
            if self._text.stopped_at is not None:
                self._run.stop(0, "stop_text")
        if piece := self._keep(self._text.finish()):
            yield piece
        self._done()

    def interrupt(self) -> str:
        """Ends the answer here; what was held back of a character or stop text is returned."""
        self._run.stop(0, "interrupted")
        self._done()
        return self._keep(self._text.finish())

    def _done(self) -> None:
        if self.when_done is not None:
            self.when_done(self._run, (*self._prompt.ids, *self._ids))

    @property
    def result(self) -> Generation:
        """What has been written so far."""
        return Generation(
            text="".join(self._pieces),
            prompt_ids=self._prompt.ids,
            output_ids=tuple(self._ids),
            stop_reason=self._run.reasons[0] or "interrupted",
            stop_ids=self._stops,
            mode=self._prompt.mode,
            timing=self._run.timing,
            kv_bytes=self._run.cache.num_bytes,
        )

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


class Prompter:
    """What a checkpoint's files say about prompts, stops and sampling; it needs no weights."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: "Tokenizer",
        *,
        writing: Writing,
        settings: Settings,
        name: str,
        layout: str = "huggingface",
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.writing = writing
        self.settings = settings
        self.name = name
        self.layout = layout

    def prompt(
        self,
        text: str | Sequence[Message],
        *,
        system: str | None = None,
        suffix: str | None = None,
        images: "Sequence[Picture]" = (),
    ) -> Prompt:
        """The ids of a text or a conversation, written the way this model wants it.

        Args: system: text that stands before a conversation. suffix: what follows the gap that a
        Code Llama model is to fill. images: before a text; in a conversation, where its messages
        say how many there are.
        Raises: UsageError if a raw prompt is given a system text or a conversation; the errors of
        `tiles`.
        """
        if suffix is not None:
            if not isinstance(text, str) or system is not None or images:
                raise UsageError("a gap is filled between two texts, without a conversation")
            return encode_infill(text, suffix, self.tokenizer)
        if self.writing.mode == "raw":
            if system is not None or not isinstance(text, str):
                raise UsageError(
                    "a system text needs a chat model, and this prompt is raw"
                    if system is not None
                    else "a conversation needs a chat model, and this prompt is raw",
                    hint=f"raw because: {self.writing.why}; --template gives a chat format",
                )
            prompt = encode_raw(text, self.tokenizer, num_images=len(images))
            return self._with_images(prompt, images)
        if isinstance(text, str):
            text = [Message("user", text, len(images))]
        messages = list(text)
        if system is not None:
            messages.insert(0, Message("system", system))
        return self._with_images(encode_chat(self.writing, messages, self.tokenizer), images)

    def tiles(self, picture: "Picture") -> "Tiles":
        """The picture as this model's tower wants it.

        Raises: UnsupportedError if the model reads no images; as `open_picture` for a file.
        """
        from llamatool.model.images import Tiles, open_picture, tile

        vision = self.config.vision
        if vision is None:
            raise UnsupportedError("this model reads no images")
        if isinstance(picture, Tiles):
            return picture
        return tile(open_picture(picture) if isinstance(picture, str | Path) else picture, vision)

    def _with_images(self, prompt: Prompt, images: "Sequence[Picture]") -> Prompt:
        if not images:
            return prompt
        tiles = [self.tiles(image) for image in images]
        return with_images(prompt, tiles, self.config, self.tokenizer)

    def stop_ids(self, prompt: Prompt) -> StopIds:
        """The ids that end an answer to `prompt`."""
        return stop_ids(
            self.tokenizer,
            generation_config=self.settings.generation_eos,
            config=self.config.eos_token_ids,
            tokenizer_config=self.settings.tokenizer_eos,
            is_instruct=self.writing.is_instruct or prompt.mode == "chat",
            names=prompt.stop_names,
        )

    def request(self, prompt: Prompt, **options: Unpack[Options]) -> Request:
        """A request with `options`; what is not given is as the checkpoint's files say.

        Raises: UsageError for a value out of range.
        """
        asked = {name: options.get(name) for name in Sampling.__annotations__}
        changes: dict[str, Any] = {
            name: value for name, value in asked.items() if value is not None
        }
        return Request(
            prompt=prompt,
            sampling=replace(self.settings.sampling, **changes).checked(),
            max_new_tokens=options.get("max_new_tokens"),
            stops=tuple(options.get("stops") or ()),
            seed=options.get("seed"),
            beyond_context=options.get("beyond_context", False),
        )

    def max_new_tokens(self, request: Request) -> int:
        """Tokens that the answer may have at most.

        Raises: UsageError if less than one is asked for; InputError if prompt and answer exceed
        the context.
        """
        if request.max_new_tokens is not None and request.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens is {request.max_new_tokens}: at least 1")
        return fit_context(
            len(request.prompt.ids),
            request.max_new_tokens,
            self.config.max_position_embeddings,
            beyond_context=request.beyond_context,
        )


class TextModel(Prompter):
    """A decoder and its tokenizer, ready to answer."""

    def __init__(
        self,
        decoder: "Decoder",
        tokenizer: "Tokenizer",
        *,
        writing: Writing,
        settings: Settings,
        name: str,
        layout: str = "huggingface",
        load_seconds: float = 0.0,
    ) -> None:
        super().__init__(
            decoder.config,
            tokenizer,
            writing=writing,
            settings=settings,
            name=name,
            layout=layout,
        )
        self.decoder = decoder
        self.load_seconds = load_seconds
        self.step: Step | None = None  # reads one token; None: through the decoder itself
        self.compiles = False
        self._static: StaticStep | None = None
        # What was read last, and the images in it, where it is kept.
        self._past: tuple[tuple[int, ...], tuple[Tiles, ...], KVCache] | None = None

    def tiles(self, picture: "Picture") -> "Tiles":
        """As `Prompter.tiles`. Raises: UnsupportedError, too, if loaded without the tower."""
        if self.config.vision is not None and not self.decoder.has_tower:
            raise UnsupportedError(
                "this model was loaded without its image tower", hint="load it with max_images"
            )
        return super().tiles(picture)

    def answer(self, request: Request, *, keep: bool = False) -> Answer:
        """The answer to `request`, to be iterated over.

        Args: keep: keeps what was read, so that the next answer reads only what is new in its
        prompt: for conversations.
        Raises: InputError if prompt and answer exceed the context; ResourceError if their keys
        and values do not fit into memory.
        """
        prompt = request.prompt
        stops = self.stop_ids(prompt)
        plan = Plan(request.sampling, self.max_new_tokens(request), stops.ids)
        max_tokens = len(prompt.ids) + plan.max_new_tokens
        step, cache = self.step, None
        if self.compiles:
            step = self._compiled(max_tokens)
            cache = step.cache
        elif keep:
            cache = self._continued(prompt, max_tokens)
        if cache is None:
            self.require_memory(max_tokens, num_images=len(prompt.images))
        run = Run(
            self.decoder,
            [prompt.ids],
            plan,
            seeds=[request.seed],
            step=step,
            cache=cache,
            images=prompt.images,
        )
        text = TextStream(self.tokenizer, after=prompt.ids, stops=request.stops)
        answer = Answer(run, text, prompt, stops)
        if keep:
            answer.when_done = lambda run, ids: self._keep(run, ids, prompt.images)
        return answer

    def require_memory(self, max_tokens: int, batch_size: int = 1, *, num_images: int = 0) -> None:
        """Checks that keys and values of so many tokens fit into the memory that is free.

        Args: num_images: that cross-attention layers will hold, each with all its tiles.

        Raises: ResourceError with both numbers.
        """
        from llamatool.model.load import free_memory
        from llamatool.sizing.kv_cache import kv_cache

        decoder = self.decoder
        name = str(decoder.dtype).removeprefix("torch.")
        for device, layers in decoder.plan_by_device.items():
            cache = kv_cache(layers, dtype=name, vision=decoder.config.vision)
            needed = cache.num_bytes(max_tokens, batch_size=batch_size, num_images=num_images)
            free = free_memory(device, num_sharing=decoder.num_on_host)
            if free is not None and needed > free:
                raise ResourceError(
                    f"the KV cache of {max_tokens:,} tokens takes {format_bytes(needed)};"
                    f" {format_bytes(free)} are free on {device}",
                    hint="shorten the prompt or lower --max-new-tokens",
                )

    def generate(
        self,
        text: str | Sequence[Message],
        *,
        system: str | None = None,
        images: "Sequence[Picture]" = (),
        **options: Unpack[Options],
    ) -> Generation:
        """The whole answer to a text or a conversation.

        Args: system: text that stands before a conversation. images: as in `prompt`; the model
        must have been loaded with `max_images`. options: see Options.
        Raises: UsageError for a value out of range; InputError if prompt and answer exceed the
        context.
        """
        answer = self.stream(text, system=system, images=images, **options)
        for _ in answer:
            pass
        return answer.result

    def stream(
        self,
        text: str | Sequence[Message],
        *,
        system: str | None = None,
        images: "Sequence[Picture]" = (),
        **options: Unpack[Options],
    ) -> Answer:
        """The answer piece by piece; arguments as in `generate`, the `result` at the end."""
        prompt = self.prompt(text, system=system, images=images)
        return self.answer(self.request(prompt, **options))

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are packed in int8."""
        return any(type(module).__name__ == "Int8Linear" for module in self.decoder.modules())

    def _compiled(self, max_tokens: int) -> "StaticStep":
        """The compiled step with an empty cache; made again only for a longer one."""
        from llamatool.model.static import StaticStep

        if self._static is None or self._static.cache.max_tokens < max_tokens:
            cache = self.decoder.new_cache(1 << (max_tokens - 1).bit_length())
            self._static = StaticStep(self.decoder, cache, backend="auto")
        self._static.cache.truncate(0)
        return self._static

    def _continued(self, prompt: Prompt, max_tokens: int) -> "KVCache | None":
        """A cache that holds the beginning of the prompt already, if the last one does."""
        if self._past is None or self.decoder.rope.depends_on_length:
            return None
        read, images, cache = self._past
        self._past = None
        if list(map(id, images)) != list(map(id, prompt.images)):  # the same ids show others
            return None
        common = 0
        for ours, theirs in zip(read, prompt.ids[:-1], strict=False):  # one is left to be read
            if ours != theirs:
                break
            common += 1
        try:
            cache.truncate(common)
        except ValueError:  # a ring has gone over it
            return None
        return cache if cache.max_tokens >= max_tokens else cache.fork(2 * max_tokens)

    def _keep(self, run: Run, ids: Sequence[int], images: "tuple[Tiles, ...]") -> None:
        self._past = (tuple(ids[: run.cache.length]), images, run.cache)


class OpenModel(Prompter):
    """A checkpoint whose weights are still in their files: prompts can be made and measured."""

    path: str  # to load from
    seconds: float  # that it took to come here

    def load(
        self,
        *,
        device: str = "auto",
        dtype: str | None = None,
        quantize: str | None = None,
        compile_step: bool = False,
        max_tokens: int = DEFAULT_NEW_TOKENS,
        max_images: int = 0,
        mesh: "DeviceMesh | None" = None,
        device_map: str | None = None,
        announce: "Announce | None" = None,
    ) -> TextModel:
        """The same with weights; arguments as in `load_generator`.

        Args: max_tokens: of prompt and answer together, those of images included.
        """
        from llamatool.model.load import find_device, load_model
        from llamatool.sizing.placement import Placement

        start = time.perf_counter()
        if quantize not in (None, "int8"):
            raise UsageError(f"--quantize is `{quantize}`: only int8 is known")
        if dtype is None and self.config.dtype == "float16" and find_device(device).type == "cpu":
            dtype = "bfloat16"

        def told(held: "RankMemory | Placement") -> None:
            if compile_step and isinstance(held, Placement) and held.is_spread:
                names = ", ".join(share.device.name for share in held.shares)
                raise UsageError(
                    f"--compile is for one device, and this model needs {names}",
                    hint="leave --compile out, or make it fit one with fewer tokens or a smaller"
                    " dtype",
                )
            if announce is not None:
                announce(held)

        decoder = load_model(
            self.path,
            device=device,
            dtype=dtype,
            max_tokens=max_tokens,
            max_images=max_images,
            mesh=mesh,
            device_map=device_map,
            announce=told,
        )
        if quantize is not None:
            from llamatool.model.quantize import quantize_int8

            quantize_int8(decoder)
        made = TextModel(
            decoder,
            self.tokenizer,
            writing=self.writing,
            settings=self.settings,
            name=self.name,
            layout=self.layout,
        )
        made.compiles = compile_step
        made.step = _fast_step(decoder, pack=not compile_step)
        made.load_seconds = self.seconds + time.perf_counter() - start
        return made


def load_generator(
    source: str | Path,
    *,
    device: str = "auto",
    dtype: str | None = None,
    quantize: str | None = None,
    compile_step: bool = False,
    raw: bool = False,
    chat: bool = False,
    template: str | None = None,
    tokenizer: str | Path | None = None,
    max_tokens: int = DEFAULT_NEW_TOKENS,
    max_images: int = 0,
    mesh: "DeviceMesh | None" = None,
    device_map: str | None = None,
    announce: "Announce | None" = None,
    progress: "Progress | None" = None,
) -> TextModel:
    """A model that answers text, from a folder, a GGUF file, weights, or a hub id.

    Args:
    device, dtype, max_tokens: as in `load_model`; but float16 becomes bfloat16 on a CPU, which has
    no quick float16 and where it may overflow.
    quantize: `int8` for weights of one byte.
    compile_step: compiles the decoding step, with CUDA graphs on a GPU; the first answers are slow.
    raw, chat, template, tokenizer, progress: as in `open_generator`.
    max_images: images that a prompt may have; with 0 the image tower stays out of memory.
    mesh: of the ranks that share the model, as in `load_model`; all must ask the same.
    device_map, announce: as in `load_model`.

    Raises: the errors of `load_model`; TokenizerError if there is no tokenizer; UnsupportedError
    if chat is asked for and no format is known.
    """
    from llamatool.sizing.kv_cache import image_tokens

    opened = open_generator(
        source, raw=raw, chat=chat, template=template, tokenizer=tokenizer, progress=progress
    )
    if opened.config.vision is not None:
        max_tokens += max_images * image_tokens(opened.config.vision)[1]
    return opened.load(
        device=device,
        dtype=dtype,
        quantize=quantize,
        compile_step=compile_step,
        max_tokens=max_tokens,
        max_images=max_images,
        mesh=mesh,
        device_map=device_map,
        announce=announce,
    )


def open_generator(
    source: str | Path,
    *,
    raw: bool = False,
    chat: bool = False,
    template: str | None = None,
    tokenizer: str | Path | None = None,
    progress: "Progress | None" = None,
) -> OpenModel:
    """What `load_generator` loads, before its weights: prompts can be made, and memory counted.

    Args:
    raw: gives every text to the model as it is. chat: insists on a conversation.
    template: a file with a chat template, or the name of a built-in format.
    tokenizer: a file or folder, where it is not beside the weights.
    progress: told files done and files in all, while a hub id is downloaded.

    Raises: TokenizerError if there is no tokenizer; UnsupportedError if chat is asked for and no
    format is known; the errors of the source.
    """
    from llamatool.source import load_source

    start = time.perf_counter()
    path = local_path(str(source), progress)
    loaded = load_source(str(path))
    config, identity = loaded.need_config()
    found, settings = read_tokenizer(loaded, tokenizer)
    format_name, file_template = None, settings.template
    if template is not None:
        variables = settings.template.variables if settings.template else _variables(found)
        format_name, file_template = chosen_template(template, variables)
    names = (
        Path(str(source)).name,
        Path(path).resolve().name,
        *((config.name_or_path or "",)),
        *settings.names,
    )
    writing = choose_writing(
        identity, template=file_template, names=names, raw=raw, chat=chat, format_name=format_name
    )
    opened = OpenModel(
        config,
        found,
        writing=writing,
        settings=settings,
        name=str(source),
        layout=_LAYOUTS[config.source_format],
    )
    opened.path, opened.seconds = path, time.perf_counter() - start
    return opened


def _fast_step(decoder: "Decoder", *, pack: bool) -> "Step | None":
    """The quick way to read one token, where memory allows rearranging the weights for it."""
    import torch

    from llamatool.model.fast import DecodeStep, extra_bytes, speed_up
    from llamatool.model.load import free_memory

    if decoder.has_tower and decoder.has_cross_layers:
        return None
    # Weights are packed on the CPU alone.
    free_bytes = free_memory(torch.device("cpu"), num_sharing=decoder.num_on_host)
    if pack and free_bytes is not None and extra_bytes(decoder) > free_bytes:
        return None
    speed_up(decoder, pack=pack)
    return DecodeStep(decoder)


def local_path(source: str, progress: "Progress | None" = None) -> str:
    """`source` itself, or the folder of a hub id, downloaded where it is not there yet.

    Raises: CheckpointError for a model of the catalogue, which has no weights; HubError.
    """
    from llamatool.checkpoint import hub
    from llamatool.checkpoint.locate import locate

    located = locate(source)
    if located.kind == "catalog":
        raise CheckpointError(
            f"`{source}` is an entry of the catalogue: a configuration without weights",
            hint="name a folder, a .gguf file or a hub id such as meta-llama/Llama-3.2-1B-Instruct",
        )
    if located.kind != "hub" or located.hub_id is None:
        return source
    patterns = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "original/tokenizer.model")
    return str(hub.download(located.hub_id, patterns=patterns, progress=progress))


def read_tokenizer(
    loaded: "LoadedSource", elsewhere: str | Path | None = None
) -> tuple["Tokenizer", Settings]:
    """Tokenizer and settings of a source, from the files beside the weights or in the GGUF.

    Raises: TokenizerError if there is no tokenizer.
    """
    from llamatool.tokenizers import load

    path = loaded.located.path
    if path is None:
        raise CheckpointError(
            "this is a configuration without weights or tokenizer",
            where=loaded.source,
            hint="name a folder with a whole model, or a .gguf file",
        )
    if loaded.kind == "gguf":
        metadata = _gguf_metadata(path)
        if elsewhere is None:
            tokenizer = load.from_gguf(metadata, where=str(path))
        else:
            tokenizer = load.load(Path(elsewhere), read_gguf=_gguf_metadata)
        return tokenizer, read_gguf(metadata, tokenizer.names_by_id)
    folder = path if path.is_dir() else path.parent
    tokenizer = load.load(Path(elsewhere) if elsewhere else _with_tokenizer(folder))
    settings = read_folder(folder)
    if settings.add_bos is not None and tokenizer.bos_id is not None:
        tokenizer.add_bos = settings.add_bos
    return tokenizer, settings


def _with_tokenizer(folder: Path) -> Path:
    """The folder itself, or the one above it: Meta's files may lie in `original/`."""
    from llamatool.tokenizers.load import tokenizer_file

    for place in (folder, folder.parent):
        try:
            return tokenizer_file(place)
        except TokenizerError:
            continue
    raise TokenizerError(
        "there is no tokenizer beside the weights",
        where=str(folder),
        hint="put its tokenizer.json or tokenizer.model there, or name it with --tokenizer",
    )


def _gguf_metadata(path: Path) -> Mapping[str, object]:
    from llamatool.checkpoint.gguf import GgufArray, read_file

    return {
        key: value.read() if isinstance(value, GgufArray) else value
        for key, value in read_file(path).metadata.items()
        if key.startswith(("tokenizer.", "general."))
    }


def _variables(tokenizer: "Tokenizer") -> dict[str, str]:
    names = tokenizer.names_by_id
    found = {"bos_token": names.get(tokenizer.bos_id) if tokenizer.bos_id is not None else None}
    found["eos_token"] = next((names[i] for i in tokenizer.eos_ids if i in names), None)
    return {name: text for name, text in found.items() if text is not None}
