import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data"
CONFIGS = sorted((DATA / "configs").glob("*.json"))
PARAMS = sorted((DATA / "params").glob("*.json"))
GOLDEN: dict[str, Any] = json.loads((DATA / "golden.json").read_text())

# Code Llama's files have no vocabulary; these are the rows of its embeddings.
CODE_ROWS = {"codellama-7b": 32016, "codellama-13b": 32016, "codellama-34b": 32000}


def config_values(name: str) -> dict[str, Any]:
    return json.loads((DATA / "configs" / f"{name}.json").read_text())


def params_values(name: str) -> dict[str, Any]:
    return json.loads((DATA / "params" / f"{name}.json").read_text())


def llama(**changes: Any) -> dict[str, Any]:
    """A small, complete config.json with `changes`; a value of ... leaves the key out."""
    values = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    values.update(changes)
    return {key: value for key, value in values.items() if value is not ...}


def llama4(**changes: Any) -> dict[str, Any]:
    values = llama(
        model_type="llama4_text",
        intermediate_size_mlp=256,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=8,
        head_dim=16,
    )
    values.update(changes)
    return {key: value for key, value in values.items() if value is not ...}
