"""`llamatool kv-budget`: the words, the numbers, JSON, exit codes, start-up."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from llamatool.cli.app import main
from llamatool.config import catalog

DATA = Path(__file__).parent.parent / "data"
GOLDEN = json.loads((DATA / "golden.json").read_text())["models"]
SCOUT = "llama-4-scout-17b-16e-instruct"


class Result(NamedTuple):
    code: int
    out: str
    err: str


class Run:
    """Runs the command in this process, as `llamatool kv-budget ARGUMENTS`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Result:
        argv = ["llamatool", "kv-budget", *map(str, arguments)]
        self._monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = self._capsys.readouterr()
        return Result(int(exit_.value.code or 0), out, err)

    def json(self, *arguments: object) -> dict:
        return json.loads(self(*arguments, "--json").out)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return Run(monkeypatch, capsys)


def config_path(model: str) -> Path:
    return DATA / GOLDEN[model]["config"]


# --- JSON ---------------------------------------------------------------------------------------

SCOUT_JSON = {
    "schema": 1,
    "tokens": 100_000,
    "batch_size": 1,
    "kv_dtype": "bfloat16",
    "models": [
        {
            "source": "llama-4-scout-17b-16e",
            "model": "llama-4-scout-17b-16e",
            "bytes_per_token": {"growing": 49_152, "while_in_window": 196_608},
            "kv_bytes": 6_123_159_552,
            "kv_bytes_by_policy": {
                "capped": 6_123_159_552,
                "live_chunk_only": 5_165_285_376,
                "no_eviction": 19_660_800_000,
                "vllm_hybrid": 7_331_119_104,
            },
            "fixed_bytes_per_image": 0,
            "layers": {"full": 12, "chunked": 36, "window": 8192, "cross": 0},
            "weights_bytes": 217_283_587_072,
            "fit": None,
        }
    ],
}


def test_json_is_frozen(run: Run) -> None:
    result = run("llama-4-scout-17b-16e", "--tokens", 100_000, "--json")
    assert result.code == 0
    assert json.loads(result.out) == SCOUT_JSON
    assert list(json.loads(result.out)) == list(SCOUT_JSON)
    assert list(json.loads(result.out)["models"][0]) == list(SCOUT_JSON["models"][0])


def test_json_of_the_fit_is_frozen(run: Run) -> None:
    found = run.json("llama-3.1-8b", "--gpu", "24GiB", "--overhead", "0B", "-n", "8k")
    assert found["models"][0]["fit"] == {
        "fits": True,
        "fits_memory": True,
        "binding": "kv_cache",
        "device": "24.00 GiB device",
        "devices": 1,
        "tensor_parallel": 1,
        "utilization": 0.9,
        "per_device": {
            "memory_bytes": 25_769_803_776,
            "usable_bytes": 23_192_823_398,
            "weights_bytes": 16_060_522_496,
            "runtime_bytes": 0,
            "activation_bytes": 0,
            "kv_budget_bytes": 7_132_300_902,
            "kv_bytes": 1_073_741_824,
            "spare_bytes": 6_058_559_078,
        },
        "max_tokens": 54_400,
        "max_tokens_in_memory": 54_400,
        "max_batch_size": 6,
        "decode_tokens_per_second_limit": None,
        "smallest": None,
    }


