"""Image models from files: both layouts give the same logits, and text alone loads no tower."""

from pathlib import Path
from typing import Any

import pytest
import torch

from llamatool.config import meta
from llamatool.config.model import VisionConfig
from llamatool.config.reader import Reader
from llamatool.errors import CheckpointError, ResourceError, UnsupportedError
from llamatool.model import load
from llamatool.model.decoder import Decoder
from llamatool.model.images import Tiles
from llamatool.model.load import load_model
from tests.convert import oracle
from tests.convert.models import convert, load_strictly, tensors
from tests.model.vision_models import (
    LLAMA4_VISION,
    MLLAMA_VISION,
    SIDE,
    build_llama4,
    build_mllama,
    random_tiles,
)

MLLAMA_PARAMS = {
    "dim": 64,
    "n_layers": 4,
    "n_heads": 8,
    "n_kv_heads": 4,
    "vocab_size": 96,
    "hidden_dim": 96,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vision_chunk_size": SIDE,
    "vision_max_num_chunks": 4,
    "vision_num_cross_attention_layers": 2,
}
IMAGES = {
    "mllama": [random_tiles((1, 2), SIDE), random_tiles((3, 1), SIDE)],
    "llama4": [random_tiles((1, 2), LLAMA4_VISION["image_size"], extra=1)],
}


@pytest.fixture(autouse=True)
def _small_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    """params.json gives little of a tower; what Meta's code has as constants is small here."""

    def small(params: Reader, vocab_size: int) -> VisionConfig:
        return VisionConfig(
            kind="mllama",
            hidden_size=MLLAMA_VISION["hidden_size"],
            intermediate_size=MLLAMA_VISION["intermediate_size"],
            num_hidden_layers=MLLAMA_VISION["num_hidden_layers"],
            num_attention_heads=MLLAMA_VISION["attention_heads"],
            image_size=params.size("vision_chunk_size"),
            patch_size=14,
            num_channels=3,
            output_size=MLLAMA_VISION["vision_output_dim"],
            norm_eps=1e-5,
            max_num_tiles=4,
            image_token_id=vocab_size,
            num_global_layers=MLLAMA_VISION["num_global_layers"],
            intermediate_layers_indices=tuple(MLLAMA_VISION["intermediate_layers_indices"]),
            supported_aspect_ratios=meta.ASPECT_RATIOS,
        )

    monkeypatch.setattr(meta, "_vision_32", small)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Models of transformers, saved by transformers."""
    # Three layers in four with RoPE: the layers that Meta's file counts by an interval.
    found = {
        "mllama": build_mllama(cross_attention_layers=[1, 4])[0],
        "llama4": build_llama4(use_qk_norm=True, num_hidden_layers=4, vocab_size=96)[0],
    }
    vision = found["mllama"].model.vision_model
    for name, table in vision.named_parameters():
        if name.endswith("embedding.weight") and "tile" in name:
            # Rows of one table: what Meta's layout can express.
            width = table.shape[1] // 4
            table.data.copy_(oracle.tabulated(torch.randn(4, 4, width)))
    made = {}
    for kind, model in found.items():
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        made[kind] = (model, folder)
    return made


def logits(model: Decoder, images: list[Tiles]) -> torch.Tensor:
    vision = model.config.vision
    assert vision is not None
    ids = torch.arange(40)[None] % 80
    for number, image in enumerate(images):
        place = 3 + 10 * number
        count = 1 if model.has_cross_layers else model.vision_model.num_tokens(image)
        ids[0, place : place + count] = vision.image_token_id
    if not model.has_cross_layers:  # Meta's files have the id of the real tokenizer
        vectors = model.embed(torch.where(ids == vision.image_token_id, 0, ids))
        vectors[ids == vision.image_token_id] = torch.cat(list(map(model.features, images)))
        return model(embeddings_BTD=vectors, logits_to_keep=None)
    cache = model.new_cache(40, images=images)
    return model.prefill(ids, cache, images=images, logits_to_keep=40)


def meta_folder(kind: str, source: tuple[Any, Path], folder: Path, num_ranks: int) -> Path:
    """The same weights as Meta's files, by code that shares nothing with the program."""
    model, path = source
    hf = {}
    for name, tensor in tensors(path).items():
        for old, new in (
            ("model.language_model.", "language_model.model."),
            ("model.vision_model.", "vision_model."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
            ("lm_head.", "language_model.lm_head."),
        ):
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        hf[name] = tensor
    if kind == "mllama":
        return oracle.mllama(hf, model.config, num_ranks).save(folder, MLLAMA_PARAMS)
    text = model.config.text_config
    params = {
        "dim": 64,
        "n_layers": 4,
        "n_heads": 8,
        "n_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "norm_eps": text.rms_norm_eps,
        "rope_theta": text.rope_parameters["rope_theta"],
        "use_qk_norm": True,
        "attention_chunk_size": 16,
        "nope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": 8,
        "attn_scale": 0.1,
        # (8/3) x 64 = 170 -> 96 in dense layers, half of that in the experts
        "ffn_dim_multiplier": 0.5625,
        "ffn_exp": 4.0,
        "multiple_of": 16,
        "moe_args": {"num_experts": 4, "top_k": 1, "interleave_moe_layer_step": 1,
                     "capacity_factor": 1.0, "auto_scale_F": True},
        "vision_args": {"image_size": {"height": 56, "width": 56},
                        "patch_size": {"height": 14, "width": 14}, "dim": 64, "n_layers": 3,
                        "n_heads": 4, "mlp_ratio": 4.0, "output_dim": 48,
                        "pixel_shuffle_ratio": 0.5},
    }  # fmt: skip
    return oracle.llama4(hf, model.config, num_ranks).save(folder, params)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["mllama", "llama4"])
