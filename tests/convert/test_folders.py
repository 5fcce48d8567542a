"""The files beside the tensors: configurations, tokenizers, templates, licences."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llamatool.conversion import (
    ConversionReport,
    ConvertOptions,
    check_destination,
    load_weights,
    prepare,
    run,
)
from llamatool.errors import LlamatoolError
from tests.checkpoint.test_hub import Hub

from . import oracle
from .models import HEADS, KV_HEADS, LAYERS, convert, save_llama, tensors

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def tokenizer_of(generation: str) -> Path:
    package = pytest.importorskip("llama_models", reason="the wheel llama-models is not installed")
    return Path(package.__path__[0]) / generation / "tokenizer.model"


def converted(source: Path, destination: Path, **options: Any) -> ConversionReport:
    chosen = ConvertOptions(**options)
    loaded = load_weights(str(source))
    check_destination(loaded, destination, chosen)
    report = run(prepare(loaded, chosen), destination, chosen)
    assert report.written.problem is None
    return report


def meta_llama3(folder: Path, name: str, rows: int = 128256, **params: Any) -> Path:
    """A narrow model with the whole vocabulary of Llama 3, in Meta's layout."""
    torch.set_num_threads(1)
    save_llama(
        folder / "source",
        hidden_size=16,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        vocab_size=rows,
        rope_theta=500000.0,
    )
    made = oracle.dense(
        tensors(folder / "source"),
        layers=1,
        heads=2,
        kv_heads=1,
        num_shards=1,
        embedding_axis=0,
    )
    values = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "multiple_of": 64}
    values |= {"vocab_size": rows, "norm_eps": 1e-5, "rope_theta": 500000.0}
    target = made.save(folder / name, values | params)
    (target / "tokenizer.model").write_bytes(tokenizer_of("llama3").read_bytes())
    (target / "LICENSE").write_text("a licence")
    (target / "USE_POLICY.md").write_text("a policy")
    return target


def test_llama3_instruct_folder(tmp_path: Path) -> None:
    source = meta_llama3(tmp_path, "Llama-3.1-Tiny-Instruct", use_scaled_rope=True)
    report = converted(source, tmp_path / "hf")
    assert report.conversion.instruct
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == [128001, 128008, 128009]
    assert config["rope_scaling"] == {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    assert config["max_position_embeddings"] == 131072
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [128001, 128008, 128009]
    assert (tmp_path / "hf" / "LICENSE").read_text() == "a licence"
    assert (tmp_path / "hf" / "USE_POLICY.md").exists()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("Hello world").input_ids == [128000, 9906, 1917]
    assert (tokenizer.bos_token_id, len(tokenizer)) == (128000, 128256)
    assert tokenizer.eos_token == "<|eot_id|>"
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    assert ids[:4] == [128000, 128006, 882, 128007]
    assert ids[-4:] == [128006, 78191, 128007, 271]


def test_the_way_back_restores_the_tokenizer(tmp_path: Path) -> None:
    source = meta_llama3(tmp_path, "Llama-3-Tiny")
    report = converted(source, tmp_path / "hf")
    assert not report.conversion.instruct
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["eos_token_id"], config["max_position_embeddings"]) == (128001, 8192)
    content = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert "chat_template" not in content
    converted(tmp_path / "hf", tmp_path / "back", num_shards=1)
    original = (source / "tokenizer.model").read_bytes()
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == original
    assert (tmp_path / "back" / "LICENSE").exists()


def test_more_rows_than_tokens_and_a_tokenizer_one_folder_up(tmp_path: Path) -> None:
    """All rows are kept, and `vocab_size` is their number, not the tokenizer's."""
    source = meta_llama3(tmp_path, "tiny", rows=128264)
    (source / "tokenizer.model").rename(tmp_path / "tokenizer.model")
    report = converted(source, tmp_path / "hf")
    assert "rows-without-token" in [note.code for note in report.conversion.notes]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["vocab_size"] == 128264
    assert tensors(tmp_path / "hf")["lm_head.weight"].shape == (128264, 16)