def test_json_with_every_extra(run: Run, tmp_path: Path) -> None:
    document = tmp_path / "report.txt"
    document.write_text("word " * 1000)
    found = run.json(
        "llama-3.2-11b-vision-instruct", "--images", 2, "--as", "mqa", "--document", document
    )
    assert list(found) == ["schema", "tokens", "batch_size", "kv_dtype", "images", "as", "models"]
    assert found["models"][0]["document"] == {
        "name": "report.txt",
        "bytes": 5000,
        "tokens": 984,
        "exact": False,
        "counted_by": "estimated by the rates of the tokenizer of Meta Llama 3, within 18% on "
        "most texts",
        "fits_context": True,
    }
    curve = run.json(SCOUT, "llama-3.1-8b", "--curve")
    assert list(curve)[-1] == "crossings"
    assert curve["crossings"] == [
        {
            "tokens": 14_746,
            "kv_bytes": 1_932_754_944,
            "smaller": SCOUT,
            "larger": "llama-3.1-8b",
        }
    ]
    points = {p["tokens"]: p["kv_bytes"] for p in curve["models"][0]["curve"]}
    assert points[131_072] == 7_650_410_496
    assert next(iter(points)) == 4096
    assert list(points)[-1] == 10_485_760


def test_sliding_layers_are_named_only_where_they_are(run: Run) -> None:
    found = run.json(config_path("mistral-7b-v0.1"), "-n", "100000")
    assert found["models"][0]["layers"] == {
        "full": 0,
        "chunked": 0,
        "sliding": 32,
        "window": 4096,
        "cross": 0,
    }
    assert found["models"][0]["kv_bytes"] == 536_870_912


@pytest.mark.parametrize("model", GOLDEN)
def test_golden_integers_through_the_command(run: Run, model: str) -> None:
    for tokens in (8000, 8192, 100_000, 128_000, 131_072):
        found = run.json(config_path(model), "--tokens", tokens)
        row = GOLDEN[model]["kv_cache_bf16"][str(tokens)]
        assert found["models"][0]["kv_bytes"] == row["total_capped"]
        assert found["models"][0]["kv_bytes_by_policy"]["no_eviction"] == row["total_no_eviction"]


def test_the_figures_that_must_hold(run: Run) -> None:
    def headline(*arguments: object) -> int:
        return int(run.json(*arguments)["models"][0]["kv_bytes"])

    assert headline("llama-3.1-8b", "-n", "128000") == 16_777_216_000
    assert headline("llama-3.1-8b", "-n", "128k") == 17_179_869_184
    assert headline(SCOUT, "-n", "100000") == 6_123_159_552
    mha = run.json("llama-2-70b", "--as", "mha")["models"][0]
    assert mha["bytes_per_token"]["growing"] == 2_621_440
    vision = run.json("llama-3.2-11b-vision-instruct")["models"][0]
    assert vision["layers"] == {"full": 32, "chunked": 0, "window": None, "cross": 8}
    assert vision["fixed_bytes_per_image"] == 209_846_272
    fit = run.json(SCOUT, "-n", "1M", "--gpu", "8xh200", "--policy", "no_eviction")
    assert fit["models"][0]["fit"]["per_device"]["kv_bytes"] == 24 * 2**30
    at = [
        run.json("llama-3.1-405b", "-n", "100000", "--gpu", gpu)["models"][0]["fit"]
        for gpu in ("8xb200", "16xb200")
    ]
    assert at[0]["per_device"]["kv_bytes"] == at[1]["per_device"]["kv_bytes"] == 6_451_200_000


# --- public questions, and the input that reproduces each ----------------------------------------


def fit_of(run: Run, *arguments: object) -> dict:
    return run.json(*arguments)["models"][0]["fit"]


def test_70b_on_two_h100(run: Run) -> None:
    arguments = ("llama-3.1-70b", "--memory", "80GB", "--tp", 2, "--utilization", "0.9")
    found = fit_of(run, *arguments, "--overhead", "0B")
    assert found["devices"] == found["tensor_parallel"] == 2
    assert found["max_tokens"] == 8_816


def test_8b_on_a_3090_is_near_what_an_engine_says(run: Run) -> None:
    # vLLM 0.6 said 39,024 tokens; the estimate of the runtime is the difference.
    found = fit_of(run, "llama-3.1-8b", "--gpu", "3090", "-n", "131072")
    assert (found["fits"], found["binding"]) == (False, "kv_cache")
    assert 39_024 < found["max_tokens"] == 43_904 < 1.2 * 39_024


