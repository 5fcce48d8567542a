"""Tiny random models of every kind, saved by transformers, and their Meta layouts."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from llamatool import conversion
from llamatool.conversion import ConversionReport, ConvertOptions

HEADS, KV_HEADS, LAYERS = 16, 8, 2  # head_dim 8; the heads, their quotient and the layers differ
DIM = 128


def llama_config(**changes: Any) -> transformers.LlamaConfig:
    values: dict[str, Any] = {
        "hidden_size": DIM,
        "intermediate_size": 192,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.LlamaConfig(**(values | changes))


def save_llama(folder: Path, *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama_config(**changes))
    return saved(model, folder, dtype)


def save_mllama(folder: Path, image_size: int = 28) -> Any:
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 10,
        "cross_attention_layers": [3, 8],
        "vocab_size": 96,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "bos_token_id": 0,
        "pad_token_id": 4,
    }
    vision = {
        "hidden_size": 32,
        "attention_heads": 4,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_global_layers": 2,
        "intermediate_layers_indices": [0, 1],
        "image_size": image_size,
        "patch_size": 14,
        "vision_output_dim": 96,
    }
    config = transformers.MllamaConfig(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.MllamaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.numel() and not parameter.any():  # gates and tables begin as zeros
            parameter.data.normal_()
        if name.endswith("embedding.weight") and "tile" in name:
            _as_tabulated(parameter.data, config.vision_config)
    return saved(model, folder, torch.bfloat16)


def _as_tabulated(table: torch.Tensor, vision: Any) -> None:
    from .oracle import tabulated

    tiles = vision.max_num_tiles
    width = table.shape[1] // tiles
    table.copy_(tabulated(torch.randn(tiles, tiles, width)))


def save_llama4(folder: Path, **changes: Any) -> Any:
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "intermediate_size_mlp": 192,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "vocab_size": 128,
        "attention_chunk_size": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "image_size": 56,
        "patch_size": 14,
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "pixel_shuffle_ratio": 0.5,
    }
    config = transformers.Llama4Config(text_config=text | changes, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Llama4ForConditionalGeneration(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)  # some are created without values
    return saved(model, folder, torch.bfloat16)


def saved(model: Any, folder: Path, dtype: torch.dtype) -> Any:
    for parameter in model.parameters():  # model.to() would cast the complex buffers too
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def rewrite(folder: Path, content: dict[str, torch.Tensor], *, beside: Path | None = None) -> None:
    """Other tensors for a folder, which may take its configuration from another one."""
    if beside is not None:
        folder.mkdir()
        (folder / "config.json").write_bytes((beside / "config.json").read_bytes())
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})


def shards(folder: Path) -> list[dict[str, torch.Tensor]]:
    paths = sorted(folder.glob("consolidated.*.pth"))
    return [torch.load(path, weights_only=True, mmap=True) for path in paths]


def convert(source: Path, destination: Path, **options: Any) -> ConversionReport:
    """A conversion without tokenizer, proven."""
    chosen = ConvertOptions(**({"with_tokenizer": False} | options))
    loaded = conversion.load_weights(str(source))
    conversion.check_destination(loaded, destination, chosen)
    report = conversion.run(conversion.prepare(loaded, chosen), destination, chosen)
    assert report.written.problem is None, report.written.problem
    return report


def load_strictly(folder: Path, model_class: Any) -> Any:
    """The model as transformers loads it, with no key missing or left over."""
    model, info = model_class.from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[kind], (kind, info[kind])
    return model.eval()
