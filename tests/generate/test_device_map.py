"""A model with its tokenizer, spread over pretended GPUs (tests/model/devices.py)."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from llamatool.errors import ResourceError, UsageError
from llamatool.generate.stats import measure
from llamatool.generate.text_model import load_generator
from llamatool.model import load
from llamatool.needle.subject import pocket_folder
from llamatool.render.generate import to_json
from llamatool.sizing.placement import Device, Placement
from tests.model.devices import pretended_gpus

POCKET = pocket_folder("pocket")
PROMPT = "The magic number for silver falcon is 482913. Question: What is the magic number for"
ROOM = int((3_000_000 + 2**29) / 0.9)  # free bytes of a GPU that a part of the model fits into


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    devices = [Device("cuda:0", ROOM), Device("cuda:1", 2**34), Device("cpu", 2**34)]
    monkeypatch.setattr(load, "local_devices", lambda: devices)
    monkeypatch.setattr(load, "free_memory", lambda device, num_sharing=1: 2**34)
    with pretended_gpus():
        yield


@pytest.mark.usefixtures("_two_gpus")
def test_the_text_is_that_of_one_device() -> None:
    plain = load_generator(POCKET, device="cpu")
    told: list[Placement] = []
    model = load_generator(POCKET, device_map="auto", announce=told.append)
    assert [share.device.name for share in told[0].shares] == ["cuda:0", "cuda:1"]
    assert all(share.layers for share in told[0].shares)
    expected = plain.generate(PROMPT, max_new_tokens=8, temperature=0.0)
    found = model.generate(PROMPT, max_new_tokens=8, temperature=0.0)
    assert found.output_ids == expected.output_ids
    assert found.kv_bytes == expected.kv_bytes


@pytest.mark.usefixtures("_two_gpus")
def test_devices_in_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    model = load_generator(POCKET, device_map="auto")
    answer = model.generate(PROMPT, max_new_tokens=2, temperature=0.0)
    peaks = {"cuda:0": 1000, "cuda:1": 30}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[str(device)])
    stats = measure(model, answer, probe=True)
    assert stats.peak_memory_bytes == 1030
    assert stats.bandwidth_bytes_per_second is None
    assert to_json(model, answer, stats)["device"] == "cuda:0, cuda:1"


@pytest.mark.usefixtures("_two_gpus")
def test_a_cache_that_one_device_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_generator(POCKET, device_map="auto")
    room = {"cuda:0": 2**34, "cuda:1": 1000}

    def free(device: Any, *, num_sharing: int) -> int:
        return room[str(device)]

    monkeypatch.setattr(load, "free_memory", free)
    with pytest.raises(ResourceError, match=r"; 1000 B are free on cuda:1"):
        model.generate(PROMPT, max_new_tokens=8)
    room["cuda:1"] = 2**34
    assert model.generate(PROMPT, max_new_tokens=2, temperature=0.0).output_ids


@pytest.mark.usefixtures("_two_gpus")
def test_what_is_spread_is_not_compiled_and_nothing_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "fill_spread", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UsageError, match=r"--compile is for one device, .* needs cuda:0"):
        load_generator(POCKET, device_map="auto", compile_step=True)
