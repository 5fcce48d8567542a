"""`llamatool generate`: runs a model and writes what it says."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamatool.cli.memory import announce_memory, check_device_map
from llamatool.cli.options import DeviceMapOption, JsonOption
from llamatool.cli.progress import Update, progress
from llamatool.cli.ranks import crew
from llamatool.errors import InputError, MissingExtraError, UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from PIL.Image import Image

    from llamatool.generate.batch import Row
    from llamatool.generate.prompt import Prompt
    from llamatool.generate.text_model import (
        Answer,
        Generation,
        OpenModel,
        Options,
        Request,
        TextModel,
    )
    from llamatool.model.images import Tiles
    from llamatool.model.launch import Crew

_MAX_PROMPT_BYTES = 64 * 2**20
_POCKETS = ("pocket", "pocket-rope")  # the embedded models, the default first
# What the pocket models can do: find a number that stands earlier in the text.
_POCKET_PROMPT = (
    "The magic number for silver falcon is 482913. The old baker counted the boats near the mill. "
    "Question: What is the magic number for silver falcon?\n"
    "Answer: The magic number for silver falcon is"
)


def generate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A folder, .gguf or .safetensors file, or hub id; without it the pocket model.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]",
            help="The prompt; - or nothing reads it from a pipe.",
            show_default=False,
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file", metavar="FILE", help="A text file with the prompt.", show_default=False
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            "--image",
            metavar="FILE",
            help="A picture that stands before the prompt; repeatable.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="A system text.", show_default=False),
    ] = None,
    suffix: Annotated[
        str | None,
        typer.Option(
            "--suffix",
            metavar="TEXT",
            help="What follows the gap that Code Llama is to fill; PROMPT stands before it.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Hold a conversation on the terminal.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt to the model as it is, behind BOS.")
    ] = False,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            metavar="FILE|NAME",
            help="A chat template, or a built-in format: llama-2, llama-3, llama-4, codellama-70b.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="A tokenizer that is not beside the weights.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            metavar="N",
            help="Tokens to write at most; 512, or what is left of the context, if not said.",
            show_default=False,
        ),
    ] = None,
    beyond_context: Annotated[
        bool,
        typer.Option("--beyond-context", help="Allow more tokens than the model's context."),
    ] = False,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop", metavar="TEXT", help="End before this text; repeatable.", show_default=False
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            "-t",
            metavar="T",
            help="0: always the most likely token; if not said, as the model's files say.",
            show_default=False,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            metavar="P",
            help="Keep the most likely tokens up to this probability.",
            show_default=False,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k",
            metavar="K",
            help="Keep the K most likely tokens; 0: all.",
            show_default=False,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p",
            metavar="P",
            help="Keep tokens with at least this share of the highest probability.",
            show_default=False,
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            metavar="X",
            help="Above 1: tokens seen before become less likely.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="Same seed, same text.", show_default=False),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:N or mps.")
    ] = "auto",
    device_map: DeviceMapOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="TYPE",
            help="bfloat16, float16 or float32; the checkpoint's if not said.",
            show_default=False,
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option("--quantize", metavar="int8", help="Weights of one byte.", show_default=False),
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Compile the decoding step (pays on a GPU, in long runs)."),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Many prompts, one JSON object a line: prompt or messages, id, system.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The answers to --prompts, one JSON object a line; goes on where it ended.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size", metavar="N", help="Prompts of equal length answered together."
        ),
    ] = 1,
    show_stats: Annotated[
        bool, typer.Option("--stats", help="Write speed, memory and stop ids to standard error.")
    ] = False,
    show_ids: Annotated[
        bool, typer.Option("--ids", help="Write prompt and answer as ids to standard error.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a model and write what it says, as it says it.

    A chat model gets the prompt in its own chat format, a base model gets the text as it is; one
    line on standard error says which, and why. The text of the prompt never becomes control
    tokens. Ctrl-C ends an answer; what was written stays.

    Examples:

      llamatool generate ./Llama-3.2-1B-Instruct "What is the capital of France?"

      llamatool generate model.gguf "Tell a story." --temperature 0.8 --seed 7 --stats

      cat report.txt | llamatool generate ./Llama-3.1-8B-Instruct --system "Summarise this."

      llamatool generate ./Llama-3.2-1B "Once upon a time" --raw -n 100

      llamatool generate ./Llama-3.2-1B-Instruct --chat

      llamatool generate ./Llama-3.2-11B-Vision-Instruct "What is this?" --image photo.jpg

      llamatool generate ./Llama-3.2-1B-Instruct --prompts in.jsonl --out out.jsonl

      torchrun --nproc-per-node 2 -m llamatool generate ./Llama-3.1-70B-Instruct "Hello"
    """
    _check(prompt, prompt_file, prompts, out, chat=chat, raw=raw, template=template, suffix=suffix)
    if image and (prompts is not None or suffix is not None):
        raise UsageError("--image belongs to one prompt, not to --prompts or --suffix")
    check_device_map(device_map, device)
    with crew(device) as group:
        if group is not None:
            device = str(group.device)
            if compiled:
                raise UsageError("--compile is for one process, not for several ranks")
        is_pocket = model is None or (model in _POCKETS and not Path(model).exists())
        source = _pocket(model or _POCKETS[0]) if is_pocket else str(model)
        text = None
        if prompts is None and not chat:
            default = _POCKET_PROMPT if is_pocket else None
            text = _told(group, lambda: _prompt_text(prompt, prompt_file, default, model))
            if is_pocket and text == _POCKET_PROMPT:
                _say(f"prompt: {text}")
                temperature = 0.0 if temperature is None else temperature
                stop = stop or ["."]
        options: Options = {
            "max_new_tokens": max_new_tokens,
            "stops": stop or (),
            "seed": seed,
            "beyond_context": beyond_context,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        }
        pictures = _pictures(image or ())
        with progress("Loading", unit="files") as update:
            opened = _open(
                source,
                raw=raw or suffix is not None,
                chat=chat,
                template=template,
                tokenizer=tokenizer,
                progress=update,
            )
        tiles = [opened.tiles(picture) for picture in pictures]
        _announce_images(opened, image or (), tiles)
        # A prompt that the context has no room for is refused before the weights are read.
        request, many = None, None
        if prompts is not None:
            many = _requests(opened, prompts, system, options)
            max_tokens = max((_num_tokens(opened, each) for _, each in many), default=1)
        elif text is None:
            max_tokens = _max_tokens(opened, tiles, max_new_tokens)
        else:
            asked = opened.prompt(text, system=system, suffix=suffix, images=tiles)
            request = opened.request(asked, **options)
            max_tokens = _num_tokens(opened, request)
            _announce(opened, asked, suffix)
            if group is not None:
                group.agree(asked.ids, "tokenizer, chat format or images")
        loaded = opened.load(
            device=device,
            dtype=dtype,
            quantize=quantize,
            compile_step=compiled,
            max_tokens=max_tokens,
            max_images=len(pictures),
            mesh=None if group is None else group.mesh,
            device_map=device_map,
            announce=announce_memory,
        )
        _warn_of_float16(loaded)
        if request is not None:
            generation, interrupted = _write(loaded.answer(request), quiet=as_json)
            _report(loaded, generation, show_stats=show_stats, show_ids=show_ids, as_json=as_json)
            if interrupted:
                raise KeyboardInterrupt
        elif many is not None and out is not None:
            _many(
                loaded,
                many,
                out,
                batch_size=batch_size,
                as_json=as_json,
                group=group,
            )
        else:
            _say(f"chat ({loaded.writing.why}); an empty line or Ctrl-D ends it")
            _converse(loaded, system, options, tiles, group)