def test_both_layouts_give_the_same_logits(
    kind: str, num_ranks: int, folders: dict[str, tuple[Any, Path]], tmp_path: Path
) -> None:
    """And what `convert` makes of Meta's files gives them, too, and loads in transformers."""
    import transformers

    source = folders[kind]
    whole = load_model(source[1], device="cpu", max_images=2)
    expected = logits(whole, IMAGES[kind])
    folder = meta_folder(kind, source, tmp_path / "meta", num_ranks)
    assert torch.equal(logits(load_model(folder, max_images=2), IMAGES[kind]), expected)
    convert(folder, tmp_path / "back", verify="full")
    back = load_model(tmp_path / "back", max_images=2)
    assert torch.equal(logits(back, IMAGES[kind]), expected)
    names = {"mllama": "MllamaForConditionalGeneration", "llama4": "Llama4ForConditionalGeneration"}
    load_strictly(tmp_path / "back", getattr(transformers, names[kind]))


@pytest.mark.parametrize("kind", ["mllama", "llama4"])
def test_verify_runs_the_tower(
    kind: str, folders: dict[str, tuple[Any, Path]], tmp_path: Path
) -> None:
    """`verify --logits`: both layouts agree, and a change in what sees images is noticed."""
    import shutil

    from safetensors.torch import save_file

    from llamatool.model.verify import compare_logits

    source = folders[kind]
    found = compare_logits(meta_folder(kind, source, tmp_path / "meta", 2), source[1])
    assert found.same
    assert found.has_image
    assert found.num_tokens == 96 + (1 if kind == "mllama" else 12)
    endings = {
        "mllama": (
            "global_transformer.layers.1.gate_attn",
            "vision_model.transformer.layers.2.self_attn.k_proj.weight",
            "layers.4.cross_attn.k_norm.weight",
            "multi_modal_projector.bias",
        ),
        "llama4": ("layers.2.self_attn.q_proj.bias", "vision_adapter.mlp.fc2.weight"),
    }
    content = tensors(source[1])
    for ending in endings[kind]:
        (name,) = (name for name in content if name.endswith(ending))
        folder = tmp_path / name
        shutil.copytree(source[1], folder)
        changed = content | {name: content[name] * 1.5}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        assert not compare_logits(folder, source[1]).same, name


@pytest.mark.parametrize("kind", ["mllama", "llama4"])
def test_text_alone_loads_no_tower(kind: str, folders: dict[str, tuple[Any, Path]]) -> None:
    text = load_model(folders[kind][1])
    whole = load_model(folders[kind][1], max_images=1)
    ids = torch.arange(30)[None]
    assert torch.equal(text(ids, logits_to_keep=None), whole(ids, logits_to_keep=None))
    left_out = {name for name, _ in whole.named_parameters()} - {
        name for name, _ in text.named_parameters()
    }
    assert left_out
    assert all(
        name.startswith(("vision_model.", "multi_modal_projector.", "layers.1.", "layers.4."))
        for name in left_out
    )
    with pytest.raises(UnsupportedError, match="without its image tower"):
        text.features(IMAGES[kind][0])


