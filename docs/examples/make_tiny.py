"""Writes a tiny random Llama, for examples that need a folder with weights."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from llamatool.checkpoint.names import expected_tensors
from llamatool.config.huggingface import parse_huggingface

values = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "torch_dtype": "float32",
}
folder = Path(sys.argv[1])
folder.mkdir()
(folder / "config.json").write_text(json.dumps(values))
torch.manual_seed(0)
shapes = expected_tensors(parse_huggingface(values, where="this example"))
tensors = {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}
save_file(tensors, folder / "model.safetensors")