def test_scout_on_two_h100_nvl_fails_by_its_weights(run: Run) -> None:
    result = run(SCOUT, "-n", "1000", "--gpu", "2xh100-nvl")
    assert result.code == 1
    assert "DOES NOT FIT: the weights bind" in result.out


def test_405b_fp8_on_eight_h100(run: Run) -> None:
    # An engine that read 131,072 tokens in one step had room for 79,392 of them.
    asked = ("llama-3.1-405b-instruct-fp8", "--gpu", "8xh100", "-n", "131072")
    in_steps = fit_of(run, *asked)
    at_once = fit_of(run, *asked, "--max-batched-tokens", "128k")
    assert (in_steps["fits"], at_once["fits"]) == (True, False)
    assert at_once["binding"] == "kv_cache"
    assert 79_392 < at_once["max_tokens"] == 91_296 < 1.2 * 79_392


def test_batched_tokens_of_a_million_token_prompt_count(run: Run) -> None:
    few, many = (
        fit_of(run, SCOUT, "--gpu", "8xh200", "-n", "1M", "--max-batched-tokens", batched)
        for batched in ("8k", "128k")
    )
    assert few["per_device"]["activation_bytes"] < many["per_device"]["activation_bytes"]
    hybrid = ("--policy", "vllm-hybrid", "--max-batched-tokens", "128k")
    vllm = fit_of(run, SCOUT, "--gpu", "8xh200", "-n", "1M", *hybrid)
    assert vllm["per_device"]["kv_bytes"] > few["per_device"]["kv_bytes"]


def test_no_silent_ten_million_tokens(run: Run) -> None:
    found = run.json(SCOUT)
    assert found["tokens"] == 8192
    assert "8,192 tokens" in run(SCOUT).out


def test_the_trained_limit_and_the_asked_tokens_are_different_things(run: Run) -> None:
    result = run("llama-2-7b", "-n", "100000", "--gpu", "h100")
    assert result.code == 1
    assert "DOES NOT FIT: the trained context binds" in result.out
    assert "in memory it would fit" in result.out
    assert run("llama-2-7b", "-n", "100000").code == 0  # nothing was asked to fit


def test_weights_in_another_type(run: Run) -> None:
    for name, num_bytes in (("fp16", 141_107_412_992), ("int4", 35_276_853_248)):
        found = run.json("llama-3.1-70b", "--weights", name)
        assert found["models"][0]["weights_bytes"] == num_bytes


def test_kv_types_change_the_cache_only(run: Run) -> None:
    for name, per_token in (("q8_0", 69_632), ("q4_0", 36_864), ("fp8", 65_536)):
        model = run.json("llama-3.1-8b", "--kv-dtype", name)["models"][0]
        assert model["bytes_per_token"]["growing"] == per_token
        assert model["weights_bytes"] == 16_060_522_496


