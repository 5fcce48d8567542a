"""All layouts of the same weights give the same logits; loading checks first, and copies little."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llamatool.errors import (
    CheckpointError,
    InputError,
    MissingExtraError,
    ResourceError,
    UnsupportedError,
    UsageError,
)
from llamatool.model import load
from llamatool.model.decoder import Decoder
from llamatool.model.load import load_model
from llamatool.model.weights import parameter_name
from tests.model.layouts import save_gguf, save_huggingface, save_meta, save_meta_llama4
from tests.model.test_memory import Ledger
from tests.model.tiny_models import BY_NAME, DENSE, MIXED, Tiny

# What the published files of each generation look like: split of the input table, tie.
LLAMA_2 = Tiny("llama-2", "Llama", {**DENSE, "vocab_size": 96, "num_key_value_heads": 8})
LLAMA_2_GQA = Tiny("llama-2-gqa", "Llama", {**DENSE, "vocab_size": 96})
LLAMA_3 = Tiny(
    "llama-3",
    "Llama",
    {
        **DENSE,
        "vocab_size": 96,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
)
SCOUT = Tiny("scout", "Llama4", {**MIXED, "vocab_size": 96})
MAVERICK = Tiny(
    "maverick",
    "Llama4",
    {**MIXED, "vocab_size": 96, "use_qk_norm": False, "interleave_moe_layer_step": 2},
)


def ids() -> torch.Tensor:
    return BY_NAME["gqa"].ids() % 96


def logits(model: Decoder) -> torch.Tensor:
    return model(ids(), logits_to_keep=None)


# --- layouts ---


@pytest.mark.parametrize("name", [
    "gqa", "mha", "explicit-head-dim", "biases", "tied", "qwen2", "qwen3", "mistral-sliding",
    "rope-llama3", "rope-yarn", "scout", "maverick", "no-experts",
])  # fmt: skip
@pytest.mark.parametrize("shard_size", ["5GB", "40KB"])
def test_huggingface_folder(name: str, shard_size: str, tmp_path: Path) -> None:
    theirs, ours = BY_NAME[name].build()
    save_huggingface(theirs, tmp_path, shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "40KB")
    model = load_model(tmp_path, device="cpu")
    assert model.dtype == torch.float32
    assert torch.equal(logits(model), logits(ours))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "by_columns"),
    [(LLAMA_2, True), (LLAMA_2_GQA, True), (LLAMA_3, False)],
    ids=["llama-2", "llama-2-gqa", "llama-3"],
)
def test_meta_folder(kind: Tiny, by_columns: bool, num_ranks: int, tmp_path: Path) -> None:
    theirs, ours = kind.build()
    save_meta(theirs, tmp_path, num_ranks, by_columns=by_columns)
    model = load_model(tmp_path, device="cpu")
    assert model.config.source_format == "meta"
    assert torch.equal(logits(model), logits(ours))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", [SCOUT, MAVERICK], ids=["scout", "maverick"])
def test_meta_folder_of_llama_4(kind: Tiny, num_ranks: int, tmp_path: Path) -> None:
    theirs, ours = kind.build()
    save_meta_llama4(theirs, tmp_path, num_ranks)
    model = load_model(tmp_path, device="cpu")
    assert model.plan == ours.plan
    assert torch.equal(logits(model), logits(ours))


@pytest.mark.parametrize("name", ["gqa", "mha", "mqa", "tied", "biases", "explicit-head-dim"])
def test_gguf_file(name: str, tmp_path: Path) -> None:
    theirs, ours = BY_NAME[name].build()
    model = load_model(save_gguf(theirs, tmp_path / "model.gguf"), device="cpu")
    assert model.dtype == torch.float32
    assert model.config.source_format == "gguf"
    assert torch.equal(logits(model), logits(ours))


def test_gguf_blocks(tmp_path: Path) -> None:
    """Q8_0: the logits of the weights as rounded to eight bits."""
    theirs, ours = BY_NAME["gqa"].build()
    path = save_gguf(theirs, tmp_path / "model.gguf", dtype="Q8_0")
    model = load_model(path, device="cpu", dtype="float32")
    difference = (logits(model) - logits(ours)).abs().max()
    assert 1e-4 < difference < 0.3
    assert load_model(path, device="cpu").dtype == torch.float32  # as the file type says


def test_tables_tied_in_meta_files_are_stored_twice(tmp_path: Path) -> None:
    """meta-llama/llama-models#172, vllm-project/vllm#6758: tied yet present, or absent."""
    fields = {**LLAMA_3.fields, "tie_word_embeddings": True}
    theirs, ours = Tiny("", "Llama", fields).build()
    save_huggingface(theirs, tmp_path / "absent")
    save_huggingface(theirs, tmp_path / "present")
    import safetensors.torch

    tensors = safetensors.torch.load_file(tmp_path / "present" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, tmp_path / "present" / "model.safetensors")
    for folder in ("absent", "present"):
        model = load_model(tmp_path / folder, device="cpu")
        assert model.lm_head is None
        assert torch.equal(logits(model), logits(ours))


