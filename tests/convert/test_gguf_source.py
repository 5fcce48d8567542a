"""A real GGUF file to a Hugging Face folder and on to Meta's layout."""

import json
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from llamatool.conversion import ConvertOptions, check_destination, load_weights, prepare, run
from llamatool.errors import LlamatoolError
from tests.checkpoint.builders import smollm2

from .models import convert, load_strictly, tensors


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, with its tokenizer."""
    torch.set_num_threads(2)
    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    loaded, options = load_weights(str(smollm2())), ConvertOptions()
    check_destination(loaded, folder, options)
    report = run(prepare(loaded, options), folder, options)
    assert report.written.problem is None
    return folder


def test_tensors_are_those_of_transformers(converted: Path) -> None:
    """Dequantised, permuted and named by transformers' own reader of GGUF files."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(converted)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shell = transformers.LlamaForCausalLM(config)
        theirs = load_gguf_checkpoint(str(smollm2()), return_tensors=True, model_to_load=shell)
    ours = tensors(converted)
    assert ours.keys() == theirs["tensors"].keys()
    for name, tensor in theirs["tensors"].items():
        assert torch.equal(ours[name], tensor), name


def test_it_answers_paris(converted: Path) -> None:
    model = load_strictly(converted, transformers.LlamaForCausalLM)
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])


def test_on_to_metas_layout_and_back(converted: Path, tmp_path: Path) -> None:
    convert(converted, tmp_path / "meta", num_shards=3)
    convert(tmp_path / "meta", tmp_path / "back")
    first, second = tensors(converted), tensors(tmp_path / "back")
    assert first.keys() == second.keys()
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


def small_gguf(path: Path, order: Any, changes: dict[str, Any]) -> dict[str, np.ndarray]:
    """A tiny file of the architecture llama, by the gguf package; its tensors by GGUF name."""
    writer = gguf.GGUFWriter(path, "llama", endianess=order)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(8)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(40)
    writer.add_file_type(1)
    generator = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (40, 64),
        "output.weight": (40, 64),
        "output_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_down.weight": (64, 96),
        "blk.0.ffn_up.weight": (96, 64),
    } | changes
    content = {}
    for name, shape in shapes.items():
        kind = np.float32 if "norm" in name else np.float16
        content[name] = generator.normal(size=shape).astype(kind)
        writer.add_tensor(name, content[name].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return content


@pytest.mark.parametrize("order", [gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG])
def test_unquantised_files_are_kept_bit_by_bit(tmp_path: Path, order: Any) -> None:
    content = small_gguf(tmp_path / "x.gguf", order, {})
    convert(tmp_path / "x.gguf", tmp_path / "out")
    found = tensors(tmp_path / "out")
    down = found["model.layers.0.mlp.down_proj.weight"]
    assert np.array_equal(down.numpy(), content["blk.0.ffn_down.weight"])
    assert down.dtype == torch.float16
    assert found["model.norm.weight"].dtype == torch.float32
    stored = torch.from_numpy(content["blk.0.attn_k.weight"])
    expected = stored.view(4, 4, 2, 64).transpose(1, 2).reshape(32, 64)
    assert torch.equal(found["model.layers.0.self_attn.k_proj.weight"], expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "float16"


def test_biases_are_permuted_too(tmp_path: Path) -> None:
    changes = {f"blk.0.attn_{m}.bias": (n,) for m, n in (("q", 64), ("k", 32), ("v", 32))}
    changes |= {"blk.0.attn_output.bias": (64,)}
    content = small_gguf(tmp_path / "x.gguf", gguf.GGUFEndian.LITTLE, changes)
    convert(tmp_path / "x.gguf", tmp_path / "out")
    found = tensors(tmp_path / "out")
    stored = torch.from_numpy(content["blk.0.attn_q.bias"])
    expected = stored.view(8, 4, 2).transpose(1, 2).reshape(64)
    assert torch.equal(found["model.layers.0.self_attn.q_proj.bias"], expected)
    with pytest.raises(LlamatoolError, match="Meta's layout has no place for"):
        convert(tmp_path / "out", tmp_path / "meta")


def test_some_biases_only(tmp_path: Path) -> None:
    changes = {f"blk.0.attn_{m}.bias": (n,) for m, n in (("q", 64), ("k", 32), ("v", 32))}
    small_gguf(tmp_path / "x.gguf", gguf.GGUFEndian.LITTLE, changes)
    with pytest.raises(LlamatoolError, match="without one of the output"):
        convert(tmp_path / "x.gguf", tmp_path / "out")


def test_missing_and_unknown_tensors(tmp_path: Path) -> None:
    small_gguf(tmp_path / "x.gguf", gguf.GGUFEndian.LITTLE, {"blk.1.attn_q.weight": (64, 64)})
    with pytest.raises(LlamatoolError, match=r"`blk\.1\.attn_q\.weight`"):
        convert(tmp_path / "x.gguf", tmp_path / "out")
