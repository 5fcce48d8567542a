"""What each of some tensor-parallel ranks holds: its weights and its cache, to the byte.

model/parallel.py divides a model in this way, and other engines divide it alike:

  q, k, v, o, gate, up, down, experts   divided: heads and inner widths (config/layers.py)
  k, v with fewer heads than ranks      a whole head on each rank
  vocabulary tables                     ceil(rows / ranks) rows, the last ranks fewer
  image tower                           its heads and inner widths, where they divide
  norms, router, projector, and the biases of what is summed, o and down: whole on each rank
"""

from llamatool.config.layers import LayerSpec, plan_layers, share, split_layers
from llamatool.config.model import ModelConfig
from llamatool.dtypes import by_name
from llamatool.errors import UsageError
from llamatool.records import record
from llamatool.sizing.kv_cache import kv_cache
from llamatool.sizing.parameters import (
    layer_parameters,
    projector_parameters,
    vision_tower_parameters,
)


@record
class RankMemory:
    """Bytes on the fullest of the ranks that share a model: the first."""

    num_ranks: int
    num_tokens: int
    num_parameters: int
    weight_bytes: int
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of weights and cache; activations come on top."""
        return self.weight_bytes + self.kv_bytes


def rank_memory(
    config: ModelConfig,
    num_ranks: int,
    *,
    dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
    num_tokens: int,
    batch_size: int = 1,
    num_images: int = 0,
) -> RankMemory:
    """Bytes that the fullest of `num_ranks` ranks allocates to run a model.

    Args: num_ranks: 1 for a model that is not shared. dtype: of all weights. num_images: in each
    sequence, counted with as many tiles as one may have; with 0 the image tower and the
    cross-attention layers are left out, as the model is then loaded without them.

    Raises: UsageError if the ranks cannot share the model, or a type is unknown.
    Example: Llama 3.1 70B on 2 ranks, 100000 tokens -> weights 70555025408, cache 16384000000.
    """
    element = by_name(dtype)
    if element is None or element.name in ("bool", "complex64"):
        raise UsageError(f"`{dtype}` is no element type of weights")
    parameters = rank_parameters(config, num_ranks, images=num_images > 0)
    cache = kv_cache(
        split_layers(plan_layers(config), num_ranks), dtype=kv_dtype, vision=config.vision
    )
    return RankMemory(
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        num_parameters=parameters,
        weight_bytes=element.num_bytes(parameters),
        kv_bytes=cache.num_bytes(num_tokens, batch_size=batch_size, num_images=num_images),
    )


def rank_parameters(
    config: ModelConfig, num_ranks: int, *, rank: int = 0, images: bool = True
) -> int:
    """Parameters that one of `num_ranks` ranks holds; rank 0 never fewer than another.

    Args: images: with image tower, projector and cross-attention layers, where there are any.
    Raises: UsageError if the ranks cannot share the model.
    Example: Llama 3.1 70B on 2 ranks -> 35277512704, on 1 rank -> 70553706496.
    """
    layers = split_layers(plan_layers(config), num_ranks)
    total = _tables(config, rank, num_ranks) + config.hidden_size  # the last norm
    total += sum(_layer(layer, config) for layer in layers if images or layer.attention != "cross")
    if images and config.vision is not None:
        total += vision_tower_parameters(config.vision, num_ranks)
        total += projector_parameters(config.vision, config.hidden_size)
    return total


def _tables(config: ModelConfig, rank: int, num_ranks: int) -> int:
    sizes = [config.embedding_rows]
    if not config.tie_word_embeddings:
        sizes.append(config.vocab_size)
    shares = [share(num_rows, rank, num_ranks) for num_rows in sizes]
    return config.hidden_size * sum(stop - first for first, stop in shares)


def _layer(layer: LayerSpec, config: ModelConfig) -> int:
    return sum(layer_parameters(layer, config.hidden_size).values())