def test_weight_quantisation_does_not_touch_the_cache(run: Run, tmp_path: Path) -> None:
    values = json.loads(config_path("llama-3.1-8b").read_text())
    values["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    model = run.json(path)["models"][0]
    assert model["bytes_per_token"]["growing"] == 131_072
    assert model["weights_bytes"] < 7 * 10**9


# --- text ---------------------------------------------------------------------------------------

WHOLE_OUTPUT = """\
llama-3.1-8b: 100,000 tokens, KV cache in bfloat16
  KV cache   13,107,200,000 B   12.21 GiB  exact
  per token         131,072 B  128.00 KiB  exact
  weights    16,060,522,496 B   14.96 GiB  bfloat16
  layers                                   32 full
  context                                  131,072 tokens

KV cache, line by line
  2 x 32 layers x 8 KV heads x 128 x 2 B x 100,000 tokens
  = 13,107,200,000 B

On RTX 4090
     memory             25,757,220,864 B  nvidia-smi total: 24,564 MiB
     usable             23,181,498,777 B  x 0.9
  -  weights            16,060,522,496 B
  -  runtime             ≈ 536,870,912 B  assumed
  -  activations         ≈ 839,373,824 B  prefill of 8,192 tokens
  =  left for KV cache   5,744,731,545 B
  -  KV cache           13,107,200,000 B  131,072 x 100,000
  =  spare              -7,362,468,455 B

DOES NOT FIT: the KV cache binds
it needs 12.21 GiB, 5.35 GiB are left for it
most tokens that fit: 43,824 (limit: memory)
  check: 43,824 tokens need 23,180,866,560 B of 23,181,498,777 B
         43,840 tokens need 23,182,963,712 B: too much
most sequences of 100,000 tokens at once: 0
smallest listed set that holds it: RTX 5090
on this one it would fit with --weights int8
"""


def test_whole_text(run: Run) -> None:
    result = run("llama-3.1-8b", "--tokens", "100000", "--gpu", "4090")
    assert result == (1, WHOLE_OUTPUT, "")


def test_the_shown_numbers_can_be_checked_by_hand(run: Run) -> None:
    assert 2 * 32 * 8 * 128 * 2 * 100_000 == 13_107_200_000
    assert int(24_564 * 2**20 * 0.9) == 23_181_498_777
    fixed = 16_060_522_496 + 536_870_912 + 839_373_824
    assert fixed + 43_824 * 131_072 == 23_180_866_560 <= 23_181_498_777
    assert fixed + 43_840 * 131_072 == 23_182_963_712 > 23_181_498_777
    assert "FITS" in run("llama-3.1-8b", "--tokens", 43_824, "--gpu", "4090").out
    over = run("llama-3.1-8b", "--tokens", 43_825, "--gpu", "4090")
    assert (over.code, "DOES NOT FIT" in over.out) == (1, True)


def test_table_of_all_models(run: Run) -> None:
    result = run("--tokens", "100000")
    assert result.code == 0
    lines = result.out.splitlines()
    for entry in catalog.entries():
        assert sum(line.split()[0] == entry.id for line in lines if line) == 1
    scout = next(line.split() for line in lines if line.startswith(SCOUT))
    assert scout == [SCOUT, "6,123,159,552", "5.70", "202.36", "10M"]
    llama_2 = next(line.split() for line in lines if line.startswith("llama-2-70b "))
    assert llama_2[-1] == "4k*"
    assert "* more tokens than the context" in result.out


def test_table_of_all_models_on_a_machine(run: Run) -> None:
    result = run("--tokens", "100000", "--gpu", "2xh100")
    assert result.code == 0  # some fit
    rows = {line.split()[0]: line for line in result.out.splitlines() if line}
    assert "yes" in rows["llama-3.1-8b"]
    assert "no: weights" in rows["llama-3.1-405b"]
    assert "no: KV cache" in rows["llama-3.1-70b"]
    assert "no: context" in rows["llama-2-7b"]
    assert run("--tokens", "100000", "--memory", "1GiB").code == 1  # none fits


def test_table_of_the_smallest_machines(run: Run) -> None:
    result = run("--tokens", "32k", "--gpu", "smallest")
    rows = {line.split()[0]: line for line in result.out.splitlines() if line}
    assert rows["llama-3.3-70b-instruct"].split() == [
        "llama-3.3-70b-instruct",
        "141.42",
        "B200",
        "90,688",
    ]
    assert rows["llama-2-7b"].endswith("4,096*")
    huge = run("--tokens", "128k", "--batch", "1000", "--gpu", "smallest", "--weights", "fp32")
    rows = {line.split()[0]: line for line in huge.out.splitlines() if line}
    assert rows["llama-3.1-405b"].split()[2] == "none"


def test_three_models_in_a_table_with_their_notes(run: Run) -> None:
    result = run("llama-2-7b", "llama-3-8b", "llama-3.1-8b", "-n", "100000")
    assert result.out.startswith("model ")
    assert "llama-2-7b: no: 100,000 tokens are more than the 4,096" in result.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tokens", "100000"),
        ("--tokens", "100000", "--gpu", "2xh100"),
        ("--tokens", "100000", "--gpu", "smallest"),
        (SCOUT, "-n", "100000", "--gpu", "2xh100-nvl"),
        (SCOUT, "llama-3.1-8b", "-n", "64k", "--gpu", "8xh100"),
        ("llama-3.2-90b-vision", "--gpu", "8xh200", "-n", "128k"),
        ("llama-3.1-8b", "--curve"),
    ],
)
def test_eighty_columns_plain(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    table = result.out.split("Notes\n")[0]  # notes are prose, a sentence per line
    assert max(map(len, table.splitlines())) <= 80
    assert "\x1b" not in result.out
    assert not set(result.out) & set("─│┌┐└┘━┃")
    assert " GB" not in result.out.replace("Apple", "")


def test_eighty_columns_on_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(SCOUT, "-n", "100000", "--gpu", "2xh100-nvl").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(SCOUT, "-n", "100000", "--gpu", "2xh100-nvl").out
    assert "\x1b[" in shown
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(len, text.splitlines())) <= 80
    assert text.split() == plain.split()  # the same words and numbers


