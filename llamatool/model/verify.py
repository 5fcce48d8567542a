"""Do two checkpoints compute the same? Both run in fp32, layer by layer, on the same tokens.

Each side runs in the convention of its own layout: Meta's files and GGUF with neighbouring rows
rotated, Hugging Face's with the halves of a head. So a conversion is judged without the code that
exchanges rows. Only one layer of each side is in memory at a time; any size can be compared.

Letters: B batch, T tokens, D hidden_size, V vocab_size.
"""

from pathlib import Path

import torch
from torch import Tensor

from llamatool.config.model import ModelConfig
from llamatool.errors import InputError
from llamatool.model.cache import KVCache
from llamatool.model.decoder import Decoder
from llamatool.model.load import as_stored, runnable
from llamatool.model.weights import Weights, assign
from llamatool.records import record
from llamatool.source import load_source

NUM_TOKENS = 96  # beyond position 64, where a wrong rotation has turned far enough to show
TOLERANCE = 1e-4  # of the largest logit; the two layouts round differently by about 1e-6


@record
class LogitsComparison:
    """How far the logits of two checkpoints are apart."""

    num_tokens: int
    num_layers: int
    largest_logit: float  # of the first, in absolute value
    max_difference: float
    mean_kl: float  # nats per position, of the second from the first
    num_same_argmax: int  # positions at which both would write the same token
    tolerance: float  # share of the largest logit

    @property
    def same(self) -> bool:
        """Whether the largest difference is within the tolerance."""
        return self.max_difference <= self.tolerance * self.largest_logit


def compare_logits(
    first: str | Path,
    second: str | Path,
    *,
    num_tokens: int = NUM_TOKENS,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> LogitsComparison:
    """How far the logits of two checkpoints are apart on `num_tokens` random tokens.

    Raises: InputError if the two differ in layers or vocabulary, CheckpointError if tensors are
    missing, unknown or ill-shaped.
    """
    one, other = _Side(str(first)), _Side(str(second))
    _require_alike(one.config, other.config, f"{first}, {second}")
    vocab_size = min(one.config.vocab_size, other.config.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(vocab_size, (1, num_tokens), generator=generator)
    p_TV, q_TV = one.logits(ids_BT)[0, :, :vocab_size], other.logits(ids_BT)[0, :, :vocab_size]
    return LogitsComparison(
        num_tokens=num_tokens,
        num_layers=one.config.num_hidden_layers,
        largest_logit=float(p_TV.abs().max()),
        max_difference=float((p_TV - q_TV).abs().max()),
        mean_kl=sum(map(_kl, p_TV, q_TV)) / num_tokens,
        num_same_argmax=int((p_TV.argmax(-1) == q_TV.argmax(-1)).sum()),
        tolerance=tolerance,
    )


class _Side:
    """One checkpoint: its configuration and where its tensors are, none of them read yet."""

    def __init__(self, source: str) -> None:
        loaded = load_source(source, with_tensors=True)
        config, tables = runnable(loaded)
        self.config = as_stored(config)
        self.weights = Weights(config, tables, where=loaded.located.where, as_stored=True)

    @torch.no_grad()
    def logits(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V] in fp32; one module's weights are in memory at a time."""
        with torch.device("meta"):
            model = Decoder(self.config)
        cpu, T = torch.device("cpu"), ids_BT.shape[1]
        self._fill(model, "embed_tokens")
        x_BTD = model.embed(ids_BT)
        rotation = model.rope.rotation(0, T, length=T, dtype=x_BTD.dtype, device=cpu)
        for spec in model.plan:
            if spec.attention == "cross":
                continue
            name = f"layers.{spec.index}"
            self._fill(model, name)
            cache = KVCache([spec], T).layers[spec.index]
            x_BTD = model.layers[str(spec.index)](x_BTD, rotation, cache, 0, T)
            self._drop(model, name)
        self._fill(model, "norm")
        if not self.config.tie_word_embeddings:
            self._fill(model, "lm_head")
        return model.logits(x_BTD)

    def _fill(self, model: Decoder, name: str) -> None:
        module = model.get_submodule(name)
        self.weights.fill(module, name + ".", torch.float32, torch.device("cpu"))

    def _drop(self, model: Decoder, name: str) -> None:
        module = model.get_submodule(name)
        for parameter, tensor in list(module.named_parameters()):
            assign(module, parameter, torch.empty_like(tensor, device="meta"))


def _kl(p_V: Tensor, q_V: Tensor) -> float:
    """Nats, in double precision: rounding in fp32 alone would give 1e-8."""
    log_p_V, log_q_V = p_V.double().log_softmax(-1), q_V.double().log_softmax(-1)
    return float((log_p_V.exp() * (log_p_V - log_q_V)).sum())


def _require_alike(first: ModelConfig, second: ModelConfig, where: str) -> None:
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            raise InputError(
                f"`{name}` is {one} in the first and {other} in the second", where=where
            )
