"""Llama 3.2 Vision and Llama 4 in both directions, against transformers and its scripts."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from llamatool.config import meta
from llamatool.config.model import VisionConfig
from llamatool.config.reader import Reader
from llamatool.errors import LlamatoolError

from . import oracle
from .models import convert, load_strictly, rewrite, save_llama4, save_mllama, shards, tensors


@pytest.fixture(autouse=True)
def _small_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """params.json gives only the tile size; the tests' tower is narrower than Meta's constant."""

    def small(params: Reader, vocab_size: int) -> VisionConfig:
        return VisionConfig(
            kind="mllama",
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=params.size("vision_chunk_size"),
            patch_size=14,
            num_channels=3,
            output_size=96,
            norm_eps=1e-5,
            max_num_tiles=4,
            image_token_id=vocab_size,
            num_global_layers=2,
            intermediate_layers_indices=(0, 1),
            supported_aspect_ratios=meta.ASPECT_RATIOS,
        )

    monkeypatch.setattr(meta, "_vision_32", small)
    torch.set_num_threads(1)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name


def hub_names(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an image model under the names of the hub's files."""
    found = {}
    for name, tensor in tensors(folder).items():
        for old, new in (
            ("model.language_model.", "language_model.model."),
            ("model.vision_model.", "vision_model."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
            ("lm_head.", "language_model.lm_head."),
        ):
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        found[name] = tensor
    return found


@pytest.mark.parametrize("image_size", [28, 56], ids=["base", "instruct"])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_vision(tmp_path: Path, num_shards: int, image_size: int) -> None:
    model = save_mllama(tmp_path / "hf", image_size)
    hf = hub_names(tmp_path / "hf")
    rewrite(tmp_path / "hf", hf)
    made = oracle.mllama(hf, model.config, num_shards)

    report = convert(tmp_path / "hf", tmp_path / "meta", num_shards=num_shards)
    for expected, found in zip(made.files, shards(tmp_path / "meta"), strict=True):
        same(expected, found)
    assert any("tile positions" in sentence for sentence in report.conversion.lost)
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    assert params["vision_chunk_size"] == image_size
    assert (params["n_layers"], params["vision_num_cross_attention_layers"]) == (8, 2)

    convert(tmp_path / "meta", tmp_path / "back", verify="full")
    same(hf, tensors(tmp_path / "back"))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["text_config"]["cross_attention_layers"] == [3, 8]
    assert config["vision_config"]["image_size"] == image_size
    loaded = load_strictly(tmp_path / "back", transformers.MllamaForConditionalGeneration)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert (tmp_path / "back" / "preprocessor_config.json").exists()


def test_names_of_transformers_5_are_understood(tmp_path: Path) -> None:
    save_mllama(tmp_path / "hf")
    hf = hub_names(tmp_path / "hf")
    inner = {}
    for name, tensor in hf.items():
        if name.startswith("language_model.lm_head."):
            inner[name.removeprefix("language_model.")] = tensor
        elif name.startswith("language_model.model."):
            inner["model.language_model." + name.removeprefix("language_model.model.")] = tensor
        else:
            inner["model." + name] = tensor
    rewrite(tmp_path / "hf", inner)
    convert(tmp_path / "hf", tmp_path / "out", to="hf")
    same(hf, tensors(tmp_path / "out"))


def test_all_tile_cells_survive_from_metas_layout_to_metas(tmp_path: Path) -> None:
    """Also those that no aspect ratio reaches."""
    model = save_mllama(tmp_path / "hf")
    made = oracle.mllama(hub_names(tmp_path / "hf"), model.config, 2)
    name = "vision_model.vision_encoder.gated_positional_embedding"
    cells = torch.randn_like(made.files[0][name])
    for file in made.files:
        file[name] = cells.clone()
    params = {
        "dim": 64,
        "n_layers": 8,
        "n_heads": 8,
        "n_kv_heads": 4,
        "vocab_size": 96,
        "hidden_dim": 96,
        "norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "use_scaled_rope": True,
        "vision_chunk_size": 28,
        "vision_max_num_chunks": 4,
        "vision_num_cross_attention_layers": 2,
    }
    made.save(tmp_path / "meta", params)
    convert(tmp_path / "meta", tmp_path / "one", to="meta", num_shards=1)
    assert torch.equal(shards(tmp_path / "one")[0][name], cells)
    convert(tmp_path / "meta", tmp_path / "out")
    table = tensors(tmp_path / "out")[
        "vision_model.gated_positional_embedding.tile_embedding.weight"
    ]
    assert torch.equal(table, oracle.tabulated(cells))


def test_copies_of_a_cell_must_agree(tmp_path: Path) -> None:
    save_mllama(tmp_path / "hf")
    hf = hub_names(tmp_path / "hf")
    name = "vision_model.pre_tile_positional_embedding.embedding.weight"
    hf[name][3, 0] += 1
    rewrite(tmp_path / "hf", hf)
    with pytest.raises(LlamatoolError, match=r"several aspect ratios.*disagree"):
        convert(tmp_path / "hf", tmp_path / "out")


LLAMA4: dict[str, dict[str, Any]] = {
    "scout": {"interleave_moe_layer_step": 1},
    "maverick": {"interleave_moe_layer_step": 2, "use_qk_norm": False},
    "guard": {"moe_layers": [], "num_local_experts": 0},
}


@pytest.mark.parametrize("kind", LLAMA4)
@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_llama4(tmp_path: Path, num_shards: int, kind: str) -> None:
    model = save_llama4(tmp_path / "hf", **LLAMA4[kind])
    hf = tensors(tmp_path / "hf")
    made = oracle.llama4(hf, model.config, num_shards)

    convert(tmp_path / "hf", tmp_path / "meta", num_shards=num_shards)
    for expected, found in zip(made.files, shards(tmp_path / "meta"), strict=True):
        same(expected, found)

    # What Meta's files hold besides.
    for file in made.files:
        file["layers.0.attention.wqkv._extra_state"] = io.BytesIO(b"state")  # type: ignore[assignment]
        file["layers.1.feed_forward.expert_activation_DE"] = torch.zeros(3)
        file["rope.freqs"] = torch.zeros(4)
        file["layers.0.attention.unused"] = torch.zeros(0)
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    made.save(tmp_path / "full", {"model": params})
    report = convert(tmp_path / "full", tmp_path / "back", verify="full")
    assert len(report.conversion.lost) == 4
    same(hf, tensors(tmp_path / "back"))
    loaded = load_strictly(tmp_path / "back", transformers.Llama4ForConditionalGeneration)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    text = loaded.config.text_config
    assert text.moe_layers == model.config.text_config.moe_layers
    assert text.no_rope_layers == model.config.text_config.no_rope_layers
    assert text.attention_chunk_size == 16
    ids = torch.randint(4, 128, (1, 70))
    with torch.no_grad():
        expected = model.eval().language_model(ids).logits
        assert torch.equal(loaded.language_model(ids).logits, expected)


def test_names_of_metas_inference_code_are_understood(tmp_path: Path) -> None:
    """wq, wk, wv, w1, w2, w3 and three-dimensional experts, as after its load hooks."""
    model = save_llama4(tmp_path / "hf")
    hf = tensors(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "meta", num_shards=2)
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    made = oracle.llama4(hf, model.config, 2)
    for file in made.files:
        for name in list(file):
            prefix = name.rpartition("attention.")[0]
            if name.endswith("wqkv.weight"):
                q, k, v = file.pop(name).split([64, 32, 32])
                file |= {
                    f"{prefix}attention.w{n}.weight": t
                    for n, t in zip("qkv", (q, k, v), strict=True)
                }
            elif name.endswith("wqkv.layer_norm_weight"):
                file[prefix + "attention_norm.weight"] = file.pop(name)
            elif name.endswith(("feed_forward.norm.weight", "mlp.layer_norm_weight")):
                file[name.partition("feed_forward")[0] + "ffn_norm.weight"] = file.pop(name)
            elif name.endswith("mlp.fc1_weight"):
                one, three = file.pop(name).chunk(2)
                base = name.removesuffix("mlp.fc1_weight")
                file |= {base + "w1.weight": one, base + "w3.weight": three}
            elif name.endswith("mlp.fc2_weight"):
                file[name.removesuffix("mlp.fc2_weight") + "w2.weight"] = file.pop(name)
            elif "moe_w_" in name:
                base, _, last = name.rpartition(".")
                own = {"moe_w_in_eD_F": "w1", "moe_w_out_eF_D": "w2", "moe_w_swiglu_eD_F": "w3"}
                tensor = file.pop(name)
                file[f"{base}.{own[last]}"] = tensor.view(4, -1, tensor.shape[-1])
    made.save(tmp_path / "other", params)
    convert(tmp_path / "other", tmp_path / "back")
    same(hf, tensors(tmp_path / "back"))


def test_resharding_of_llama4(tmp_path: Path) -> None:
    save_llama4(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "two", num_shards=2)
    convert(tmp_path / "hf", tmp_path / "eight", num_shards=8)
    convert(tmp_path / "two", tmp_path / "again", to="meta", num_shards=8, verify="full")
    for expected, found in zip(shards(tmp_path / "eight"), shards(tmp_path / "again"), strict=True):
        same(expected, found)
    with pytest.raises(LlamatoolError, match=r"holds 8 key|cannot be shared"):
        convert(tmp_path / "hf", tmp_path / "sixteen", num_shards=16)


def test_quantised_shards_are_refused(tmp_path: Path) -> None:
    save_llama4(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "meta", num_shards=1)
    (tmp_path / "meta" / "fp8_scales_0.pt").touch()
    with pytest.raises(LlamatoolError, match="the shards are quantised"):
        convert(tmp_path / "meta", tmp_path / "out")


def test_headers_are_what_the_library_reads(tmp_path: Path) -> None:
    save_llama4(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "meta", num_shards=2)
    convert(tmp_path / "meta", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors(tmp_path / "hf"))
