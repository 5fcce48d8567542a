"""The decoder: embedding, layers, norm, logits. What each layer is stands in the layer plan.

Images come in by one of two ways, and the plan says which. Where it has cross-attention layers,
an image is one token, and those layers look at its features; else its features take the place of
the embeddings of as many tokens (model/cross.py, docs/vision.md).

Letters: B batch, T tokens given, Q positions that logits are asked for, D hidden_size,
V vocab_size, S image tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from llamatool.config.layers import LayerSpec, plan_layers
from llamatool.config.model import ModelConfig
from llamatool.errors import InputError, UnsupportedError
from llamatool.model.attention import Attention
from llamatool.model.cache import CrossLayerCache, KVCache, LayerCache
from llamatool.model.cross import CrossBlock
from llamatool.model.images import Tiles
from llamatool.model.linear import Embedding, Linear
from llamatool.model.mlp import SwiGLU
from llamatool.model.moe import MixtureOfExperts
from llamatool.model.norm import RMSNorm
from llamatool.model.ranks import Ranks
from llamatool.model.rope import RotaryEmbedding, Rotation
from llamatool.model.vision import tower_of

PREFILL_PIECE = 2048  # tokens read at once; activations grow with it, not with the prompt


class Decoder(nn.Module):
    """A decoder of the Llama kind, for text and, where it is built with its tower, for images.

    Build it with `llamatool.load_model`, or on the meta device with `Decoder(config)` and weights
    of your own. It holds no state between calls: a KVCache does.
    """

    def __init__(self, config: ModelConfig, *, images: bool = False) -> None:
        """The modules, without weights in them.

        Args: images: builds the image tower and the cross-attention layers, too.
        Raises: UnsupportedError if the configuration asks for arithmetic that is not here.
        """
        super().__init__()
        _require_supported(config)
        self.config = config
        self.plan = plan_layers(config)  # of what is here: on a rank, of its part
        self.ranks: Ranks | None = None  # set where the model is shared (model/parallel.py)
        self.num_on_host = 1  # ranks that take alike shares of this machine's memory
        self.rope = RotaryEmbedding(config)
        self.embed_tokens = Embedding(config.embedding_rows, config.hidden_size)
        # Named by index: without images, cross-attention layers are not built, but have numbers.
        self.layers = nn.ModuleDict(
            {
                str(spec.index): _block(spec, config)
                for spec in self.plan
                if images or spec.attention != "cross"
            }
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # None: the embedding table makes the logits, too.
        self.lm_head: nn.Module | None = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.has_tower = images
        self.has_cross_layers = any(spec.attention == "cross" for spec in self.plan)
        if images:
            self.vision_model, self.multi_modal_projector = tower_of(config)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and activations."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where ids and images go in: of a model on one device, where all weights are."""
        return self.embed_tokens.weight.device

    @property
    def logits_device(self) -> torch.device:
        """Where logits come out."""
        return self.norm.weight.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that hold a part of the model, in the order in which a token meets them."""
        layers = (device_of(block) for block in self.layers.values())
        return tuple(dict.fromkeys((self.device, *layers, self.logits_device)))

    @property
    def plan_by_device(self) -> dict[torch.device, list[LayerSpec]]:
        """What the layers that were built are, by the device that holds them."""
        found: dict[torch.device, list[LayerSpec]] = {}
        for spec in self.plan:
            if str(spec.index) in self.layers:
                device = device_of(self.layers[str(spec.index)])
                found.setdefault(device, []).append(spec)
        return found

    def new_cache(
        self,
        max_tokens: int,
        *,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
        images: Sequence[Tiles] = (),
    ) -> KVCache:
        """An empty cache for `max_tokens` tokens and these images, each layer's beside it."""
        return KVCache(
            self.plan,
            max_tokens,
            batch_size=batch_size,
            dtype=self.dtype if dtype is None else dtype,
            device={int(index): device_of(block) for index, block in self.layers.items()},
            max_image_tokens=sum(map(self.num_cross_tokens, images)),
        )

    def num_cross_tokens(self, image: Tiles) -> int:
        """Positions of `image` in each cross-attention layer's cache; 0 where there are none.

        Example: Llama 3.2 11B Vision, an image of two tiles -> 3202.
        """
        return self.vision_model.num_tokens(image) if self.has_cross_layers else 0

    @torch.no_grad()
    def forward(
        self,
        ids_BT: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        logits_to_keep: int | None = 1,
        embeddings_BTD: Tensor | None = None,
    ) -> Tensor:
        """Logits in fp32, [B, Q, V], of the last Q = `logits_to_keep` of the tokens given.

        The tokens continue what `cache` holds, at positions cache.length, cache.length + 1, ...,
        and are added to it; without a cache they stand alone. Rows are of equal length, without
        padding.

        Args:
        ids_BT: token ids, integers, [B, T].
        logits_to_keep: positions to answer for, from the end; None for all of them, 0 for none.
            The last layer computes queries for these alone.
        embeddings_BTD: vectors in place of ids, [B, T, D] (where images stand among the tokens).

        Raises: InputError if an id has no row in the embedding; ValueError if the cache has no
        room.
        Example: Llama 3.1 8B, ids of shape [1, 12] -> logits of shape [1, 1, 128256].
        """
        x_BTD = self._inputs(ids_BT, embeddings_BTD)
        B, T = x_BTD.shape[:2]
        cache = self.new_cache(max(T, 1), batch_size=B) if cache is None else cache
        cache.require_room(B, T)
        keep = T if logits_to_keep is None else min(max(logits_to_keep, 0), T)
        start = cache.length
        cache.rope_length = max(cache.rope_length, start + T)
        rotation = None
        last = len(self.layers) - 1
        for number, (index, block) in enumerate(self.layers.items()):
            device = device_of(block)
            if rotation is None or device != x_BTD.device:
                x_BTD = x_BTD.to(device)
                rotation = self.rope.rotation(
                    start, T, length=cache.rope_length, dtype=x_BTD.dtype, device=device
                )
            queries = T if number < last else keep
            if isinstance(block, CrossBlock):
                x_BTD = _across(block, x_BTD, cache, int(index), start, queries)
            else:
                x_BTD = block(x_BTD, rotation, cache.layers[int(index)], start, queries)
        cache.advance(T)
        return self.logits(x_BTD)

    def prefill(
        self,
        ids_BT: Tensor,
        cache: KVCache,
        *,
        piece: int = PREFILL_PIECE,
        logits_to_keep: int = 1,
        images: Sequence[Tiles] = (),
    ) -> Tensor:
        """Reads a prompt of any length piece by piece; logits as `forward`, [B, Q, V].

        Activations are those of one piece (of two at most, where the last is shorter than
        `logits_to_keep`). Pieces end at multiples of `piece` positions, so that
        a chunk border of an attention chunk falls on them and no mask is needed there.

        Args: images: those that the image tokens of the prompt stand for, in their order.
        Raises: as `forward`; ValueError if `logits_to_keep` exceeds a piece; InputError if the
        prompt has another number of image tokens than the images need.
        """
        T = ids_BT.shape[1]
        if not 0 <= logits_to_keep <= piece:
            raise ValueError(f"logits of {logits_to_keep} positions from pieces of {piece} tokens")
        cache.require_room(ids_BT.shape[0], T)
        # Scaling that depends on the length sees the whole prompt from the first piece on.
        cache.rope_length = max(cache.rope_length, cache.length + T)
        fused_SD = self._see(ids_BT, images, cache) if images else None
        borders = range(piece - cache.length % piece, T - max(logits_to_keep, 1) + 1, piece)
        first = 0
        for border in borders:
            self._read(ids_BT, first, border, cache, 0, fused_SD)
            first = border
        return self._read(ids_BT, first, T, cache, logits_to_keep, fused_SD)

    @torch.no_grad()
    def features(self, image: Tiles) -> Tensor:
        """What the tower makes of an image, in the decoder's width: [S, D].

        Example: Llama 3.2 11B Vision, two tiles of 560 px -> [3202, 4096]; Llama 4 Scout, two
        tiles and the global one -> [432, 5120].
        Raises: UnsupportedError if the model was built or loaded without its tower.
        """
        if not self.has_tower:
            raise UnsupportedError(
                "this model was loaded without its image tower"
                if self.config.vision is not None
                else "this model reads no images"
            )
        pixels_NCHW = image.pixels_NCHW.to(self.device, self.dtype)
        features_SO = self.vision_model(Tiles(pixels_NCHW, image.grid))
        features_SD: Tensor = self.multi_modal_projector(features_SO)
        return features_SD

    def _see(self, ids_BT: Tensor, images: Sequence[Tiles], cache: KVCache) -> Tensor | None:
        """Features to put in the place of image tokens; None where cross-attention layers see.

        In that case their keys and values are in the cache afterwards.
        """
        if len(ids_BT) != 1:
            raise ValueError(f"images in a batch of {len(ids_BT)} rows: one row at a time")
        vision = self.config.vision
        features = [self.features(image) for image in images]  # says so if there is no tower
        assert vision is not None
        places = (ids_BT[0] == vision.image_token_id).nonzero().flatten().tolist()
        needed = len(images) if self.has_cross_layers else sum(map(len, features))
        if len(places) != needed:
            raise InputError(
                f"{len(images)} images need {needed:,} image tokens, and the prompt has"
                f" {len(places):,}"
            )
        if not self.has_cross_layers:
            return torch.cat(features)
        for place, features_SD in zip(places, features, strict=True):
            image = cache.add_image(cache.length + place, len(features_SD))
            for index, block in self.layers.items():
                if isinstance(block, CrossBlock):
                    layer = cache.layers[int(index)]
                    assert isinstance(layer, CrossLayerCache)
                    features_SD = features_SD.to(device_of(block))
                    layer.write(image, *block.cross_attn.keys_and_values(features_SD[None]))
        return None

    def _read(
        self,
        ids_BT: Tensor,
        first: int,
        stop: int,
        cache: KVCache,
        keep: int,
        fused_SD: Tensor | None,
    ) -> Tensor:
        """Reads the tokens `first` to `stop` of a prompt, with features among them or not."""
        given = {"ids_BT": ids_BT[:, first:stop]}
        if fused_SD is not None:
            assert self.config.vision is not None
            is_image_T = ids_BT[0] == self.config.vision.image_token_id
            used = int(is_image_T[:first].sum())
            here_N = is_image_T[first:stop].to(self.device)
            embeddings_BND = self.embed(ids_BT[:, first:stop])
            embeddings_BND[0, here_N] = fused_SD[used : used + int(here_N.sum())]
            given = {"embeddings_BTD": embeddings_BND}
        logits_BQV: Tensor = self(**given, cache=cache, logits_to_keep=keep)
        return logits_BQV

    def embed(self, ids_BT: Tensor) -> Tensor:
        """The vectors of `ids_BT`, [B, T, D].

        Raises: InputError if an id has no row: a GPU would stop with an assertion that names
        nothing, and every later call would fail.
        """
        ids_BT = ids_BT.long()
        rows = self.config.embedding_rows
        if ids_BT.numel() and not ids_BT.is_meta:
            low, high = (int(bound) for bound in ids_BT.aminmax())
            if low < 0 or high >= rows:
                raise InputError(
                    f"token id {low if low < 0 else high} has no embedding: there are {rows}",
                    hint="the tokenizer and the weights are not of one model",
                )
        embeddings_BTD: Tensor = self.embed_tokens(ids_BT.to(self.device))
        return embeddings_BTD

    def logits(self, x_BQD: Tensor) -> Tensor:
        """Logits in fp32, [B, Q, V], of the last layer's outputs."""
        x_BQD = self.norm(x_BQD.to(self.logits_device))
        if self.lm_head is None:
            num_rows = self.config.embedding_rows
            table_VD = self.embed_tokens.weight[: self.config.vocab_size]
            logits_BQV = nn.functional.linear(x_BQD, table_VD)
        else:
            num_rows = self.config.vocab_size
            logits_BQV = self.lm_head(x_BQD)
        if self.ranks is not None:
            logits_BQV = self.ranks.join(logits_BQV, num_rows)[..., : self.config.vocab_size]
        return logits_BQV.float()

    def _inputs(self, ids_BT: Tensor | None, embeddings_BTD: Tensor | None) -> Tensor:
        if (ids_BT is None) == (embeddings_BTD is None):
            raise ValueError("give either ids or embeddings")
        if ids_BT is not None:
            return self.embed(ids_BT)
        assert embeddings_BTD is not None
        return embeddings_BTD.to(self.device, self.dtype)


