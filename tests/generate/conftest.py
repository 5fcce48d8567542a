"""Real tokenizers and a real small model; see tests/tokenizers/conftest.py for where they are."""

from pathlib import Path
from typing import Any

import pytest

from llamatool.generate.text_model import TextModel
from tests.tokenizers.conftest import (  # noqa: F401  # fixtures
    llama2,
    llama3,
    llama4,
    small,
    small_bpe,
    small_file,
    small_json,
    smollm_file,
)


@pytest.fixture(scope="session")
def smollm() -> TextModel:
    """SmolLM2-135M-Instruct from its GGUF, in float32."""
    pytest.importorskip("torch")
    from llamatool.generate.text_model import load_generator

    return load_generator(smollm_file(), device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def theirs() -> Any:
    """The same weights in transformers; tests/model compares the loading with its own reader."""
    import json

    import torch
    import transformers

    from llamatool.model.load import load_model

    data = Path(__file__).parent.parent / "data" / "configs" / "smollm2-135m-instruct.json"
    config = transformers.LlamaConfig(**json.loads(data.read_text()))
    weights = load_model(smollm_file(), device="cpu", dtype="float32").state_dict()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    names = {f"model.{name}": tensor for name, tensor in weights.items()}
    missing, unexpected = model.load_state_dict(names, strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    # Its frequencies are a buffer that no checkpoint holds.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_model(folder: Path, tokenizer_json: bytes, *, template: str | None) -> Path:
    """A random model of 1,003 tokens as a Hugging Face folder, with a chat template or without."""
    import json

    import torch
    from safetensors.torch import save_file

    from llamatool.config.huggingface import parse_huggingface
    from llamatool.model.decoder import Decoder

    fields = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1003, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 1000, "eos_token_id": 1001,
        "torch_dtype": "float32",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.8, "top_p": 0.95, "eos_token_id": [1001, 1002]})
    )
    tokenizer = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>"}}
    if template is not None:
        tokenizer["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer.json").write_bytes(tokenizer_json)
    with torch.device("meta"):
        shapes = Decoder(parse_huggingface(fields, where="a test")).state_dict()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name if name.startswith("lm_head") else f"model.{name}": torch.randn(
            tensor.shape, generator=generator
        )
        * (0.1 if "norm" in name else 0.3)
        for name, tensor in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tiny_chat(small_json: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("tiny") / "tiny-chat"
    return write_tiny_model(folder, small_json, template=TEMPLATE)


@pytest.fixture(scope="session")
def tiny_base(small_json: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    pytest.importorskip("torch")
    return write_tiny_model(
        tmp_path_factory.mktemp("tiny") / "tiny-base", small_json, template=None
    )
