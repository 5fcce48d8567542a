"""Makes the Hugging Face folder of a trained pocket model.

    python tools/pocket/export.py pocket build/pocket llamatool/pocket/pocket --window 65536

`pocket` becomes llama4_text: the pairs of RoPE lie beside each other there, so rows of q and k are
reordered, and the feed-forward has another name. `pocket-rope` becomes llama as it is.
"""

import argparse
import json
from pathlib import Path

import torch
import vocabulary
from network import Shape
from safetensors.torch import save_file

from llamatool.tokenizers import tiktoken
from llamatool.tokenizers.convert import tiktoken_to_json, tokenizer_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=("pocket", "pocket-rope"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--window", type=int, required=True, help="max_position_embeddings")
    args = parser.parse_args()
    saved = torch.load(args.source / "checkpoint.pt")
    shape = Shape(**saved["settings"]["shape"])
    args.target.mkdir(parents=True, exist_ok=True)
    bos = saved["settings"]["num_tokens"] - 2
    is_llama4 = shape.chunk is not None
    make_config = llama4_config if is_llama4 else llama_config
    _write(args.target / "config.json", make_config(shape, args.window, bos))
    _write(
        args.target / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": bos + 1, "do_sample": True, "temperature": 0.7},
    )
    tensors = {
        f"model.{name}": tensor.to(torch.bfloat16).contiguous()
        for name, tensor in named_tensors(saved["weights"], shape).items()
    }
    note = {key: str(saved["settings"][key]) for key in ("num_steps", "torch", "python")}
    save_file(tensors, args.target / "model.safetensors", {"format": "pt", **note})
    _write_tokenizer(args.source / "tokenizer.model", args.target, args.window)


def named_tensors(weights: dict[str, torch.Tensor], shape: Shape) -> dict[str, torch.Tensor]:
    """The tensors as the target layout names and orders them."""
    if shape.chunk is None:
        return dict(weights)
    named = {}
    for name, tensor in weights.items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        is_rotated = name.endswith(("q_proj.weight", "k_proj.weight"))
        if is_rotated and layer is not None and not shape.is_global(layer):
            tensor = _interleaved(tensor, shape.head_dim)
        named[name.replace(".mlp.", ".feed_forward.")] = tensor
    return named


def _interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows i and i + head_dim / 2 of every head become rows 2i and 2i + 1."""
    halves = weight.view(-1, 2, head_dim // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def llama4_config(shape: Shape, window: int, bos: int) -> dict[str, object]:
    return {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        **_common(shape, window, bos),
        "intermediate_size_mlp": shape.intermediate_size,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_chunk_size": shape.chunk,
        "no_rope_layers": [int(not shape.is_global(i)) for i in range(shape.num_layers)],
        "attn_temperature_tuning": True,
        "floor_scale": shape.floor_scale,
        "attn_scale": shape.attn_scale,
        "use_qk_norm": False,
        "moe_layers": [],
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    }


def llama_config(shape: Shape, window: int, bos: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_common(shape, window, bos),
        "rope_theta": shape.rope_theta,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": shape.rope_factor,
            "low_freq_factor": shape.rope_low,
            "high_freq_factor": shape.rope_high,
            "original_max_position_embeddings": shape.rope_original,
        },
        "mlp_bias": False,
    }


def _common(shape: Shape, window: int, bos: int) -> dict[str, object]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": window,
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": bos + 1,
        "pad_token_id": bos + 1,
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(source: Path, target: Path, window: int) -> None:
    data = source.read_bytes()
    ranks = tiktoken.parse_ranks(data, where=str(source))
    specials = {vocabulary.BOS: len(ranks), vocabulary.EOS: len(ranks) + 1}
    content = tiktoken_to_json(
        ranks, pattern=tiktoken.LLAMA3_PATTERN, specials=specials, bos=vocabulary.BOS
    )
    config = tokenizer_config(specials, bos=vocabulary.BOS, eos=vocabulary.EOS, max_length=window)
    (target / "tokenizer.model").write_bytes(data)
    _write(target / "tokenizer.json", content, indent=None)
    _write(target / "tokenizer_config.json", config)


def _write(path: Path, content: object, indent: int | None = 2) -> None:
    text = json.dumps(content, ensure_ascii=False, indent=indent)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