def device_of(block: nn.Module) -> torch.device:
    """Where a layer of the decoder is, however its matrices are laid out."""
    assert isinstance(block, Block | CrossBlock)
    return block.input_layernorm.weight.device


def _block(spec: LayerSpec, config: ModelConfig) -> nn.Module:
    if spec.attention == "cross":
        return CrossBlock(spec, config.hidden_size, config.rms_norm_eps)
    return Block(spec, config)


def _across(
    block: CrossBlock, x_BND: Tensor, cache: KVCache, index: int, start: int, num_queries: int
) -> Tensor:
    """A cross-attention layer; without images it is as if it were not there."""
    layer = cache.layers.get(index)
    if not cache.images or not isinstance(layer, CrossLayerCache):
        return x_BND[:, x_BND.shape[1] - num_queries :]
    out_BTD: Tensor = block(x_BND, layer, cache.images, start, num_queries)
    return out_BTD


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then that + feed-forward(norm(that))."""

    def __init__(self, spec: LayerSpec, config: ModelConfig) -> None:
        super().__init__()
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.self_attn = Attention(spec, hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        if spec.moe is None:
            self.mlp: nn.Module = SwiGLU(hidden_size, spec.intermediate_size, spec.mlp_bias)
        else:
            self.mlp = MixtureOfExperts(spec.moe, hidden_size, spec.intermediate_size)

    def forward(
        self, x_BND: Tensor, rotation: Rotation, cache: LayerCache, start: int, num_queries: int
    ) -> Tensor:
        """The layer's output for the last `num_queries` of the tokens, [B, num_queries, D]."""
        read_BTD = self.self_attn(self.input_layernorm(x_BND), rotation, cache, start, num_queries)
        if not num_queries:
            return x_BND[:, :0]
        x_BTD = x_BND[:, x_BND.shape[1] - num_queries :] + read_BTD
        fed_BTD: Tensor = self.mlp(self.post_attention_layernorm(x_BTD))
        out_BTD: Tensor = x_BTD + fed_BTD
        return out_BTD


def require_finite(logits_BQV: Tensor, dtype: torch.dtype) -> None:
    """Checks logits for infinities and nan, which float16 activations of some models reach.

    Raises: UnsupportedError that says so.
    """
    if not bool(torch.isfinite(logits_BQV).all()):
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedError(
            f"logits are not finite: activations overflow in {name}, or the weights are damaged",
            hint="run it in bfloat16 or float32" if name == "float16" else None,
        )


def _require_supported(config: ModelConfig) -> None:
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedError(
            f"`hidden_act` is `{config.hidden_act[:80]}`: only silu is implemented",
        )