def _check(
    prompt: str | None,
    prompt_file: Path | None,
    prompts: Path | None,
    out: Path | None,
    *,
    chat: bool,
    raw: bool,
    template: str | None,
    suffix: str | None,
) -> None:
    """Refuses options that contradict each other, before anything is loaded."""
    given = [
        name
        for name, value in (
            ("PROMPT", prompt), ("--prompt-file", prompt_file), ("--prompts", prompts),
            ("--chat", chat or None),
        )
        if value is not None
    ]  # fmt: skip
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} all say what to answer; give one")
    if (prompts is None) != (out is None):
        raise UsageError("--prompts FILE and --out FILE go together")
    if raw and (chat or template):
        raise UsageError("--raw gives no chat format to the prompt, --chat and --template do")
    if suffix is not None and (chat or template or prompts):
        raise UsageError("--suffix fills one gap, without a conversation")


def _prompt_text(
    prompt: str | None, prompt_file: Path | None, default: str | None, model: str | None
) -> str:
    """The prompt from the argument, the file or a pipe, else the default.

    Raises: UsageError if there is none, which asks whether the model was meant as the prompt.
    """
    import shlex

    meant = ""
    if model is not None and "/" not in model and not Path(model).exists():
        meant = f"; or was it {model!r}? llamatool generate pocket {shlex.quote(model)}"
    if prompt_file is not None:
        from llamatool.checkpoint import files

        with files.open_regular(prompt_file) as stream:
            return _decoded(stream.read(_MAX_PROMPT_BYTES + 1), str(prompt_file))
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        if default is not None:
            return default
        raise UsageError(
            "there is no prompt",
            hint=f"give it after MODEL, in a pipe, with --prompt-file, or talk with --chat{meant}",
        )
    text = _decoded(sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1), "standard input")
    if not text:
        if default is not None and prompt is None:
            return default
        raise UsageError(
            "the prompt on standard input is empty", hint=f"give it after MODEL{meant}"
        )
    return text


