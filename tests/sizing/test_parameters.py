"""Counts against the reference data, and against transformers' own modules on the meta device."""

import copy
import warnings

import pytest
import torch
import transformers

from llamatool.config.catalog import entries
from llamatool.config.huggingface import parse_huggingface
from llamatool.config.layers import plan_layers
from llamatool.sizing.kv_cache import kv_cache
from llamatool.sizing.parameters import count_parameters, layer_parameters
from tests.config.helpers import CONFIGS, GOLDEN, config_values, llama, llama4

MODELS = sorted(GOLDEN["models"])


def parse(values):
    return parse_huggingface(values, where="config.json")


@pytest.mark.parametrize("name", MODELS)
def test_counts_of_every_reference_model(name):
    golden = GOLDEN["models"][name]
    count = count_parameters(parse(config_values(name)))
    assert count.total == golden["params"]["total"]
    assert count.by_group == golden["params"]["by_group"]
    assert count.tied == golden["params"]["tied_embeddings"]
    assert sum(count.by_group.values()) == count.total
    active = golden["active"]
    if active is None:
        assert count.active is None
    else:
        assert count.active is not None
        assert count.active.total == active["active_with_embeddings"]
        assert count.active.without_input_embedding == active["active_without_input_embedding"]
        assert count.text == active["text_total"]
        assert count.vision == active["vision_extra"]


@pytest.mark.parametrize("name", MODELS)
def test_cache_bytes_per_token_of_every_reference_model(name):
    golden = GOLDEN["models"][name]["kv_cache_bf16"]
    config = parse(config_values(name))
    cache = kv_cache(plan_layers(config), vision=config.vision)
    assert cache.growing_bytes_per_token == golden["bytes_per_token_global"]
    assert cache.in_window_bytes_per_token == golden["bytes_per_token_all_layers"]


CLASSES = {
    "llama": transformers.LlamaForCausalLM,
    "mllama": transformers.MllamaForConditionalGeneration,
    "llama4": transformers.Llama4ForConditionalGeneration,
    "mistral": transformers.MistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "qwen3": transformers.Qwen3ForCausalLM,
}


def on_meta_device(values) -> int:
    """Parameters of transformers' own class; a tied table is one tensor there."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(**copy.deepcopy(values))
        model = CLASSES[values["model_type"]](config)
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    assert (len(tables) == 1) == config.get_text_config().tie_word_embeddings
    return sum(parameter.numel() for parameter in model.parameters())


# One of each shape; the large ones take long to build even without memory.
SMALL = [
    "llama-1-7b",
    "codellama-7b",
    "llama-3.1-8b",
    "llama-3.2-1b",
    "llama-3.2-11b-vision",
    "llama-4-scout-17b-16e",
    "llama-4-maverick-17b-128e-instruct",
    "mistral-7b-v0.1",
    "qwen2-0.5b-instruct",
    "qwen3-8b",
    "smollm2-135m-instruct",
]


@pytest.mark.parametrize("name", SMALL)
def test_transformers_builds_as_many_parameters(name):
    values = config_values(name)
    assert count_parameters(parse(values)).total == on_meta_device(values)


@pytest.mark.parametrize(
    "values",
    [
        llama(attention_bias=True, mlp_bias=True),
        llama(head_dim=16),
        llama(model_type="qwen2", rope_theta=1e6),
        llama(model_type="qwen3", head_dim=32),
        llama(model_type="mistral", head_dim=24),
    ],
    ids=["biases", "head_dim", "qwen2", "qwen3", "mistral"],
)
def test_odd_shapes_against_transformers(values):
    assert count_parameters(parse(values)).total == on_meta_device(values)


def test_llama_4_text_alone_against_transformers():
    values = llama4()
    with torch.device("meta"):
        theirs = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**values))
    assert count_parameters(parse(values)).total == sum(p.numel() for p in theirs.parameters())


def test_one_layer_of_llama_31_8b():
    layer = plan_layers(parse(config_values("llama-3.1-8b")))[0]
    groups = layer_parameters(layer, 4096)
    assert groups == {"attention": 41_943_040, "mlp": 176_160_768, "norms": 8_192}
    assert count_parameters(parse(config_values("llama-3.1-8b"))).per_layer == 218_112_000


def test_a_tie_that_was_left_out_of_the_file_counts_the_table_twice():
    values = config_values("llama-3.2-1b")
    del values["tie_word_embeddings"]
    assert count_parameters(parse(values)).total == 1_498_482_688


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.id)
def test_published_totals_of_the_catalogue(entry):
    count = count_parameters(entry.config)
    if entry.published_total is not None:
        assert count.total == entry.published_total


def test_guard_4_has_the_published_twelve_billion():
    guard = next(entry for entry in entries() if entry.id == "llama-guard-4-12b")
    assert round(count_parameters(guard.config).total / 1e9) == 12


def test_every_reference_configuration_is_there():
    assert len(CONFIGS) == len(MODELS) == 49