def test_an_untied_table_is_never_made_up(tmp_path: Path) -> None:
    """tinygrad/tinygrad#13796, huggingface/text-generation-inference#2918."""
    theirs, _ = BY_NAME["gqa"].build()
    save_huggingface(theirs, tmp_path)
    drop(tmp_path, "lm_head.weight")
    with pytest.raises(CheckpointError, match=r"1 missing: `lm_head\.weight`"):
        load_model(tmp_path, device="cpu")


def test_images_of_a_vision_model_are_left_aside(tmp_path: Path) -> None:
    """Text runs on the language model alone; cross-attention and tower are known, not unknown."""
    import transformers

    fields = {k: v for k, v in DENSE.items() if k != "initializer_range"}
    config = transformers.MllamaConfig(
        text_config={**fields, "num_hidden_layers": 5, "cross_attention_layers": [1, 3],
                     "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={"hidden_size": 32, "attention_heads": 2, "intermediate_size": 32,
                       "num_hidden_layers": 2, "num_global_layers": 1, "vision_output_dim": 96,
                       "image_size": 28, "intermediate_layers_indices": [0, 1]},
    )  # fmt: skip
    theirs = transformers.MllamaForConditionalGeneration(config).eval()
    save_huggingface(theirs, tmp_path)
    model = load_model(tmp_path, device="cpu")
    with torch.no_grad():
        expected = theirs(ids()).logits
    assert (logits(model) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("with_vision", [False, True])
def test_llama_4_with_its_tower_left_aside(with_vision: bool, tmp_path: Path) -> None:
    import transformers

    if not with_vision:
        theirs, ours = SCOUT.build()
        save_huggingface(theirs, tmp_path)
        assert torch.equal(logits(load_model(tmp_path, device="cpu")), logits(ours))
        return
    config = transformers.Llama4Config(
        text_config={**MIXED, "vocab_size": 96},
        vision_config={"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1,
                       "intermediate_size": 128, "projector_input_dim": 48,
                       "projector_output_dim": 48, "vision_output_dim": 48, "image_size": 28},
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Llama4ForConditionalGeneration(config).eval()
    save_huggingface(theirs, tmp_path)
    with torch.no_grad():
        expected = theirs.language_model(ids()).logits
    model = load_model(tmp_path, device="cpu")
    assert (logits(model) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (None, torch.bfloat16),  # as stored
        ("float32", torch.float32),
        ("torch.float32", torch.float32),
        ("bf16", torch.bfloat16),
        ("float16", torch.float16),
    ],
)
def test_dtypes(name: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs, _ = BY_NAME["gqa"].build(dtype=torch.bfloat16)
    save_huggingface(theirs, tmp_path)
    model = load_model(tmp_path, device="cpu", dtype=name)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype} == {model.dtype}


# --- what it costs ---


def test_weights_are_the_mapped_file(tmp_path: Path) -> None:
    """In the stored dtype nothing is copied: all tensors lie in one stretch of the file's size."""
    theirs, _ = BY_NAME["scout"].build()
    save_huggingface(theirs, tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    with Ledger() as ledger:
        model = load_model(tmp_path, device="cpu")
    addresses = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in model.parameters()]
    assert max(end for _, end in addresses) - min(start for start, _ in addresses) <= size
    assert ledger.peak_bytes < 1000


@pytest.mark.parametrize("layout", ["huggingface", "meta-1", "meta-4", "meta-llama-4", "gguf"])
def test_loading_peaks_at_the_weights_and_one_tensor(layout: str, tmp_path: Path) -> None:
    """Counted tensor by tensor, where every weight must be converted."""
    kind = SCOUT if layout == "meta-llama-4" else LLAMA_3
    theirs, _ = kind.build()
    path = tmp_path / "model.gguf"
    if layout == "huggingface":
        path = save_huggingface(theirs, tmp_path)
    elif layout == "gguf":
        save_gguf(theirs, path, dtype="Q8_0")
    elif layout == "meta-llama-4":
        path = save_meta_llama4(theirs, tmp_path, 4)
    else:
        path = save_meta(theirs, tmp_path, int(layout[-1]), by_columns=False)
    with Ledger() as ledger:
        model = load_model(path, device="cpu", dtype="bfloat16")
    sizes = [parameter.nbytes for parameter in model.parameters()]
    largest = 4 * max(parameter.numel() for parameter in model.parameters())  # as stored, in fp32
    assert sum(sizes) <= ledger.peak_bytes <= sum(sizes) + 1.05 * largest


def test_too_little_memory_is_refused_before_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, _ = BY_NAME["gqa"].build()
    save_huggingface(theirs, tmp_path)
    monkeypatch.setattr(load, "free_memory", lambda device, num_sharing: 2_000_000)
    monkeypatch.setattr(load.Weights, "fill", lambda *args: pytest.fail("it was read"))
    with pytest.raises(ResourceError) as caught:
        load_model(tmp_path, device="cpu", max_tokens=10_000)
    # 3 layers x 2 x 4 heads x 8 x 4 bytes = 768 bytes per token
    assert "the KV cache of 10,000 tokens 7.32 MiB" in caught.value.what
    assert "1.91 MiB are free on cpu" in caught.value.what
    monkeypatch.undo()
    load_model(tmp_path, device="cpu", max_tokens=10_000)


def test_free_memory_is_that_of_the_system() -> None:
    free_bytes = load.free_memory(torch.device("cpu"))
    if free_bytes is None:
        pytest.skip("this system does not tell")
    assert 2**20 < free_bytes < 2**50


# --- what is refused ---


def drop(folder: Path, *names: str, **others: torch.Tensor) -> None:
    import safetensors.torch

    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for name in names:
        del tensors[name]
    tensors |= others
    safetensors.torch.save_file(tensors, path)


def test_one_error_lists_everything_that_does_not_fit(tmp_path: Path) -> None:
    theirs, _ = BY_NAME["gqa"].build()
    save_huggingface(theirs, tmp_path)
    drop(
        tmp_path,
        "model.norm.weight",
        "model.layers.1.mlp.up_proj.weight",
        **{
            "model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64),
            "model.layers.3.mlp.up_proj.weight": torch.zeros(2, 2),
            "extra.weight": torch.zeros(2),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),  # dropped everywhere
        },
    )
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path, device="cpu")
    what = caught.value.what
    assert "2 missing: `model.norm.weight`, `model.layers.1.mlp.up_proj.weight`" in what
    assert "2 unknown: `extra.weight`, `model.layers.3.mlp.up_proj.weight`" in what
    assert "1 of the wrong shape: `model.layers.0.self_attn.k_proj.weight has [64, 64]" in what
    assert "instead of [32, 64]" in what
    assert "inv_freq" not in what


