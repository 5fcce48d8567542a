"""Arguments and options that several commands share, each declared once."""

import sys
from typing import Annotated, BinaryIO

import typer

from llamatool import units

SOURCE_HELP = (
    "config.json, params.json, a folder, a .safetensors, index.json or .gguf file, a built-in "
    "model's name (llama-3.1-8b), a hub id (org/name[@revision]), or - for standard input."
)


def standard_input() -> BinaryIO | None:
    """The bytes of standard input, or None where it is closed."""
    return sys.stdin.buffer if sys.stdin is not None else None


def _tokens(text: str) -> int:
    return units.parse_tokens(text)


def _bytes(text: str) -> int:
    return units.parse_bytes(text)


SourcesArgument = Annotated[
    list[str], typer.Argument(metavar="SOURCE...", help=SOURCE_HELP, show_default=False)
]
OptionalSourcesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SOURCE...]", help=SOURCE_HELP, show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        metavar="N",
        parser=_tokens,
        help=f"Length of a document in tokens ({units.TOKENS_HELP}).",
        show_default=False,
    ),
]
DeviceMapOption = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        metavar="auto",
        help="Spread the layers over all GPUs here, and over the CPU what they have no room for.",
        show_default=False,
    ),
]
MemoryOption = Annotated[
    int | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        parser=_bytes,
        help=f"Memory of one device ({units.BYTES_HELP}).",
        show_default=False,
    ),
]