def test_a_text_model_takes_no_images(tmp_path: Path) -> None:
    from tests.model.tiny_models import BY_NAME

    BY_NAME["gqa"].build()[0].save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="reads no images"):
        load_model(tmp_path, max_images=1)


def test_missing_tensors_of_the_tower_are_named(
    folders: dict[str, tuple[Any, Path]], tmp_path: Path
) -> None:
    import shutil

    from safetensors.torch import save_file

    folder = tmp_path / "model"
    shutil.copytree(folders["mllama"][1], folder)
    content = {k: v for k, v in tensors(folder).items() if "gated_positional" not in k}
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"3 missing: .*gated_positional_embedding\.gate"):
        load_model(folder, max_images=1)


@pytest.mark.parametrize("kind", ["mllama", "llama4"])
def test_memory_counts_tower_and_image_keys(
    kind: str, folders: dict[str, tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused for what text alone would have room for."""
    folder = folders[kind][1]
    text = sum(p.nbytes for p in load_model(folder).parameters())
    whole = sum(p.nbytes for p in load_model(folder, max_images=1).parameters())
    config = load_model(folder).config
    from llamatool.sizing.kv_cache import kv_cache
    from llamatool.sizing.parameters import count_parameters

    groups = count_parameters(config).by_group
    extra = groups["vision_tower"] + groups["projector"]
    cache = kv_cache(load_model(folder).plan, dtype="float32", vision=config.vision)
    assert (cache.bytes_per_image > 0) == (kind == "mllama")
    if kind == "llama4":
        assert whole - text == 4 * extra
    needed = whole + cache.num_bytes(100, num_images=3)
    monkeypatch.setattr(load, "free_memory", lambda device, num_sharing: needed)
    load_model(folder, max_tokens=100, max_images=3)
    monkeypatch.setattr(load, "free_memory", lambda device, num_sharing: needed - 1)
    load_model(folder, max_tokens=100)
    with pytest.raises(ResourceError, match="are free"):
        load_model(folder, max_tokens=100, max_images=3)


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.2-11b-vision",
        "llama-3.2-90b-vision-instruct",
        "llama-4-scout-17b-16e",
        "llama-4-maverick-17b-128e-instruct",
        "llama-guard-4-12b",
    ],
)
def test_published_models_have_their_parameters(name: str) -> None:
    """The decoder with its tower has as many as are counted, and as a checkpoint stores."""
    from llamatool.checkpoint.names import expected_tensors
    from llamatool.config.catalog import find
    from llamatool.model.weights import parameter_name
    from llamatool.sizing.parameters import count_parameters

    entry = find(name)
    assert entry is not None
    with torch.device("meta"):
        model = Decoder(entry.config, images=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert sum(p.numel() for p in model.parameters()) == count_parameters(entry.config).total
    stored = expected_tensors(entry.config)
    assert {parameter_name(name): shape for name, shape in stored.items()} == shapes


def test_worked_numbers() -> None:
    """Two tiles of 560 pixels are 3,202 positions; two of 336 and the global one 432 tokens."""
    from llamatool.config.catalog import find

    for name, tiles, count in (
        ("llama-3.2-11b-vision-instruct", 2, 3202),
        ("llama-4-scout-17b-16e-instruct", 3, 432),
    ):
        entry = find(name)
        assert entry is not None
        with torch.device("meta"):
            model = Decoder(entry.config, images=True)
        image = Tiles(torch.zeros(tiles, 3, 1, 1), (1, 2))
        assert model.vision_model.num_tokens(image) == count
        assert model.num_cross_tokens(image) == (count if tiles == 2 else 0)


def test_llama4_of_both_layouts_reads_prompts_by_its_token() -> None:
    """Meta's params.json names no image token: it is that of the published tokenizer."""
    reader = {"image_size": {"height": 336}, "patch_size": {"height": 14}, "dim": 1408}
    params = {"vision_args": reader | {"n_layers": 34, "n_heads": 16, "mlp_ratio": 4.0,
              "output_dim": 4096, "pixel_shuffle_ratio": 0.5}}  # fmt: skip
    vision = meta._llama4_vision(Reader(params, where="a test"))
    assert vision is not None
    assert vision.image_token_id == 200092
