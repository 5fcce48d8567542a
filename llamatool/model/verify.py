"""Do two checkpoints compute the same? Both run in fp32, layer by layer, on the same tokens.

Each side runs in the convention of its own layout: Meta's files and GGUF with neighbouring rows
rotated, Hugging Face's with the halves of a head. So a conversion is judged without the code that
exchanges rows. Only one layer of each side is in memory at a time; any size can be compared.

Where both read images, a random one stands among the tokens, so that tower, projection and
cross-attention are compared, too.

Letters: B batch, T tokens, D hidden_size, V vocab_size, S image tokens.
"""

from pathlib import Path

import torch
from torch import Tensor

from llamatool.config.model import ModelConfig
from llamatool.errors import InputError
from llamatool.model.cache import CrossLayerCache, KVCache
from llamatool.model.cross import CrossBlock
from llamatool.model.decoder import Decoder
from llamatool.model.images import Tiles
from llamatool.model.load import as_stored, runnable
from llamatool.model.tower import TowerBlock
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
    has_image: bool = False  # whether an image stood among the tokens

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
    image = _random_image(one.config, other.config, generator)
    p_TV = one.logits(ids_BT, image)[0, :, :vocab_size]
    q_TV = other.logits(ids_BT, image)[0, :, :vocab_size]
    num_tokens = len(p_TV)
    return LogitsComparison(
        num_tokens=num_tokens,
        num_layers=one.config.num_hidden_layers,
        largest_logit=float(p_TV.abs().max()),
        max_difference=float((p_TV - q_TV).abs().max()),
        mean_kl=sum(map(_kl, p_TV, q_TV)) / num_tokens,
        num_same_argmax=int((p_TV.argmax(-1) == q_TV.argmax(-1)).sum()),
        tolerance=tolerance,
        has_image=image is not None,
    )


class _Side:
    """One checkpoint: its configuration and where its tensors are, none of them read yet."""

    def __init__(self, source: str) -> None:
        loaded = load_source(source, with_tensors=True)
        config, tables = runnable(loaded)
        self.config = as_stored(config)
        self.weights = Weights(config, tables, where=loaded.located.where, as_stored=True)

    @torch.no_grad()
    def logits(self, ids_BT: Tensor, image: Tiles | None = None) -> Tensor:
        """Logits [B, T, V] in fp32; one module's weights are in memory at a time.

        Args: image: stands in the middle of the ids, which its own join.
        """
        with torch.device("meta"):
            model = Decoder(self.config, images=image is not None)
        cpu, middle = torch.device("cpu"), ids_BT.shape[1] // 2
        self._fill(model, "embed_tokens")
        features_SD = None
        if image is not None:
            features_SD = self._features(model, image)
            assert self.config.vision is not None
            if model.has_cross_layers:
                place_BS = torch.tensor([[self.config.vision.image_token_id]])
            else:
                place_BS = torch.zeros(1, len(features_SD), dtype=torch.long)  # overwritten below
            ids_BT = torch.cat((ids_BT[:, :middle], place_BS, ids_BT[:, middle:]), dim=1)
        T = ids_BT.shape[1]
        x_BTD = model.embed(ids_BT)
        if features_SD is not None and not model.has_cross_layers:
            x_BTD[0, middle : middle + len(features_SD)] = features_SD
        rotation = model.rope.rotation(0, T, length=T, dtype=x_BTD.dtype, device=cpu)
        for spec in model.plan:
            name = f"layers.{spec.index}"
            block = model.layers[str(spec.index)] if spec.attention != "cross" or image else None
            if block is None:
                continue
            self._fill(model, name)
            if isinstance(block, CrossBlock):
                assert features_SD is not None
                cache = KVCache([spec], T, max_image_tokens=len(features_SD))
                layer = cache.layers[spec.index]
                assert isinstance(layer, CrossLayerCache)
                seen = cache.add_image(middle, len(features_SD))
                layer.write(seen, *block.cross_attn.keys_and_values(features_SD[None]))
                x_BTD = block(x_BTD, layer, cache.images, 0, T)
            else:
                x_BTD = block(x_BTD, rotation, KVCache([spec], T).layers[spec.index], 0, T)
            self._drop(model, name)
        self._fill(model, "norm")
        if not self.config.tie_word_embeddings:
            self._fill(model, "lm_head")
        return model.logits(x_BTD)

    def _features(self, model: Decoder, image: Tiles) -> Tensor:
        """What the tower makes of the image; one block's weights are in memory at a time."""
        blocks = {
            name: module for name, module in model.named_modules() if isinstance(module, TowerBlock)
        }
        for name, block in blocks.items():
            block.register_forward_pre_hook(lambda *_, name=name: self._fill(model, name))
            block.register_forward_hook(lambda *_, name=name: self._drop(model, name))
        for tower in ("vision_model", "multi_modal_projector"):
            module = model.get_submodule(tower)
            for parameter, _ in list(module.named_parameters()):
                name = f"{tower}.{parameter}"
                if not any(name.startswith(block + ".") for block in blocks):
                    assign(model, name, self.weights.read(name, torch.float32))
        features_SD = model.features(image)
        self._drop(model, "vision_model")
        self._drop(model, "multi_modal_projector")
        return features_SD

    def _fill(self, model: Decoder, name: str) -> None:
        module = model.get_submodule(name)
        self.weights.fill(module, name + ".", torch.float32, torch.device("cpu"))

    def _drop(self, model: Decoder, name: str) -> None:
        module = model.get_submodule(name)
        for parameter, tensor in list(module.named_parameters()):
            assign(module, parameter, torch.empty_like(tensor, device="meta"))


def _random_image(
    first: ModelConfig, second: ModelConfig, generator: torch.Generator
) -> Tiles | None:
    """Noise of two tiles and, where there is one, the global tile; None if one side is blind."""
    vision, other = first.vision, second.vision
    if vision is None or other is None:
        return None
    shape = ("kind", "image_size", "patch_size", "num_channels")
    if any(getattr(vision, name) != getattr(other, name) for name in shape):
        return None
    num_tiles = 2 if first.cross_attention_layers else 3
    size = (num_tiles, vision.num_channels, vision.image_size, vision.image_size)
    return Tiles(torch.randn(size, generator=generator), (1, 2))


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
