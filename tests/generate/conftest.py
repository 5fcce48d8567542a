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
    """The same weights in transformers, read from the GGUF by transformers itself."""
    import json

    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    data = Path(__file__).parent.parent / "data" / "configs" / "smollm2-135m-instruct.json"
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**json.loads(data.read_text()))
    ).eval()
    loaded = load_gguf_checkpoint(smollm_file(), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model