def test_a_tokenizer_is_not_forgotten_in_silence(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    with pytest.raises(LlamatoolError, match="no tokenizer with the weights") as error:
        converted(tmp_path / "hf", tmp_path / "out")
    assert error.value.hint is not None
    assert "--no-tokenizer" in error.value.hint
    (tmp_path / "hf" / "tokenizer.model").write_bytes(tokenizer_of("llama3").read_bytes())
    with pytest.raises(LlamatoolError, match="128256 tokens, the input table only 512 rows"):
        converted(tmp_path / "hf", tmp_path / "out")
    (tmp_path / "hf" / "tokenizer.model").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    with pytest.raises(LlamatoolError, match="Git LFS pointer"):
        converted(tmp_path / "hf", tmp_path / "out")


def test_a_repository_of_the_hub(tmp_path: Path) -> None:
    """Fetched into the cache and converted from there, links and all."""
    save_llama(tmp_path / "hf")
    with Hub() as server:
        for path in (tmp_path / "hf").iterdir():
            server.files[f"org/name/{path.name}"] = path.read_bytes()
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        environment = {
            **os.environ,
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
        }
        command = [sys.executable, "-m", "llamatool", "convert", "org/name", str(tmp_path / "out")]
        subprocess.run([*command, "--no-tokenizer", "-q"], env=environment, check=True)
        server.shutdown()
        thread.join()
    convert(tmp_path / "hf", tmp_path / "expected")
    one, other = (tmp_path / name / "consolidated.00.pth" for name in ("out", "expected"))
    assert one.read_bytes() == other.read_bytes()


def test_files_of_a_hugging_face_folder_go_along(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        (tmp_path / "hf" / name).write_text("{}")
    converted(tmp_path / "hf", tmp_path / "out", to="hf", dtype="fp32")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"} <= names
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "float32" in (config.get("dtype"), config.get("torch_dtype"))
    expected = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {k: v for k, v in config.items() if "dtype" not in k} == {
        k: v for k, v in expected.items() if "dtype" not in k
    }


def test_params_of_a_resharded_model_stay(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    made = oracle.dense(
        tensors(tmp_path / "hf"),
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        num_shards=2,
        embedding_axis=1,
    )
    params = {"dim": 128, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": KV_HEADS}
    params |= {"multiple_of": 64, "ffn_dim_multiplier": 0.5, "vocab_size": -1, "norm_eps": 1e-6}
    made.save(tmp_path / "meta", params)
    convert(tmp_path / "meta", tmp_path / "out", to="meta", num_shards=4)
    assert json.loads((tmp_path / "out" / "params.json").read_text()) == params
    convert(tmp_path / "out", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-6
    assert config["vocab_size"] == 512


@pytest.mark.parametrize("generation", ["2", "3.1", "4"])
def test_chat_templates_write_what_the_makers_do(generation: str) -> None:
    from llamatool.checkpoint.templates import chat_template

    template = chat_template(generation)
    assert template is not None
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    found = render_template(template, names)
    expected = {
        "2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] Bye [/INST]",
        "3.1": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "4": "<s><|header_start|>system<|header_end|>\n\nBe brief.<|eot|>"
        "<|header_start|>user<|header_end|>\n\nHi<|eot|>"
        "<|header_start|>assistant<|header_end|>\n\nHello<|eot|>"
        "<|header_start|>user<|header_end|>\n\nBye<|eot|>"
        "<|header_start|>assistant<|header_end|>\n\n",
    }
    assert found == expected[generation]


@pytest.mark.parametrize(("generation", "stop"), [("3.1", "<|eot_id|>"), ("4", "<|eom|>")])
def test_what_a_tool_returns_comes_from_ipython(generation: str, stop: str) -> None:
    from llamatool.checkpoint.templates import chat_template

    template = chat_template(generation)
    assert template is not None
    for role in ("tool", "ipython"):
        messages = [{"role": "user", "content": "Hi"}, {"role": role, "content": "42"}]
        found = render_template(template, {"bos_token": "<s>"}, messages)
        head, _, tail = found.partition("ipython")
        assert head.count("user") == 1
        assert tail.split("\n\n")[1].startswith(f"42{stop}")


def test_code_llama_70b_has_a_format_of_its_own() -> None:
    from llamatool.checkpoint.templates import chat_template
    from llamatool.generate.formats import FORMATS, Message, Text

    template = chat_template("code", "codellama-70b-instruct")
    assert template is not None
    assert template != chat_template("code", "codellama-7b-instruct")
    found = render_template(template, {"bos_token": "<s>"})
    messages = [Message(turn["role"], turn["content"]) for turn in TURNS]
    parts = FORMATS["codellama-70b"].parts(messages)
    texts = ["<s>"] + [part.text if isinstance(part, Text) else "<step>" for part in parts[1:]]
    assert found == "".join(texts)


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def render_template(
    template: str, names: dict[str, str], messages: list[dict[str, str]] = TURNS
) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, **names
    )
    return str(rendered[0])