def _told(group: "Crew | None", make: "Callable[[], str]") -> str:
    """What `make` gives; of several ranks, the first one asks and tells the others."""
    return make() if group is None else group.tell(make)


def _decoded(data: bytes, where: str) -> str:
    if len(data) > _MAX_PROMPT_BYTES:
        raise InputError(f"the prompt is longer than {_MAX_PROMPT_BYTES >> 20} MiB", where=where)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InputError("the prompt is no UTF-8 text", where=where) from None


def _pictures(paths: "Sequence[Path]") -> "list[Image]":
    """The pictures in these files, opened before a model is loaded for nothing."""
    if not paths:
        return []
    _require_torch()
    from llamatool.model.images import open_picture

    return [open_picture(path) for path in paths]


def _require_torch() -> None:
    try:
        import torch  # noqa: F401  # first, so that the error is about this and nothing else
    except ModuleNotFoundError:
        raise MissingExtraError("generate", "PyTorch", "torch") from None


def _open(
    source: str,
    *,
    raw: bool,
    chat: bool,
    template: str | None,
    tokenizer: Path | None,
    progress: "Update",
) -> "OpenModel":
    """The model but for its weights, or an error that says what is missing."""
    _require_torch()
    from llamatool.generate.text_model import open_generator

    return open_generator(
        source, raw=raw, chat=chat, template=template, tokenizer=tokenizer, progress=progress
    )


def _requests(
    opened: "OpenModel", prompts: Path, system: str | None, options: "Options"
) -> "list[tuple[Row, Request]]":
    """What a file of prompts asks for. Raises: InputError for a line that is no prompt."""
    from llamatool.generate.batch import read_rows

    asked = []
    for row in read_rows(prompts):
        text = row.text if isinstance(row.text, str) else list(row.text)
        prompt = opened.prompt(text, system=system if row.system is None else row.system)
        asked.append((row, opened.request(prompt, **options)))
    return asked


def _num_tokens(opened: "OpenModel", request: "Request") -> int:
    """Tokens of a prompt and its answer. Raises: InputError if the context has no room for it."""
    return len(request.prompt.ids) + opened.max_new_tokens(request)


def _max_tokens(opened: "OpenModel", images: "Sequence[Tiles]", max_new_tokens: int | None) -> int:
    """Tokens to leave room for where the prompts are not known yet: of an answer, and images."""
    from llamatool.generate.engine import DEFAULT_NEW_TOKENS
    from llamatool.generate.images import image_ids

    tokens = [len(image_ids(image, opened.config, opened.tokenizer)) for image in images]
    return sum(tokens) + (max_new_tokens or DEFAULT_NEW_TOKENS)


def _pocket(name: str) -> str:
    """The folder of an embedded model. Raises: UsageError where none is embedded."""
    from importlib.util import find_spec

    spec = find_spec("llamatool.pocket")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location) / name
        if (folder / "config.json").is_file():
            _say(
                f"{name}: a tiny model of synthetic text that proves the pipeline, no language"
                " model; name a real one: llamatool generate MODEL"
            )
            return str(folder)
    raise UsageError(
        "this build holds no pocket model", hint="name a model: llamatool generate MODEL PROMPT"
    )