def test_meta_ranks_are_checked_each(tmp_path: Path) -> None:
    theirs, _ = LLAMA_3.build()
    save_meta(theirs, tmp_path, 2, by_columns=False)
    rank = torch.load(tmp_path / "consolidated.01.pth")
    rank["layers.0.attention.wq.weight"] = torch.zeros(8, 64)
    del rank["layers.1.ffn_norm.weight"]
    torch.save(rank, tmp_path / "consolidated.01.pth")
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path, device="cpu")
    assert "1 missing: `layers.1.ffn_norm.weight`" in caught.value.what
    expected = "`rank 1: layers.0.attention.wq.weight has [8, 64] instead of [32, 64]`"
    assert expected in caught.value.what


def test_adapters_and_packed_weights_are_refused(tmp_path: Path) -> None:
    theirs, _ = BY_NAME["gqa"].build()
    save_huggingface(theirs, tmp_path)
    drop(tmp_path, **{"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(8, 64)})
    with pytest.raises(UnsupportedError, match="an adapter") as caught:
        load_model(tmp_path, device="cpu")
    assert caught.value.hint == "merge it first"
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedError, match="packed by `gptq`"):
        load_model(tmp_path, device="cpu")


def test_eight_bit_floats_are_refused(tmp_path: Path) -> None:
    theirs, _ = BY_NAME["gqa"].build()
    save_huggingface(theirs, tmp_path)
    weight = theirs.state_dict()["model.norm.weight"].to(torch.float8_e4m3fn)
    drop(tmp_path, **{"model.norm.weight": weight})
    with pytest.raises(UnsupportedError, match="stored as float8_e4m3fn"):
        load_model(tmp_path, device="cpu")


def test_a_configuration_alone_does_not_run(tmp_path: Path) -> None:
    theirs, _ = BY_NAME["gqa"].build()
    theirs.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no weights to run"):
        load_model(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="no weights to run"):
        load_model("llama-3.1-8b")


def test_devices_and_dtypes_that_are_not_here(tmp_path: Path) -> None:
    theirs, _ = BY_NAME["gqa"].build()
    save_huggingface(theirs, tmp_path)
    with pytest.raises(UsageError, match="`tpu` is no device"):
        load_model(tmp_path, device="tpu")
    with pytest.raises(UsageError, match="`cpu:1` is no device"):
        load_model(tmp_path, device="cpu:1")
    with pytest.raises(UsageError, match="`int8` is no dtype to compute in"):
        load_model(tmp_path, device="cpu", dtype="int8")
    if not torch.cuda.is_available():
        with pytest.raises(ResourceError, match="no cuda device here"):
            load_model(tmp_path, device="cuda")
        assert load.find_device("auto").type in ("cpu", "mps")


def test_a_file_cut_after_its_header_was_read(tmp_path: Path) -> None:
    theirs, _ = BY_NAME["gqa"].build()
    save_huggingface(theirs, tmp_path)
    from llamatool.model.storage import Storage
    from llamatool.source import load_source

    table = load_source(str(tmp_path), with_tensors=True).tables[0]
    last = max(table.tensors.values(), key=lambda info: info.offset)
    cut = replace(last, offset=last.offset + 1000)
    with pytest.raises(CheckpointError, match="the file ends before tensor"):
        Storage().read(cut, torch.float32)


# --- names and the package ---


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.7.mlp.up_proj.weight", "layers.7.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "norm.weight"),
        (
            "language_model.model.layers.0.feed_forward.router.weight",
            "layers.0.mlp.router.weight",
        ),
    ],
)
def test_parameter_names(theirs: str, ours: str) -> None:
    assert parameter_name(theirs) == ours


def test_the_package_stays_light() -> None:
    code = (
        "import sys, llamatool; before = 'torch' in sys.modules; llamatool.load_model; "
        "print(before, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import llamatool

    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("llamatool.model")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(llamatool, "model", raising=False)

    def importing(name: str, *args: Any) -> Any:
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return original(name, *args)

    import builtins

    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", importing)
    monkeypatch.delitem(vars(llamatool), "load_model", raising=False)
    with pytest.raises(MissingExtraError) as caught:
        llamatool.load_model  # noqa: B018
    assert caught.value.hint == "pip install 'llamatool[torch]'"


def test_unknown_attributes_stay_errors() -> None:
    import llamatool

    with pytest.raises(AttributeError, match="no attribute `load_nothing`"):
        llamatool.load_nothing  # noqa: B018
    with pytest.raises(InputError):
        llamatool.load_model("no-such-folder-or-model/..")
