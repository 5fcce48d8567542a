"""How long a document may be: the stated context, what it rests on, and a plain answer."""

from llamatool.config.catalog import CatalogEntry
from llamatool.config.layers import LayerSpec
from llamatool.config.model import ModelConfig
from llamatool.config.rope import inverse_frequencies, wavelengths
from llamatool.records import record


@record
class ContextVerdict:
    """What is known about a model's usable length, in tokens."""

    max_position_embeddings: int | None
    trained_context: int | None  # where it is shorter than what is stated
    longest_wavelength: float | None  # positions in which the slowest RoPE pair turns once
    note: str | None
    asked_tokens: int | None
    answer: str | None  # on `asked_tokens`
    fits: bool | None


def context_verdict(
    config: ModelConfig,
    layers: tuple[LayerSpec, ...],
    entry: CatalogEntry | None,
    asked_tokens: int | None = None,
) -> ContextVerdict:
    """The context of a model, and whether a document of `asked_tokens` may be given to it.

    Example: Llama 4 Scout Instruct -> 10485760 stated, 262144 trained; 100000 tokens may be given,
    but 36 of its 48 layers see only their chunk of 8192.
    """
    stated = config.max_position_embeddings
    trained = entry.trained_context if entry else None
    longest = None
    if any(layer.uses_rope for layer in layers):
        frequencies = inverse_frequencies(
            config.rope, config.head_dim, max_position_embeddings=stated
        )
        longest = max(wavelengths(frequencies))
    notes = []
    if trained is not None and stated is not None:
        notes.append(
            f"{stated:,} tokens are stated, training went to {trained:,}; beyond that the model "
            "extrapolates"
        )
    local = _local_layers(layers)
    if local:
        notes.append(local)
    answer, fits = _answer(asked_tokens, stated, trained, local)
    return ContextVerdict(
        max_position_embeddings=stated,
        trained_context=trained,
        longest_wavelength=longest,
        note="; ".join(notes) or None,
        asked_tokens=asked_tokens,
        answer=answer,
        fits=fits,
    )


def _local_layers(layers: tuple[LayerSpec, ...]) -> str | None:
    windowed = [layer for layer in layers if layer.window is not None]
    if not windowed:
        return None
    window = windowed[0].window or 0
    sees = (
        f"see only their own chunk of {window:,} tokens"
        if windowed[0].attention == "chunked"
        else f"see only the last {window:,} tokens"
    )
    return f"{len(windowed)} of {len(layers)} layers {sees}"


def _answer(
    asked: int | None, stated: int | None, trained: int | None, local: str | None
) -> tuple[str | None, bool | None]:
    if asked is None:
        return None, None
    if stated is None:
        return f"{asked:,} tokens: the context of this model is not known", None
    if asked > stated:
        return (
            f"no: {asked:,} tokens are more than the {stated:,} this model was made for; split the "
            "document, retrieve the parts that matter, or take a model with a longer context",
            False,
        )
    if trained is not None and asked > trained:
        return (
            f"with care: {asked:,} tokens are inside the stated {stated:,}, but beyond the "
            f"{trained:,} of training; test it with your own documents",
            True,
        )
    if local:
        return f"yes: {asked:,} tokens fit; note that {local}", True
    return f"yes: {asked:,} tokens fit into the {stated:,} this model was trained for", True
