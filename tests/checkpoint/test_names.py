import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers

from llamatool.checkpoint import gguf, names
from llamatool.config.catalog import entries
from llamatool.config.gguf import parse_gguf
from llamatool.config.huggingface import parse_huggingface
from llamatool.config.meta import parse_meta

from .builders import smollm2

CONFIGS = {entry.id: entry for entry in entries() if entry.config.quantization is None}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mllama": (transformers.MllamaConfig, transformers.MllamaForConditionalGeneration),
    "llama4": (transformers.Llama4Config, transformers.Llama4ForConditionalGeneration),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
}


def transformers_shapes(values: dict[str, object]) -> dict[str, tuple[int, ...]]:
    config_class, model_class = CLASSES[str(values["model_type"])]
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class(config_class.from_dict(values))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


MODELS = [
    "llama-1-7b",
    "llama-2-70b",
    "codellama-34b",
    "llama-3.1-8b",
    "llama-3.2-1b",
    "llama-3.2-11b-vision",
    "llama-3.2-90b-vision-instruct",
    "llama-4-scout-17b-16e",
    "llama-4-maverick-17b-128e-instruct",
    "llama-guard-4-12b",
]


@pytest.mark.parametrize("model", MODELS)
def test_names_and_shapes_are_those_of_transformers(model: str) -> None:
    entry = CONFIGS[model]
    expected = transformers_shapes(dict(entry.config_values))
    specs = names.tensor_specs(entry.config)
    tied = {spec.name for spec in specs if spec.repeats}
    assert bool(tied) == entry.config.tie_word_embeddings
    ours = names.expected_tensors(entry.config)
    assert len(ours) + len(tied) == len(specs)
    theirs = {names.canonical_name(name, entry.config): shape for name, shape in expected.items()}
    assert ours == {name: shape for name, shape in theirs.items() if name not in tied}


RELATIVES = ["qwen2-0.5b-instruct", "qwen3-8b", "mistral-7b-v0.1", "smollm2-135m-instruct"]


@pytest.mark.parametrize("model", RELATIVES)
def test_relatives(model: str) -> None:
    path = Path(__file__).parents[1] / "data" / "configs" / f"{model}.json"
    values = json.loads(path.read_text())
    config = parse_huggingface(values, where=str(path))
    theirs = transformers_shapes(values)
    if config.tie_word_embeddings:
        theirs.pop("lm_head.weight", None)
    assert names.expected_tensors(config) == theirs


def test_counts_of_the_docstring() -> None:
    assert len(names.tensor_specs(CONFIGS["llama-3.1-8b"].config)) == 291
    small = names.tensor_specs(CONFIGS["llama-3.2-1b"].config)
    assert len(small) == 147
    assert [s.name for s in small if s.repeats] == ["lm_head.weight"]


def test_every_element_has_a_place_in_metas_files() -> None:
    """All parts together hold as many elements as the tensor, except the tabulated tiles."""
    for entry in CONFIGS.values():
        for spec in names.tensor_specs(entry.config):
            if spec.operation == "tiles":
                continue
            for way in spec.ways:
                total = sum(torch.Size(part.shape).numel() for part in way)
                assert total == spec.num_elements, spec.name


def test_shard_sizes_of_405b() -> None:
    """Meta's eight files of 405B hold, together, each element once but for the norms."""
    config = CONFIGS["llama-3.1-405b"].config
    shard = names.expected_meta_tensors(config, 8)
    assert shard["layers.0.attention.wk.weight"] == (128, 16384)
    assert shard["tok_embeddings.weight"] == (16032, 16384)
    assert shard["layers.0.feed_forward.w2.weight"] == (16384, 6656)
    elements = sum(torch.Size(shape).numel() for shape in shard.values())
    norms = (2 * 126 + 1) * 16384
    unsharded = sum(s.num_elements for s in names.tensor_specs(config))
    assert 8 * elements == unsharded + 7 * norms


def test_llama2_splits_the_input_table_by_columns() -> None:
    assert names.embedding_axis(CONFIGS["llama-2-7b"].config) == 1
    assert names.embedding_axis(CONFIGS["codellama-34b"].config) == 1
    assert names.embedding_axis(CONFIGS["llama-3-8b"].config) == 0