def test_two_models_side_by_side(run: Run) -> None:
    result = run(config_path("llama-3.1-8b"), SCOUT, "-n", "100000")
    assert "13,107,200,000  " in result.out
    assert "6,123,159,552" in result.out
    assert "KV, no eviction" in result.out


def test_policies_are_shown_where_they_differ(run: Run) -> None:
    scout = run(SCOUT, "-n", "100000").out
    for figure in ("6,123,159,552", "5,165,285,376", "19,660,800,000", "7,331,119,104"):
        assert f"{figure} B" in scout
    assert "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE" in scout
    assert "no eviction" not in run("llama-3.1-8b", "-n", "100000").out


def test_curve_and_crossing(run: Run) -> None:
    result = run(SCOUT, "llama-3.1-8b", "--curve")
    assert result.code == 0
    assert "from 14,746 tokens the cache of" in result.out
    assert "#  14,746 tokens" in result.out


def test_plot_is_written_whole(run: Run, tmp_path: Path) -> None:
    from xml.etree import ElementTree

    path = tmp_path / "kv.svg"
    result = run(SCOUT, "llama-3.1-8b", "--plot", path)
    assert result.code == 0
    root = ElementTree.fromstring(path.read_text())
    text = " ".join(root.itertext())
    assert SCOUT in text
    assert "14,746 tokens" in text
    assert len(root.findall("{*}polyline")) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_devices_that_cannot_share_a_model(run: Run) -> None:
    reason = (
        "3 ranks cannot share this model: 32 attention heads are not divisible by 3;"
        " it can be shared by 1, 2, 4, 8, 16 or 32 ranks"
    )
    one = run("llama-3.1-8b", "--gpu", "3xh100")
    assert one.code == 1
    assert "On 3 x H100 SXM\n  DOES NOT FIT: the devices cannot share it\n" in one.out
    assert "\n  ".join(("", *reason.split("; "))) in one.out
    assert "Notes" not in one.out
    assert "FITS" not in one.out
    two = run("llama-3.1-8b", "llama-3.2-3b", "--gpu", "3xh100")
    assert two.code == 1
    assert "no: split" in two.out
    table = run("--gpu", "3xh100")
    assert table.code == 1
    assert all("no: split" in line for line in table.out.splitlines() if line.startswith("llama-"))
    assert "split: so many devices cannot share the model" in table.out
    answer = run("llama-3.1-8b", "--memory", "80GiB", "--tp", 3, "--json")
    assert answer.code == 1
    assert json.loads(answer.out)["models"][0]["fit"] is None
    assert reason in answer.err