def _announce_images(
    opened: "OpenModel", paths: "Sequence[Path]", images: "Sequence[Tiles]"
) -> None:
    """One line for each image: its tiles, and the tokens that it takes in the prompt."""
    from llamatool.generate.images import image_ids

    for path, image in zip(paths, images, strict=True):
        rows, columns = image.grid
        tiles = "1 tile" if rows * columns == 1 else f"{rows} x {columns} tiles"
        count = len(image_ids(image, opened.config, opened.tokenizer))
        tokens = "1 token" if count == 1 else f"{count:,} tokens"
        _say(f"image: {path}, {tiles}, {tokens}")


def _announce(opened: "OpenModel", prompt: "Prompt", suffix: str | None) -> None:
    why = "between two texts, for Code Llama" if suffix is not None else opened.writing.why
    _say(f"mode: {prompt.mode} ({why})")
    for warning in prompt.warnings:
        _say(f"warning: {warning}")


def _warn_of_float16(loaded: "TextModel") -> None:
    if str(loaded.decoder.dtype) == "torch.float16":
        _say("warning: float16 overflows in some models; bfloat16 does not")


def _write(answer: "Answer", *, quiet: bool = False) -> "tuple[Generation, bool]":
    """Writes the answer as it comes; whether it was interrupted."""
    interrupted, last = False, ""
    try:
        for piece in answer:
            if not quiet:
                sys.stdout.write(piece)
                sys.stdout.flush()
            last = piece
    except KeyboardInterrupt:
        interrupted = True
        rest = answer.interrupt()
        if not quiet:
            sys.stdout.write(rest)
        last = rest or last
    if not quiet and not last.endswith("\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()
    return answer.result, interrupted


def _report(
    loaded: "TextModel",
    generation: "Generation",
    *,
    show_stats: bool,
    show_ids: bool,
    as_json: bool,
) -> None:
    from llamatool.generate.stats import measure
    from llamatool.render.blocks import show, show_json
    from llamatool.render.generate import id_lines, stats_blocks, to_json

    stats = measure(loaded, generation, probe=show_stats)
    if as_json:
        show_json(to_json(loaded, generation, stats))
        return
    if show_ids:
        show(id_lines(generation), file=sys.stderr)
    if show_stats:
        show(stats_blocks(loaded, generation, stats), file=sys.stderr)


def _converse(
    loaded: "TextModel",
    system: str | None,
    options: "Options",
    images: "Sequence[Tiles]",
    group: "Crew | None",
) -> None:
    """Turn after turn until an empty line, the end of input or Ctrl-C at the prompt."""
    from llamatool.generate.formats import Message

    messages: list[Message] = [Message("system", system)] if system is not None else []
    while line := _told(group, _ask):
        is_first = not any(message.role == "user" for message in messages)
        messages.append(Message("user", line, len(images) if is_first else 0))
        request = loaded.request(loaded.prompt(messages, images=images), **options)
        generation, interrupted = _write(loaded.answer(request, keep=True))
        if interrupted:
            _say("(interrupted)")
            if group is not None:  # the other ranks have lost the thread
                raise KeyboardInterrupt
        messages.append(Message("assistant", generation.text))


def _ask() -> str:
    """The next line of the user; empty at the end of input."""
    if sys.stdin.isatty() and sys.stderr.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    return sys.stdin.readline().strip()


def _many(
    loaded: "TextModel",
    asked: "Sequence[tuple[Row, Request]]",
    out: Path,
    *,
    batch_size: int,
    as_json: bool,
    group: "Crew | None",
) -> None:
    from llamatool.generate.batch import answer_file
    from llamatool.render.blocks import show_json
    from llamatool.render.generate import batch_json, batch_line

    _say(f"mode: {loaded.writing.mode} ({loaded.writing.why})")
    with progress("Answering", unit="prompts") as update:
        summary = answer_file(
            loaded, asked, out, batch_size=batch_size, progress=update, crew=group
        )
    if as_json:
        show_json(batch_json(loaded, summary, str(out)))
    else:
        _say(batch_line(summary, str(out)))


def _say(line: str) -> None:
    sys.stderr.write(one_line(line) + "\n")
    sys.stderr.flush()
