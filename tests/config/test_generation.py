"""The verdict on every reference configuration, and on what users do to them."""

import copy
import json

import pytest

from llamatool.config.catalog import find
from llamatool.config.generation import completed, identify
from llamatool.config.huggingface import parse_huggingface
from llamatool.config.meta import parse_meta
from tests.config.helpers import CODE_ROWS, DATA, config_values, params_values

ROWS = {row["config"][:-5]: row for row in json.loads((DATA / "identification.json").read_text())}

# family, generation, model, confidence: what each row of identification.json says in words.
EXPECTED = {
    "llama-1-7b": ("llama", "1", "llama-1-7b", "high"),
    "llama-1-7b-decapoda": ("llama", "1", "llama-1-7b", "certain"),
    "llama-1-13b": ("llama", "1", "llama-1-13b", "high"),
    "llama-1-30b": ("llama", "1", "llama-1-30b", "certain"),
    "llama-1-65b": ("llama", "1", "llama-1-65b", "certain"),
    "llama-2-7b": ("llama", "2", "llama-2-7b", "high"),
    "llama-2-13b": ("llama", "2", "llama-2-13b", "high"),
    "llama-2-70b": ("llama", "2", "llama-2-70b", "certain"),
    "llama-2-34b-unreleased": ("llama", "2", None, "ambiguous"),
    "codellama-7b": ("llama", "code", "codellama-7b", "certain"),
    "codellama-13b": ("llama", "code", "codellama-13b", "certain"),
    "codellama-34b": ("llama", "code", "codellama-34b", "certain"),
    "codellama-70b": ("llama", "code", "codellama-70b", "certain"),
    "llama-3-8b": ("llama", "3", "llama-3-8b", "certain"),
    "llama-3-8b-instruct": ("llama", "3", "llama-3-8b-instruct", "certain"),
    "llama-3-70b": ("llama", "3", "llama-3-70b", "certain"),
    "llama-3.1-8b": ("llama", "3.1", "llama-3.1-8b", "certain"),
    "llama-3.1-8b-instruct": ("llama", "3.1", "llama-3.1-8b-instruct", "high"),
    "llama-3.1-70b-instruct": ("llama", "3.1", "llama-3.1-70b-instruct", "ambiguous"),
    "llama-3.3-70b-instruct": ("llama", "3.3", "llama-3.3-70b-instruct", "ambiguous"),
    "llama-3.1-405b-instruct": ("llama", "3.1", "llama-3.1-405b-instruct", "certain"),
    "llama-3.1-405b-mp16": ("llama", "3.1", "llama-3.1-405b-mp16", "certain"),
    "llama-3.2-1b": ("llama", "3.2", "llama-3.2-1b", "certain"),
    "llama-3.2-1b-instruct": ("llama", "3.2", "llama-3.2-1b-instruct", "high"),
    "llama-3.2-3b": ("llama", "3.2", "llama-3.2-3b", "certain"),
    "llama-3.2-3b-instruct": ("llama", "3.2", "llama-3.2-3b-instruct", "high"),
    "llama-3.2-11b-vision-instruct": (
        "llama",
        "3.2-vision",
        "llama-3.2-11b-vision-instruct",
        "certain",
    ),
    "llama-3.2-11b-vision": ("llama", "3.2-vision", "llama-3.2-11b-vision", "certain"),
    "llama-3.2-90b-vision-instruct": (
        "llama",
        "3.2-vision",
        "llama-3.2-90b-vision-instruct",
        "high",
    ),
    "llama-4-scout-17b-16e-instruct": (
        "llama",
        "4",
        "llama-4-scout-17b-16e-instruct",
        "certain",
    ),
    "llama-4-scout-17b-16e": ("llama", "4", "llama-4-scout-17b-16e", "certain"),
    "llama-4-maverick-17b-128e-instruct": (
        "llama",
        "4",
        "llama-4-maverick-17b-128e-instruct",
        "certain",
    ),
    "llama-4-maverick-17b-128e": ("llama", "4", "llama-4-maverick-17b-128e", "high"),
    "llama-guard-1-7b": ("llama", "2", "llama-2-7b", "ambiguous"),
    "llama-guard-3-8b": ("llama", "3.1", "llama-3.1-8b-instruct", "ambiguous"),
    "tinyllama-1.1b-chat-v1.0": ("llama-architecture", None, "TinyLlama 1.1B", "certain"),
    "smollm2-135m-instruct": ("llama-architecture", None, "SmolLM2 135M", "certain"),
    "smollm2-1.7b-instruct": ("llama-architecture", None, "SmolLM2 1.7B", "certain"),
    "yi-6b": ("llama-architecture", None, "Yi 6B", "certain"),
    "open-llama-3b": ("llama-architecture", None, "OpenLLaMA 3B", "certain"),
    "open-llama-7b": ("llama", "1", None, "ambiguous"),
    "vicuna-7b-v1.5": ("llama", "2", "llama-2-7b", "ambiguous"),
    "hermes-3-llama-3.1-8b": ("llama", "3.1", "llama-3.1-8b", "medium"),
    "mistral-7b-v0.1": ("other", None, None, "certain"),
    "mistral-7b-v0.3": ("other", None, None, "certain"),
    "qwen2-7b-instruct": ("other", None, None, "certain"),
    "qwen2-0.5b-instruct": ("other", None, None, "certain"),
    "qwen3-8b": ("other", None, None, "certain"),
    "internlm-chat-7b": ("other", None, None, "certain"),
}