def test_notes(run: Run) -> None:
    beyond = run("llama-4-maverick-17b-128e-instruct", "-n", "512k")
    assert "262,144" in beyond.out
    few = run("llama-3.1-405b", "--gpu", "16xb200")
    assert "16 ranks share 8 KV heads" in few.out
    block = run(config_path("open-llama-3b"), "--kv-dtype", "q8_0")
    assert "head_dim 100 is no multiple of the 32 values" in block.out
    assert "--images adds nothing here" in run("llama-3.1-8b", "--images", 1).out
    scout = run("llama-4-scout-17b-16e", "--images", 3).out
    assert "count them in --tokens (441 to 7,401, by size and shape)" in scout
    twice = run("llama-3.1-405b-mp16")
    assert "1,032,192 B" in twice.out
    assert "more than once" in twice.out
    assert "516,096 B" in run("llama-3.1-405b-mp16", "--as", "gqa:8").out


def test_warnings_go_to_stderr_with_json(run: Run) -> None:
    result = run("llama-2-7b", "-n", "100000", "--json")
    json.loads(result.out)
    assert result.err.startswith("warning: llama-2-7b: no: 100,000 tokens are more than")


def test_sources_of_every_kind(run: Run, tmp_path: Path) -> None:
    expected = run.json("llama-3.1-8b", "-n", "100000")["models"][0]["kv_bytes"]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(config_path("llama-3.1-8b").read_bytes())
    renamed = tmp_path / "params.json"
    renamed.write_bytes(config_path("llama-3.1-8b").read_bytes())
    meta = DATA / "params" / "llama-3.1-8b.json"
    for source in (folder, renamed, meta):
        assert run.json(source, "-n", "100000")["models"][0]["kv_bytes"] == expected


def test_standard_input() -> None:
    command = [sys.executable, "-m", "llamatool", "kv-budget", "-", "--json"]
    text = config_path("llama-3.1-8b").read_bytes()
    done = subprocess.run(command, input=text, capture_output=True, check=True)
    assert json.loads(done.stdout)["models"][0]["bytes_per_token"]["growing"] == 131_072


# --- documents ----------------------------------------------------------------------------------


def test_document_is_estimated_without_a_tokenizer(run: Run, tmp_path: Path) -> None:
    document = tmp_path / "a.txt"
    document.write_text("x" * 415_000)  # 0.241 tokens for each
    result = run("llama-3.1-8b", "--document", document)
    assert result.code == 0
    assert "≈ 100,015 tokens" in result.out
    assert "yes: 100,015 tokens fit into the 131,072" in result.out
    older = run("llama-3-8b", "--document", document)
    assert older.code == 1
    assert "no: 100,015 tokens are more than the 8,192" in older.out


def test_document_is_counted_with_the_tokenizer_beside_the_model(
    run: Run, tmp_path: Path, llama_3_tokenizer: Path
) -> None:
    (tmp_path / "config.json").write_bytes(config_path("llama-3.1-8b").read_bytes())
    (tmp_path / "tokenizer.model").symlink_to(llama_3_tokenizer)
    document = tmp_path / "fox.txt"
    document.write_text("The quick brown fox jumps over the lazy dog. " * 1000)
    for source in (tmp_path, tmp_path / "config.json"):
        model = run.json(source, "--document", document)["models"][0]["document"]
        assert (model["tokens"], model["exact"]) == (10_001, True)
    text = run(tmp_path, "--document", document).out
    assert "10,001 tokens" in text
    assert "≈ 10,001" not in text


