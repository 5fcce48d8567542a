"""`llamatool models`: the published models that llamatool knows by name."""

from typing import Annotated

import typer

from llamatool.cli.options import JsonOption


def models(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORD...]",
            help="Only models with these words in the name.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the published models with their main figures.

    A name in the first column is a SOURCE for every other command. Weights and KV cache are in
    bfloat16; the cache is what one more token adds while it is inside every window.

    Examples:

      llamatool models

      llamatool models 3.2

      llamatool models 8b instruct

      llamatool models scout --json
    """
    from llamatool.listing import list_models
    from llamatool.render.blocks import show, show_json
    from llamatool.render.models import to_blocks, to_json

    found = list_models(words or ())
    if as_json:
        show_json(to_json(found))
    else:
        show(to_blocks(found))