def test_fused_tensors_of_scout() -> None:
    config = CONFIGS["llama-4-scout-17b-16e"].config
    specs = {spec.name: spec for spec in names.tensor_specs(config)}
    prefix = "language_model.model.layers.0."
    rows = [specs[f"{prefix}self_attn.{letter}_proj.weight"].ways[0][0].rows(8) for letter in "qkv"]
    assert rows == [(0, 640), (640, 768), (768, 896)]
    assert names.expected_meta_tensors(config, 8)["layers.0.attention.wqkv.weight"] == (896, 5120)
    experts = specs[prefix + "feed_forward.experts.gate_up_proj"]
    assert [part.name for part in experts.ways[0]] == [
        "layers.0.feed_forward.experts.moe_w_in_eD_F",
        "layers.0.feed_forward.experts.moe_w_swiglu_eD_F",
    ]
    assert experts.ways[0][0].stored_shape(8) == (16 * 5120, 1024)
    assert experts.ways[1][0].stored_shape(8) == (16, 5120, 1024)
    assert experts.join_axis == 2
    down = specs[prefix + "feed_forward.experts.down_proj"].ways[0][0]
    assert down.stored_shape(8) == (16 * 1024, 5120)
    assert specs[prefix + "feed_forward.router.weight"].operation == "transpose"


def test_order_of_the_cross_attention_layers() -> None:
    specs = names.tensor_specs(CONFIGS["llama-3.2-11b-vision"].config)
    metas = {spec.name: spec.ways[0][0].name for spec in specs}
    prefix = "language_model.model.layers."
    assert metas[prefix + "3.cross_attn.q_proj.weight"].startswith(
        "text_model.cross_attention_layers.0."
    )
    assert metas[prefix + "38.mlp.up_proj.weight"].startswith(
        "text_model.cross_attention_layers.7."
    )
    assert metas[prefix + "4.mlp.up_proj.weight"].startswith("text_model.layers.3.")
    assert metas[prefix + "39.mlp.up_proj.weight"].startswith("text_model.layers.31.")


def test_tile_cells() -> None:
    assert names.tile_cells(((1, 1), (1, 2)), 4) == {
        (1, 0): (0, 0),
        (2, 0): (0, 0),
        (2, 1): (0, 1),
    }
    config = CONFIGS["llama-3.2-11b-vision"].config
    assert config.vision is not None
    cells = names.tile_cells(config.vision.supported_aspect_ratios, 4)
    # Half of the 16 cells belong to no aspect ratio.
    reachable = {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0), (1, 1)}
    assert set(cells.values()) == reachable


def test_meta_and_hugging_face_configurations_give_the_same_table() -> None:
    path = Path(__file__).parents[1] / "data" / "params" / "llama-3.1-8b.json"
    config = parse_meta(json.loads(path.read_text()), where=str(path))
    assert names.tensor_specs(config) == names.tensor_specs(CONFIGS["llama-3.1-8b"].config)


@pytest.mark.parametrize(
    ("name", "model", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", "llama-3.1-8b", None),
        ("language_model.model.norm.weight", "llama-3.1-8b", "model.norm.weight"),
        ("model.language_model.norm.weight", "llama-3.1-8b", "model.norm.weight"),
        (
            "model.language_model.layers.3.cross_attn_attn_gate",
            "llama-3.2-11b-vision",
            "language_model.model.layers.3.cross_attn_attn_gate",
        ),
        ("lm_head.weight", "llama-3.2-11b-vision", "language_model.lm_head.weight"),
        (
            "model.vision_model.class_embedding",
            "llama-3.2-11b-vision",
            "vision_model.class_embedding",
        ),
        ("multi_modal_projector.bias", "llama-3.2-11b-vision", None),
    ],
)
def test_canonical_names(name: str, model: str, expected: str | None) -> None:
    assert names.canonical_name(name, CONFIGS[model].config) == (expected or name)


def test_dropped_and_odd_names() -> None:
    for name in (
        *("rope.freqs", "text_model.rope.freqs", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        *("layers.0.attention.wqkv._extra_state", "layers.1.feed_forward.expert_activation_DE"),
        *("layers.1.feed_forward.global_gate_stats_3E", "rope_freqs.weight"),
    ):
        assert names.drop_reason(name), name
    assert names.drop_reason("layers.0.attention.wq.weight") is None
    odd = names.odd_name(["model.norm.weight", "model.layers.0.self_attn.q_proj.qweight"])
    assert odd is not None
    assert odd[1] == "a GPTQ or AWQ weight"
    assert names.odd_name(["base_model.model.lm_head.weight"]) is not None
    assert names.odd_name(["layers.0.attention.wq.adaptor.A.weight"]) is not None
    assert names.odd_name(["model.norm.weight"]) is None


def test_gguf_names_of_a_real_file() -> None:
    file = gguf.read_file(smollm2())
    shapes = {name: info.shape for name, info in file.table.tensors.items()}
    config = parse_gguf(file.metadata, shapes=shapes, where=str(file.path))
    assert names.expected_gguf_tensors(config) == shapes
