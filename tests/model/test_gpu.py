"""On a GPU the same model gives the same logits as on the CPU."""

from pathlib import Path

import pytest
import torch

from llamatool.model.load import free_memory, load_model
from tests.model.layouts import save_huggingface
from tests.model.tiny_models import BY_NAME

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize(
    "name", ["gqa", "rope-llama3", "mistral-sliding", "qwen2", "scout", "maverick"]
)
def test_logits_and_decoding(name: str, tmp_path: Path) -> None:
    kind = BY_NAME[name]
    theirs, ours = kind.build()
    save_huggingface(theirs, tmp_path)
    model = load_model(tmp_path, device="cuda")
    ids = kind.ids()
    expected = ours(ids, logits_to_keep=None)
    assert (model(ids, logits_to_keep=None).cpu() - expected).abs().max() <= 1e-4
    cache = model.new_cache(kind.num_tokens, batch_size=2)
    model.prefill(ids[:, :13], cache, piece=8)
    for position in range(13, kind.num_tokens):
        logits = model(ids[:, position : position + 1], cache=cache)
        assert (logits.cpu() - expected[:, position : position + 1]).abs().max() <= 1e-4


def test_free_memory_is_the_gpus() -> None:
    free_bytes = free_memory(torch.device("cuda"))
    assert free_bytes is not None
    assert 0 < free_bytes <= torch.cuda.get_device_properties(0).total_memory
