"""Tiny random models of transformers, and the same weights in llamatool's decoder."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from llamatool.config.huggingface import parse_huggingface
from llamatool.model.decoder import Decoder

VOCAB_SIZE = 97

# H = 8, K = 4 and head_dim 8: neither K = H nor H / K = K, and no permutation is its own inverse.
DENSE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
    "initializer_range": 0.12,
}
# Five chunks of 8 in 40 tokens; the temperature rises every 8 positions.
MIXED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "attention_chunk_size": 8,
    "floor_scale": 8,
    "attn_scale": 0.1,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 1,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Tiny:
    """A kind of model: which class of transformers, and what its config says."""

    name: str
    cls: str  # Llama, Mistral, Qwen2, Qwen3, Llama4
    fields: dict[str, Any]
    num_tokens: int = 40

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Any, Decoder]:
        """Transformers' model and ours, with the same random weights."""
        import transformers

        config_name = "Llama4TextConfig" if self.cls == "Llama4" else f"{self.cls}Config"
        config = getattr(transformers, config_name)(**self.fields)
        torch.manual_seed(seed)
        theirs = getattr(transformers, f"{self.cls}ForCausalLM")(config).eval()
        for name, parameter in theirs.named_parameters():
            # Norms of one and biases of zero would hide where they are applied.
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
            # Not theirs.to(dtype): that would round the rope frequencies, a buffer, as well.
            parameter.data = parameter.data.to(dtype)
        return theirs, same_weights(theirs)

    def ids(self, batch_size: int = 2, seed: int = 1) -> torch.Tensor:
        """Random token ids, [batch_size, num_tokens]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(VOCAB_SIZE, (batch_size, self.num_tokens), generator=generator)


def same_weights(theirs: Any) -> Decoder:
    """Llamatool's decoder for a model of transformers, sharing its tensors."""
    config = parse_huggingface(theirs.config.to_dict(), where="a test")
    with torch.device("meta"):
        ours = Decoder(config)
    names = set(ours.state_dict())
    state = {}
    for name, tensor in theirs.state_dict().items():
        name = name.removeprefix("model.").replace(".feed_forward.", ".mlp.")
        if name in names or not config.tie_word_embeddings:
            state[name] = tensor
    ours.load_state_dict(state, assign=True)
    return ours.requires_grad_(False)


def their_cache(output: Any) -> dict[str, Any]:
    """What to give to transformers' forward to continue after `output`."""
    from transformers import LlamaForCausalLM

    # transformers 5.24 renamed the argument.
    renamed = "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    if output is None:
        return {"use_cache": True}
    return {"cache": output.cache} if renamed else {"past_key_values": output.past_key_values}


def rope(rope_type: str, theta: float = 10000.0, **fields: Any) -> dict[str, Any]:
    """DENSE with a rope of this type."""
    return {
        **DENSE,
        "head_dim": 32,  # 16 frequencies, so that every band of a scaling has some
        "rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **fields},
    }


LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

SHORT_FACTORS = [1.0 + 0.1 * i for i in range(16)]
LONG_FACTORS = [2.0 + i for i in range(16)]

KINDS = [
    Tiny("gqa", "Llama", DENSE),
    Tiny("mha", "Llama", {**DENSE, "num_key_value_heads": 8}),
    Tiny("mqa", "Llama", {**DENSE, "num_key_value_heads": 1}),
    Tiny("explicit-head-dim", "Llama", {**DENSE, "head_dim": 24}),
    Tiny("biases", "Llama", {**DENSE, "attention_bias": True, "mlp_bias": True}),
    Tiny("tied", "Llama", {**DENSE, "tie_word_embeddings": True}),
    Tiny("eps", "Llama", {**DENSE, "rms_norm_eps": 0.01}),
    Tiny("code-llama-theta", "Llama", rope("default", 1e6), 150),
    # Every scaled rope reads beyond the original context.
    Tiny("rope-linear", "Llama", rope("linear", factor=4.0), 150),
    Tiny("rope-dynamic", "Llama", rope("dynamic", factor=4.0), 150),
    Tiny(
        "rope-yarn",
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=32),
        150,
    ),
    Tiny(
        "rope-longrope-short",
        "Llama",
        rope(
            "longrope",
            factor=4.0,
            original_max_position_embeddings=32,
            short_factor=SHORT_FACTORS,
            long_factor=LONG_FACTORS,
        ),
        30,
    ),
    Tiny(
        "rope-longrope-long",
        "Llama",
        rope(
            "longrope",
            factor=4.0,
            original_max_position_embeddings=32,
            short_factor=SHORT_FACTORS,
            long_factor=LONG_FACTORS,
        ),
        150,
    ),
    Tiny("rope-llama3", "Llama", rope("llama3", 5e5, **LLAMA3_ROPE), 300),
    Tiny(
        "llama-3.2-like",
        "Llama",
        {**rope("llama3", 5e5, **{**LLAMA3_ROPE, "factor": 32.0}), "tie_word_embeddings": True},
        300,
    ),
    Tiny("mistral-sliding", "Mistral", {**DENSE, "sliding_window": 8}),
    Tiny("mistral-no-window", "Mistral", {**DENSE, "sliding_window": None}),
    Tiny("qwen2", "Qwen2", DENSE),
    Tiny(
        "qwen2-sliding-from-layer-1",
        "Qwen2",
        {**DENSE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    Tiny("qwen3", "Qwen3", {**DENSE, "head_dim": 16}),
    Tiny("scout", "Llama4", {**MIXED, "use_qk_norm": True}),
    Tiny(
        "scout-rope",
        "Llama4",
        {
            **MIXED,
            "rope_parameters": {
                **LLAMA3_ROPE,
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "high_freq_factor": 1.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    Tiny(
        "maverick",
        "Llama4",
        {
            **MIXED,
            "use_qk_norm": False,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 8,
        },
    ),
    Tiny("two-experts-per-token", "Llama4", {**MIXED, "num_experts_per_tok": 2}),
    Tiny("no-experts", "Llama4", {**MIXED, "moe_layers": []}),
    Tiny("explicit-rope-layers", "Llama4", {**MIXED, "no_rope_layers": [1, 0, 0, 1, 1]}),
    Tiny("default-rope-layers", "Llama4", {**MIXED, "no_rope_layers": []}),
    Tiny("no-temperature", "Llama4", {**MIXED, "attn_temperature_tuning": False}),
    Tiny(
        "chunk-null",
        "Llama4",
        # transformers itself cannot run a null chunk size; a chunk beyond the prompt is the same.
        {**MIXED, "attention_chunk_size": 4096},
    ),
]
BY_NAME = {kind.name: kind for kind in KINDS}
