"""`llamatool verify`: are two checkpoints the same model, whatever their layouts?"""

from typing import Annotated

import typer

from llamatool.cli.options import SOURCE_HELP, JsonOption
from llamatool.cli.verify_logits import verify_logits


def verify(
    first: Annotated[str, typer.Argument(metavar="A", help=SOURCE_HELP, show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help="The other one.", show_default=False)],
    logits: Annotated[
        bool,
        typer.Option(
            "--logits",
            help="Compare what they compute on random tokens, each in the convention of its own"
            " layout, one layer in memory at a time. Needs PyTorch.",
        ),
    ] = False,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Compare two checkpoints tensor by tensor, in any two layouts, in bounded memory.

    Tensors of the same type are compared bit by bit; of two types the wider one is narrowed
    first. Exits with 1 and a list where they differ.

    Examples:

      llamatool verify ./Llama-3.1-8B/original ./Llama-3.1-8B-hf

      llamatool verify a/model.safetensors b/model.safetensors --json

      llamatool verify ./Llama-3.1-8B/original ./Llama-3.1-8B-hf --logits
    """
    if logits:
        verify_logits(first, second, as_json=as_json)
        return
    from llamatool import conversion
    from llamatool.cli.progress import progress
    from llamatool.render.blocks import show, show_json
    from llamatool.render.convert import comparison_blocks, comparison_json

    left, right = conversion.load_weights(first), conversion.load_weights(second)
    with progress("Comparing", quiet=quiet, unit="elements") as update:
        found = conversion.compare_sources(
            left, right, progress=lambda done, total, name: update(done, total)
        )
    if as_json:
        show_json(comparison_json(first, second, found))
    else:
        show(comparison_blocks(found))
    if not found.is_equal:
        raise typer.Exit(1)
