"""The needle test on a model that is spread over devices finds what it finds on one."""

import pytest

pytest.importorskip("torch")

from llamatool.model import load
from llamatool.needle.report import summary
from llamatool.needle.session import Options, prepare
from llamatool.sizing.placement import Device, Placement
from tests.model.devices import pretended_gpus

OPTIONS = {"lengths": (700,), "depths": (0.0, 0.5, 1.0), "trials": 1}


@pytest.mark.parametrize("source", ["pocket", "pocket-rope"])
def test_the_summary_is_the_same(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = summary(prepare(Options(source=source, device="cpu", **OPTIONS)).run())
    room = int((3_500_000 + 2**29) / 0.9)
    devices = [Device("cuda:0", room), Device("cuda:1", 2**34), Device("cpu", 2**34)]
    monkeypatch.setattr(load, "local_devices", lambda: devices)
    told: list[Placement] = []
    with pretended_gpus():
        test = prepare(Options(source=source, device_map="auto", prefill_chunk=64, **OPTIONS))
        assert test.plan().seconds is None
        spread = summary(test.run(announce=told.append))
    assert [share.device.name for share in told[0].shares] == ["cuda:0", "cuda:1"]
    assert all(share.layers for share in told[0].shares)
    for times in (plain, spread):
        times["compute"].pop("seconds")
    assert spread == plain
    assert plain["by_length"][0]["hits"] == 3