# The other candidates that the rows name, in our spelling.
NAMED = {
    "llama-1-7b": ["OpenLLaMA 7B", "Vicuna 7B <= v1.3"],
    "llama-1-13b": ["OpenLLaMA 13B", "Vicuna 13B <= v1.3"],
    "llama-2-7b": ["Vicuna v1.5", "llama-guard-1-7b"],
    "llama-2-13b": ["Vicuna 13B v1.5"],
    "llama-2-34b-unreleased": ["codellama-34b"],
    "codellama-7b": ["codellama-7b-instruct"],
    "codellama-34b": ["codellama-34b-python", "codellama-34b-instruct"],
    "llama-3-8b": ["llama-guard-2-8b"],
    "llama-3.1-8b": ["llama-guard-3-8b"],
    "llama-3.1-8b-instruct": ["DeepSeek-R1-Distill-Llama-8B"],
    "llama-3.1-70b-instruct": ["llama-3.3-70b-instruct"],
    "llama-3.3-70b-instruct": ["llama-3.1-70b-instruct"],
    "llama-3.2-1b": ["llama-guard-3-1b"],
    "llama-3.2-11b-vision-instruct": ["llama-guard-3-11b-vision"],
    "llama-3.2-90b-vision-instruct": ["llama-3.2-90b-vision"],
    "llama-guard-1-7b": ["llama-2-7b", "Vicuna v1.5", "llama-guard-1-7b"],
    "llama-guard-3-8b": ["llama-3.1-8b-instruct", "llama-guard-3-8b"],
    "open-llama-7b": ["llama-1-7b", "OpenLLaMA 7B"],
    "vicuna-7b-v1.5": ["llama-2-7b", "Vicuna v1.5"],
    "hermes-3-llama-3.1-8b": ["llama-3.1-8b"],
}


def verdict(values):
    return identify(parse_huggingface(values, where="config.json"))


def test_every_row_is_covered():
    assert set(EXPECTED) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_verdict(name):
    identity = verdict(config_values(name))
    found = (identity.family, identity.generation, identity.model, identity.confidence)
    assert found == EXPECTED[name], ROWS[name]["expected"]
    assert set(NAMED.get(name, [])) <= set(identity.candidates)
    # What the row calls ambiguous is never answered with certainty, and the reverse.
    assert ROWS[name]["confidence"].startswith(identity.confidence)
    assert identity.evidence


@pytest.mark.parametrize("name", ["llama-1-7b-decapoda"])
def test_wrong_token_ids_of_an_early_conversion_are_told(name):
    assert [note.code for note in verdict(config_values(name)).notes] == ["wrong-token-ids"]