def test_two_models_may_count_differently(run: Run, tmp_path: Path) -> None:
    document = tmp_path / "a.txt"
    document.write_text("x" * 10_000)
    found = run.json("llama-2-7b", "llama-3.1-8b", "--document", document)
    assert found["tokens"] is None
    assert [model["document"]["tokens"] for model in found["models"]] == [2640, 2410]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the document is empty"),
        (b"%PDF-1.7\n\x00\x01", "the document is no UTF-8 text"),
        (b"caf\xe9 au lait, in Latin-1", "the document is no UTF-8 text"),
    ],
)
def test_documents_that_are_no_text(run: Run, tmp_path: Path, content: bytes, message: str) -> None:
    document = tmp_path / "a.bin"
    document.write_bytes(content)
    result = run("llama-3.1-8b", "--document", document)
    assert (result.code, result.out) == (3, "")
    assert message in result.err


def test_documents_that_are_no_file(run: Run, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for document, message in (
        (tmp_path / "none", "does not exist"),
        (tmp_path, "is no regular file"),
        (fifo, "is no regular file"),
        ("/dev/null", "is no regular file"),
    ):
        result = run("llama-3.1-8b", "--document", document)
        assert (result.code, result.out) == (3, "")
        assert message in result.err


def test_a_character_cut_by_the_sample_is_no_error(run: Run, tmp_path: Path) -> None:
    document = tmp_path / "a.txt"
    document.write_text("a" * (2**16 - 1) + "é" * 10)
    assert run("llama-3.1-8b", "--document", document).code == 0


@pytest.fixture
def llama_3_tokenizer() -> Path:
    spec = importlib.util.find_spec("llama_models")
    if spec is None:
        pytest.skip("the llama-models wheel, which holds the tokenizer, is not installed")
    path = Path(next(iter(spec.submodule_search_locations))) / "llama3" / "tokenizer.model"
    if not path.is_file():
        pytest.skip("no Llama 3 tokenizer in the llama-models wheel")
    return path


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("llama-3.1-8b", "--gpu", "h100x"), 2, "`h100x` is no accelerator in the table"),
        (("llama-3.1-8b", "--gpu", "24"), 2, "`24` is not an amount of memory"),
        (("llama-3.1-8b", "--gpu", "h100", "--memory", "1GiB"), 2, "both name a device"),
        (("llama-3.1-8b", "--tp", "2"), 2, "--tp needs a device"),
        (("llama-3.1-8b", "--gpu", "h100", "--tp", "0"), 2, "--tp must be 1 to"),
        (("llama-3.1-8b", "--gpu", "8xh100", "--tp", "4"), 2, "has 8 devices, --tp asks for 4"),
        (("llama-3.1-8b", "--gpu", "smallest", "--tp", "4"), 2, "chooses the number"),
        (("llama-3.1-8b", "--gpu", "h100", "--utilization", "1.5"), 2, "above 0 and at most 1"),
        (("llama-3.1-8b", "--gpu", "h100", "--utilization", "1/0"), 2, "is no share"),
        (("llama-3.1-8b", "--gpu", "h100", "--utilization", "lots"), 2, "is no share"),
        (("llama-3.1-8b", "--kv-dtype", "fp3"), 2, "`fp3` is no element type of a KV cache"),
        (("llama-3.1-8b", "--weights", "fp3"), 2, "`fp3` is no element type of weights"),
        (("llama-3.1-8b", "--as", "gqa:5"), 2, "5 KV heads do not divide 32"),
        (("llama-3.1-8b", "--policy", "lru"), 2, "`lru` is no policy"),
        (("llama-3.1-8b", "--policy", "live_chunk_only", "--gpu", "h100"), 2, "is no budget"),
        (("llama-3.1-8b", "--tokens", "0"), 2, "tokens must be at least 1"),
        (("llama-3.1-8b", "--max-batched-tokens", "0"), 2, "batched tokens"),
        (("llama-3.1-8b", "--batch", "0"), 2, "sequences must be 1 to"),
        (("llama-3.1-8b", "--images", "-1"), 2, "images must be 0 to"),
        (("llama-3.1-8b", "--tokens", "8", "--document", "a"), 2, "both say how long"),
        (("--curve",), 2, "a curve is readable with 1 to 8 models"),
        (("llama-9",), 3, "`llama-9` is no file or folder"),
        (("llama-3.1-8b", "--tokens", "many"), 2, "is not a number of tokens"),
    ],
)
def test_errors(run: Run, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert "Traceback" not in result.err


def test_a_plot_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "kv.svg", tmp_path, "", "."):
        result = run("llama-3.1-8b", "--plot", path)
        assert (result.code, result.out) == (4, "")
        assert "cannot write the plot" in result.err
    assert list(tmp_path.iterdir()) == []


