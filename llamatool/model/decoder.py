"""The decoder: embedding, layers, norm, logits. What each layer is stands in the layer plan.

Letters: B batch, T tokens given, Q positions that logits are asked for, D hidden_size,
V vocab_size.
"""

import torch
from torch import Tensor, nn

from llamatool.config.layers import LayerSpec, plan_layers
from llamatool.config.model import ModelConfig
from llamatool.errors import InputError, UnsupportedError
from llamatool.model.attention import Attention
from llamatool.model.cache import KVCache, LayerCache
from llamatool.model.linear import Embedding, Linear
from llamatool.model.mlp import SwiGLU
from llamatool.model.moe import MixtureOfExperts
from llamatool.model.norm import RMSNorm
from llamatool.model.rope import RotaryEmbedding, Rotation

PREFILL_PIECE = 2048  # tokens read at once; activations grow with it, not with the prompt


class Decoder(nn.Module):
    """A decoder of the Llama kind, for text.

    Build it with `llamatool.load_model`, or on the meta device with `Decoder(config)` and weights
    of your own. It holds no state between calls: a KVCache does.
    """

    def __init__(self, config: ModelConfig) -> None:
        """The modules, without weights in them.

        Raises: UnsupportedError if the configuration asks for arithmetic that is not here.
        """
        super().__init__()
        _require_supported(config)
        self.config = config
        self.plan = plan_layers(config)
        self.rope = RotaryEmbedding(config)
        self.embed_tokens = Embedding(config.embedding_rows, config.hidden_size)
        # Named by index, because cross-attention layers have numbers too and are not built: a
        # prompt of text alone skips them.
        self.layers = nn.ModuleDict(
            {
                str(spec.index): Block(spec, config)
                for spec in self.plan
                if spec.attention != "cross"
            }
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # None: the embedding table makes the logits, too.
        self.lm_head: nn.Module | None = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and activations."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.weight.device

    def new_cache(
        self, max_tokens: int, *, batch_size: int = 1, dtype: torch.dtype | None = None
    ) -> KVCache:
        """An empty cache for `max_tokens` tokens, on the model's device."""
        return KVCache(
            self.plan,
            max_tokens,
            batch_size=batch_size,
            dtype=self.dtype if dtype is None else dtype,
            device=self.device,
        )

    @torch.no_grad()
    def forward(
        self,
        ids_BT: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        logits_to_keep: int | None = 1,
        embeddings_BTD: Tensor | None = None,
        vision_BSD: Tensor | None = None,
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
        vision_BSD: image tokens for cross-attention layers; not there yet.

        Raises: InputError if an id has no row in the embedding; ValueError if the cache has no
        room; UnsupportedError for `vision_BSD`.
        Example: Llama 3.1 8B, ids of shape [1, 12] -> logits of shape [1, 1, 128256].
        """
        if vision_BSD is not None:
            raise UnsupportedError("cross-attention to images is not there yet: text only")
        x_BTD = self._inputs(ids_BT, embeddings_BTD)
        B, T = x_BTD.shape[:2]
        cache = self.new_cache(max(T, 1), batch_size=B) if cache is None else cache
        cache.require_room(B, T)
        keep = T if logits_to_keep is None else min(max(logits_to_keep, 0), T)
        start = cache.length
        cache.rope_length = max(cache.rope_length, start + T)
        rotation = self.rope.rotation(
            start, T, length=cache.rope_length, dtype=x_BTD.dtype, device=x_BTD.device
        )
        last = len(self.layers) - 1
        for number, (index, block) in enumerate(self.layers.items()):
            queries = T if number < last else keep
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
    ) -> Tensor:
        """Reads a prompt of any length piece by piece; logits as `forward`, [B, Q, V].

        Activations are those of one piece (of two at most, where the last is shorter than
        `logits_to_keep`). Pieces end at multiples of `piece` positions, so that
        a chunk border of an attention chunk falls on them and no mask is needed there.

        Raises: as `forward`; ValueError if `logits_to_keep` exceeds a piece.
        """
        T = ids_BT.shape[1]
        if not 0 <= logits_to_keep <= piece:
            raise ValueError(f"logits of {logits_to_keep} positions from pieces of {piece} tokens")
        cache.require_room(ids_BT.shape[0], T)
        # Scaling that depends on the length sees the whole prompt from the first piece on.
        cache.rope_length = max(cache.rope_length, cache.length + T)
        borders = range(piece - cache.length % piece, T - max(logits_to_keep, 1) + 1, piece)
        first = 0
        for border in borders:
            self(ids_BT[:, first:border], cache=cache, logits_to_keep=0)
            first = border
        logits_BQV: Tensor = self(ids_BT[:, first:], cache=cache, logits_to_keep=logits_to_keep)
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
        x_BQD = self.norm(x_BQD)
        if self.lm_head is None:
            table_VD = self.embed_tokens.weight[: self.config.vocab_size]
            return nn.functional.linear(x_BQD, table_VD).float()
        logits_BQV: Tensor = self.lm_head(x_BQD)
        return logits_BQV.float()

    def _inputs(self, ids_BT: Tensor | None, embeddings_BTD: Tensor | None) -> Tensor:
        if (ids_BT is None) == (embeddings_BTD is None):
            raise ValueError("give either ids or embeddings")
        if ids_BT is not None:
            return self.embed(ids_BT)
        assert embeddings_BTD is not None
        return embeddings_BTD.to(self.device, self.dtype)


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