def test_heads_stored_twice_are_told():
    identity = verdict(config_values("llama-3.1-405b-mp16"))
    assert [note.code for note in identity.notes] == ["kv-heads-stored-twice"]
    assert "405,853,388,800" in identity.notes[0].message


@pytest.mark.parametrize("size", ["7b", "13b", "34b", "70b"])
def test_code_llama_that_lost_its_theta_is_warned_about(size):
    values = config_values(f"codellama-{size}")
    del values["rope_theta"]
    identity = verdict(values)
    assert "rope-theta-lost" in [note.code for note in identity.notes] or size == "70b"
    assert "codellama-" in " ".join((identity.model or "", *identity.candidates))


def test_a_70b_of_vocabulary_32016_is_code_llama_whatever_its_theta():
    values = config_values("codellama-70b")
    values.update(rope_theta=10000.0, max_position_embeddings=4096)
    identity = verdict(values)
    assert identity.generation == "code"
    assert "codellama-70b-instruct" in (identity.model, *identity.candidates)


def test_eps_does_not_decide():
    # Llama 1 65B has 1e-5, the first Llama 2 7B chat file 1e-6.
    for eps in (1e-5, 1e-6):
        assert verdict({**config_values("llama-1-65b"), "rms_norm_eps": eps}).generation == "1"
        assert verdict({**config_values("llama-2-70b"), "rms_norm_eps": eps}).generation == "2"
        assert verdict({**config_values("llama-3-8b"), "rms_norm_eps": eps}).generation == "3"


def test_dtype_does_not_decide():
    for name in ("llama-1-7b", "llama-2-7b", "llama-3.1-8b"):
        values = {**config_values(name), "torch_dtype": "float32"}
        assert verdict(values).model == EXPECTED[name][2]


def test_the_first_llama_2_files_stated_2048_positions():
    values = {**config_values("llama-2-7b"), "max_position_embeddings": 2048}
    assert verdict(values).generation == "2"
    values["rms_norm_eps"] = 1e-6  # the first 7B chat, or a Llama 1 that was saved again
    identity = verdict(values)
    assert identity.confidence == "ambiguous"
    assert {"llama-1-7b", "llama-2-7b-chat"} <= set(identity.candidates)


def test_a_grown_vocabulary_is_a_derivative_of_the_named_base():
    identity = verdict({**config_values("llama-2-7b"), "vocab_size": 55296})
    assert identity.confidence == "medium"
    assert "llama-2-7b" in identity.candidates
    assert [note.code for note in identity.notes] == ["vocabulary-changed"]


def test_another_theta_is_a_derivative():
    identity = verdict({**config_values("llama-3-8b"), "rope_theta": 2804339835.0})
    assert (identity.generation, identity.confidence) == ("3", "medium")
    assert [note.code for note in identity.notes] == ["rope-changed"]


def test_a_lost_tie_is_warned_about():
    values = config_values("llama-3.2-1b")
    del values["tie_word_embeddings"]
    identity = verdict(values)
    assert identity.model == "llama-3.2-1b"
    assert "tie-differs" in [note.code for note in identity.notes]


def test_31_and_33_lean_by_name_when_there_is_one():
    values = config_values("llama-3.1-70b-instruct")
    values["_name_or_path"] = "meta-llama/Llama-3.3-70B-Instruct"
    assert verdict(values).model == "llama-3.3-70b-instruct"
    base = {**config_values("llama-3.1-70b-instruct"), "eos_token_id": 128001}
    assert (verdict(base).model, verdict(base).confidence) == ("llama-3.1-70b", "certain")


def test_llama_4_without_experts_is_guard_4():
    values = copy.deepcopy(config_values("llama-4-scout-17b-16e"))
    values["text_config"].update(
        moe_layers=[], num_local_experts=0, intermediate_size_mlp=8192, attention_chunk_size=None
    )
    identity = verdict(values)
    assert (identity.generation, identity.variant) == ("guard-4", "guard")


@pytest.mark.parametrize("name", ["llama-4-scout-17b-16e", "llama-3.2-11b-vision"])
def test_a_small_model_of_the_architecture_is_not_metas(name):
    values = copy.deepcopy(config_values(name))
    values["text_config"].update(hidden_size=640, vocab_size=1000)
    identity = verdict(values)
    assert (identity.family, identity.generation) == ("llama-architecture", None)


