"""The rope numbers: golden values in double precision, and transformers in single precision."""

import json
import math
from pathlib import Path

import pytest

from llamatool.config.model import RopeConfig, TemperatureConfig
from llamatool.config.rope import (
    RopeBands,
    attention_factor,
    frequency_bands,
    inverse_frequencies,
    temperature_scale,
    wavelengths,
)
from llamatool.errors import ConfigError

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "rope_golden.json").read_text())
LLAMA_3_1 = RopeConfig(
    theta=500000.0,
    type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def golden_config(entry: dict) -> RopeConfig:
    scaling = dict(entry["scaling"] or {})
    return RopeConfig(theta=entry["theta"], type=scaling.pop("rope_type", "default"), **scaling)


@pytest.mark.parametrize("name", GOLDEN["inverse_frequencies"])
def test_golden_inverse_frequencies(name: str) -> None:
    entry = GOLDEN["inverse_frequencies"][name]
    rope = golden_config(entry)
    frequencies = inverse_frequencies(rope, entry["head_dim"])
    assert len(frequencies) == entry["head_dim"] // 2
    for index, value in entry["inv_freq"].items():
        assert frequencies[int(index)] == pytest.approx(value, rel=1e-12)
    assert math.fsum(frequencies) == pytest.approx(entry["sum"], rel=1e-12)
    bands = frequency_bands(rope, entry["head_dim"])
    assert bands == (RopeBands(**entry["bands"]) if entry["bands"] else None)


@pytest.mark.parametrize("position", GOLDEN["temperature"])
def test_golden_temperature(position: str) -> None:
    scale = temperature_scale(TemperatureConfig(8192, 0.1), int(position))
    assert scale == pytest.approx(GOLDEN["temperature"][position], rel=1e-12)


def test_docstring_numbers() -> None:
    yarn = RopeConfig(1e4, "yarn", factor=4.0, original_max_position_embeddings=4096)
    assert attention_factor(yarn) == pytest.approx(1.138629436111989, rel=1e-15)
    long = RopeConfig(1e4, "longrope", factor=32.0, original_max_position_embeddings=4096)
    assert attention_factor(long) == pytest.approx(1.1902380714238083, rel=1e-15)
    assert wavelengths((0.001,)) == (6283.185307179586,)
    assert attention_factor(LLAMA_3_1) == 1.0


LONG_FACTORS = tuple(1.0 + 0.37 * i for i in range(8))
SHORT_FACTORS = tuple(1.0 + 0.05 * i for i in range(8))
# Length 0 asks for what the class computes before it has seen any text.
AGAINST_TRANSFORMERS = [
    ({"rope_type": "linear", "factor": 4.0}, 0),
    ({"rope_type": "dynamic", "factor": 4.0}, 0),
    ({"rope_type": "dynamic", "factor": 4.0}, 100),
    ({"rope_type": "dynamic", "factor": 4.0}, 1000),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 0),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 0),
    ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
      "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}, 0),
    ({"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
      "mscale": 1.0, "mscale_all_dim": 0.7}, 0),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
      "attention_factor": 1.5}, 0),
    ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
      "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}, 64),
    ({"rope_type": "longrope", "original_max_position_embeddings": 64,
      "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}, 65),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 64}, 0),
    ({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 1000}, 0),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "length"), AGAINST_TRANSFORMERS)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_transformers_computes_the_same(
    parameters: dict[str, object], length: int, theta: float
) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    function = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    expected, expected_factor = function(config, "cpu", seq_len=length or None)
    fields = dict(parameters)
    rope = RopeConfig(theta=theta, type=str(fields.pop("rope_type")), **fields)  # type: ignore[arg-type]
    ours = inverse_frequencies(rope, 16, max_position_embeddings=256, length=length or None)
    assert ours == pytest.approx(expected.tolist(), rel=1e-6)
    factor = attention_factor(rope, max_position_embeddings=256)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_dynamic_is_plain_within_its_context() -> None:
    rope = RopeConfig(1e4, "dynamic", factor=2.0)
    plain = inverse_frequencies(RopeConfig(1e4), 16)
    inside = inverse_frequencies(rope, 16, max_position_embeddings=128, length=128)
    beyond = inverse_frequencies(rope, 16, max_position_embeddings=128, length=129)
    assert inside == plain
    assert beyond[-1] < plain[-1]


def test_equal_limits_leave_nothing_between() -> None:
    # A wavelength that meets both limits exactly: 2 pi / 1.0 against original 2 pi is impossible
    # in integers, so the limit is moved onto the first frequency instead.
    limit = 8192 * 1.0 / math.tau
    rope = RopeConfig(5e5, "llama3", 16.0, limit, limit, 8192)
    frequencies = inverse_frequencies(rope, 128)
    assert frequencies[0] == 1.0
    assert all(math.isfinite(f) for f in frequencies)
    assert frequency_bands(rope, 128) == RopeBands(1, 0, 63)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (RopeConfig(1e4, "su"), "`su` is unknown"),
        (RopeConfig(1e4, "linear"), "needs `factor`"),
        (RopeConfig(1e4, "linear", factor=0.0), "`factor` of the rope is 0.0"),
        (RopeConfig(1e4, "llama3", factor=8.0), "needs `low_freq_factor`"),
        (RopeConfig(1e4, "dynamic", factor=2.0), "needs `max_position_embeddings`"),
        (RopeConfig(1e4, "longrope", original_max_position_embeddings=8), "`short_factor`"),
        (RopeConfig(0.0), "`rope_theta` is 0.0"),
        (RopeConfig(float("nan")), "`rope_theta` is nan"),
        (RopeConfig(1.0, "yarn", 4.0, original_max_position_embeddings=8), "no finite"),
    ],
)
def test_what_cannot_be_computed_is_said(rope: RopeConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        inverse_frequencies(rope, 16)


@pytest.mark.parametrize("head_dim", [0, 1, 15])
def test_head_dim_must_be_even(head_dim: int) -> None:
    with pytest.raises(ConfigError, match="cannot pair up"):
        inverse_frequencies(RopeConfig(1e4), head_dim)
