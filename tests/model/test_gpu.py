"""On a GPU the same model gives the same logits as on the CPU."""

from functools import partial
from pathlib import Path

import pytest
import torch

from llamatool.model import load
from llamatool.model.fast import DecodeStep, speed_up
from llamatool.model.load import free_memory, load_model, local_devices
from tests.model.devices import shared_out
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


@pytest.mark.parametrize("name", ["gqa", "tied", "mistral-sliding", "scout", "maverick"])
@pytest.mark.parametrize(
    "devices",
    [
        ["cuda:0", "cpu"],
        pytest.param(
            ["cuda:0", "cuda:1"],
            marks=pytest.mark.skipif(
                torch.cuda.device_count() < 2, reason="there are fewer than two GPUs here"
            ),
        ),
    ],
    ids=" and ".join,
)
def test_a_model_spread_over_devices(
    name: str, devices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = BY_NAME[name]
    theirs, ours = kind.build()
    save_huggingface(theirs, tmp_path)
    monkeypatch.setattr(load, "place_layers", partial(shared_out, devices))
    model = load_model(tmp_path, device_map="auto")
    assert set(map(str, model.devices)) == set(devices)
    ids = kind.ids()
    expected = ours(ids, logits_to_keep=None)
    assert (model(ids, logits_to_keep=None).cpu() - expected).abs().max() <= 1e-4
    cache = model.new_cache(kind.num_tokens, batch_size=2)
    model.prefill(ids[:, :13], cache, piece=8)
    mark = cache.mark()
    model(ids[:, 13:15], cache=cache)
    cache.rewind(mark)
    cache = cache.fork()
    speed_up(model)
    step = DecodeStep(model)
    for position in range(13, kind.num_tokens):
        logits = step(ids[:, position].to(model.logits_device), cache)
        assert (logits.cpu() - expected[:, position]).abs().max() <= 1e-4


def test_a_map_on_a_gpu_with_room_uses_that_one(tmp_path: Path) -> None:
    theirs, _ = BY_NAME["gqa"].build()
    save_huggingface(theirs, tmp_path)
    assert [device.name for device in local_devices()][-1] == "cpu"
    assert load_model(tmp_path, device_map="auto").devices == (torch.device("cuda:0"),)
