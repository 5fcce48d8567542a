"""The cache against transformers' own: its static cache, laid out on the meta device."""

import json
from pathlib import Path

import pytest

from llamatool.config.huggingface import parse_huggingface
from llamatool.config.layers import plan_layers
from llamatool.sizing.kv_cache import kv_cache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DATA = Path(__file__).parent.parent / "data"
MODELS = json.loads((DATA / "golden.json").read_text())["models"]


def bytes_of_transformers(values: dict, num_tokens: int, batch_size: int) -> int:
    """Bytes of the keys and values that transformers allocates for that length, without data."""
    kind = transformers.CONFIG_MAPPING[values["model_type"]]
    config = kind.from_dict(values).get_text_config()
    cache = transformers.StaticCache(config=config, max_cache_len=num_tokens)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    cache.early_initialization(
        batch_size, config.num_key_value_heads, head_dim, torch.bfloat16, torch.device("meta")
    )
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.parametrize("num_tokens", [1_000, 8_192, 100_000])
@pytest.mark.parametrize(
    "model",
    [
        "llama-1-30b",
        "llama-2-7b",
        "llama-3.1-8b",
        "llama-3.1-405b-instruct",
        "llama-3.2-1b",
        "smollm2-135m-instruct",
        "open-llama-3b",
        "mistral-7b-v0.1",
        "qwen3-8b",
        "llama-4-scout-17b-16e-instruct",
        "llama-4-maverick-17b-128e",
    ],
)
def test_bytes_are_those_that_transformers_allocates(model: str, num_tokens: int) -> None:
    values = json.loads((DATA / MODELS[model]["config"]).read_text())
    ours = kv_cache(plan_layers(parse_huggingface(values, where=model)))
    expected = bytes_of_transformers(values, num_tokens, batch_size=3)
    assert ours.num_bytes(num_tokens, batch_size=3) == expected
