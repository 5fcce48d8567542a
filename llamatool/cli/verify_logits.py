"""`llamatool verify A B --logits`: do two checkpoints compute the same?"""

import typer

from llamatool.errors import MissingExtraError


def verify_logits(first: str, second: str, *, as_json: bool) -> None:
    """Runs both, prints how far apart they are, and exits with 1 where that is too far."""
    try:
        from llamatool.model.verify import compare_logits
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("verify --logits", "PyTorch", "torch") from None
    from llamatool.render.blocks import show, show_json
    from llamatool.render.logits import logits_blocks, logits_json

    found = compare_logits(first, second)
    if as_json:
        show_json(logits_json(first, second, found))
    else:
        show(logits_blocks(found))
    if not found.same:
        raise typer.Exit(1)