def test_tp_gives_the_count_that_gpu_does_not(run: Run) -> None:
    assert fit_of(run, "llama-3.1-70b", "--gpu", "h100", "--tp", 4)["devices"] == 4
    assert fit_of(run, "llama-3.1-70b", "--gpu", "4xh100", "--tp", 4)["devices"] == 4


def test_shares_in_percent(run: Run) -> None:
    for text in ("0.85", "85%", "17/20"):
        assert fit_of(run, "llama-3.1-8b", "--gpu", "h100", "--utilization", text)[
            "utilization"
        ] == pytest.approx(0.85)


def test_the_devices_of_the_docs_are_those_of_the_table() -> None:
    from llamatool.sizing.hardware import GPUS

    page = (DATA.parent.parent / "docs" / "kv-cache.md").read_text()
    section = page.partition("## The devices")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("| `")][1:] == [
        f"| `{gpu.key}` | {gpu.name} | {gpu.memory_bytes / 2**30:.2f} GiB "
        f"| {(gpu.bandwidth or 0) / 10**9:,g} GB/s |"
        for gpu in GPUS
    ]


@pytest.mark.parametrize(
    ("scheme", "per_token", "gib"),
    [("mha", "2,621,440", "244.14"), ("gqa:8", "327,680", "30.52"), ("mqa", "40,960", "3.81")],
)
def test_table_of_schemes_in_the_docs(run: Run, scheme: str, per_token: str, gib: str) -> None:
    text = run("llama-2-70b", "--as", scheme, "-n", "100000").out
    assert f"{per_token} B" in text
    assert f"{gib} GiB" in text


def test_smallest_machine(run: Run) -> None:
    result = run("llama-3.1-70b", "-n", "32k", "--gpu", "smallest")
    assert result.code == 0
    assert "FITS" in result.out
    none = run("llama-3.1-405b", "-n", "128k", "--batch", 10_000, "--gpu", "smallest")
    assert none.code == 1
    assert "none of up to 8 listed devices" in none.out


def test_options_are_frozen() -> None:
    import typer

    from llamatool.cli.app import app

    command = typer.main.get_command(app).commands["kv-budget"]
    assert {option for parameter in command.params for option in parameter.opts} == {
        "sources",
        "--tokens",
        "-n",
        "--batch",
        "--concurrency",
        "--images",
        "--document",
        "--kv-dtype",
        "--weights",
        "--as",
        "--gpu",
        "--memory",
        "--tp",
        "--utilization",
        "--overhead",
        "--max-batched-tokens",
        "--policy",
        "--curve",
        "--plot",
        "--json",
    }


@pytest.mark.parametrize(
    "arguments", [["--json"], ["llama-3.1-8b", "--gpu", "h100"], ["--tokens", "100000"]]
)
def test_start_up_loads_nothing_heavy(arguments: list[str]) -> None:
    heavy = (
        "torch rich huggingface_hub pydantic transformers tiktoken sentencepiece tokenizers numpy "
        "yaml gguf safetensors logging importlib.metadata"
    )
    code = (
        "import sys\n"
        f"sys.argv = ['llamatool', 'kv-budget', *{arguments!r}]\n"
        "from llamatool.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"loaded = [name for name in {heavy!r}.split() if name in sys.modules]\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "FORCE_COLOR"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