def test_guard_4_of_another_size_is_less_sure():
    values = copy.deepcopy(config_values("llama-4-scout-17b-16e"))
    values["text_config"].update(moe_layers=[], num_local_experts=0, num_hidden_layers=12)
    identity = verdict(values)
    assert (identity.generation, identity.confidence) == ("guard-4", "medium")


def test_two_sides_of_the_90b_are_told_apart_by_eos_only():
    values = copy.deepcopy(config_values("llama-3.2-90b-vision-instruct"))
    values["text_config"]["eos_token_id"] = 128001
    assert verdict(values).model == "llama-3.2-90b-vision"


META = {
    "llama-1-7b": ("1", "ambiguous", "llama-2-7b"),
    "llama-2-7b": ("2", "ambiguous", "llama-1-7b"),
    "llama-2-7b-chat-first": ("1", "ambiguous", "llama-2-7b-chat"),
    "llama-1-13b": ("1", "ambiguous", "llama-2-13b"),
    "llama-1-30b": ("1", "certain", None),
    "llama-1-65b": ("1", "certain", None),
    "llama-2-70b": ("2", "certain", None),
    "codellama-7b": ("code", "certain", None),
    "codellama-34b": ("code", "certain", None),
    "codellama-70b": ("code", "certain", None),
    "llama-3-8b": ("3", "certain", "llama-guard-2-8b"),
    "llama-3.1-8b": ("3.1", "certain", "llama-guard-3-8b"),
    "llama-3.1-70b": ("3.1", "ambiguous", "llama-3.3-70b-instruct"),
    "llama-3.3-70b-instruct": ("3.1", "ambiguous", "llama-3.3-70b-instruct"),
    "llama-3.1-405b": ("3.1", "certain", None),
    "llama-3.1-405b-mp16": ("3.1", "certain", None),
    "llama-3.2-1b": ("3.2", "certain", "llama-3.2-1b-instruct"),
    "llama-3.2-3b": ("3.2", "certain", "llama-3.2-3b-instruct"),
    "llama-3.2-11b-vision": ("3.2-vision", "certain", None),
    "llama-3.2-90b-vision-instruct": ("3.2-vision", "high", "llama-3.2-90b-vision-instruct"),
    "llama-4-scout-17b-16e": ("4", "high", "llama-4-scout-17b-16e-instruct"),
    "llama-4-maverick-17b-128e": ("4", "high", "llama-4-maverick-17b-128e-instruct"),
    "llama-guard-3-8b": ("3", "ambiguous", "llama-guard-3-8b"),
    "llama-guard-3-1b-int4": ("guard-3", "certain", None),
}


@pytest.mark.parametrize("name", META)
def test_verdict_from_params_json(name):
    config = parse_meta(params_values(name), where="p", embedding_rows=CODE_ROWS.get(name))
    identity = identify(config)
    generation, confidence, candidate = META[name]
    assert (identity.generation, identity.confidence) == (generation, confidence)
    assert candidate is None or candidate in identity.candidates


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("llama-1-30b", 2048),
        ("llama-2-70b", 4096),
        ("codellama-7b", 16384),
        ("llama-3-8b", 8192),
        ("llama-3.1-8b", 131072),
        ("llama-3.2-1b", 131072),
        ("llama-3.2-11b-vision", 131072),
        ("llama-4-scout-17b-16e", 262144),
        ("llama-4-maverick-17b-128e", 262144),
    ],
)
def test_the_context_of_a_params_json_follows_from_the_verdict(name, context):
    config = parse_meta(params_values(name), where="p", embedding_rows=CODE_ROWS.get(name))
    filled = completed(config, identify(config))
    assert filled.max_position_embeddings == context
    assert filled.origins["max_position_embeddings"] == "derived"


def test_models_that_a_verdict_names_are_in_the_catalogue():
    for name, (family, _, model, _) in EXPECTED.items():
        if family == "llama" and model is not None:
            assert find(model) is not None, name
