"""The comparison of two checkpoints by their logits, as a table and as JSON."""

from typing import TYPE_CHECKING, Any

from llamatool.render.blocks import Block, Grid, Lines

if TYPE_CHECKING:
    from llamatool.model.verify import LogitsComparison


def logits_blocks(found: "LogitsComparison") -> list[Block]:
    """What `verify --logits` prints."""
    verdict = "the same logits" if found.same else "different logits"
    rows = (
        ("tokens", f"{found.num_tokens:,}, through {found.num_layers:,} layers in float32"),
        *([("image", "a random one among them, through the tower")] if found.has_image else []),
        ("largest difference", f"{found.max_difference:.3g}, of logits up to"
         f" {found.largest_logit:.3g}"),
        ("allowed", f"{found.tolerance * found.largest_logit:.3g}"),
        ("mean KL divergence", f"{found.mean_kl:.3g} nats"),
        ("same next token", f"{found.num_same_argmax:,} of {found.num_tokens:,}"),
    )  # fmt: skip
    return [Lines((verdict,)), Grid(rows)]


def logits_json(first: str, second: str, found: "LogitsComparison") -> dict[str, Any]:
    """The same as one object."""
    return {
        "schema": 1,
        "first": first,
        "second": second,
        "same": found.same,
        "tokens": found.num_tokens,
        "layers": found.num_layers,
        "largest_logit": found.largest_logit,
        "max_difference": found.max_difference,
        "tolerance": found.tolerance,
        "mean_kl": found.mean_kl,
        "same_argmax": found.num_same_argmax,
    }
