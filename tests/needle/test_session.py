"""A test from options to files: resuming, error rows, budgets, rebuilt prompts."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from llamatool.errors import InputError, ResourceError, UsageError
from llamatool.needle.report import summary
from llamatool.needle.session import Budget, Options, load_trials, prepare, show_prompt
from llamatool.needle.store import RESULTS, Store, read_rows, sha256_of

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
SMALL = Options(lengths=(256, 512), depths=(0.0, 0.5, 1.0), trials=2, scoring="forced")


def without_timings(folder: Path) -> bytes:
    content = json.loads((folder / "summary.json").read_bytes())
    del content["compute"]["seconds"], content["compute"]["prefill_tokens"]
    return json.dumps(content).encode()


def test_pocket_finds_every_needle(tmp_path):
    report = prepare(replace(SMALL, out=tmp_path, scoring="both")).run()
    assert report.overall.hits == report.overall.trials == 12
    assert report.controls["no_needle"].hits == 0
    assert report.controls["wrong_key"].hits == 0
    assert report.controls["short"].hits == 2
    assert report.effective_length == 512
    rows = [row for _, row in read_rows(tmp_path / RESULTS)]
    for row in rows:
        assert row["status"] == "ok"
        if row["recipe"]["kind"] == "needle":
            assert row["score"]["exact"] == row["forced"]["argmax_match"]
            assert row["generated"].strip().startswith(row["gold"])
            assert row["forced"]["rank"] == 1
        if row["recipe"]["kind"] in ("no_needle", "wrong_key"):
            assert row["score"]["verdict"] == "refusal"


def test_row_schema(tmp_path):
    prepare(replace(SMALL, out=tmp_path)).run()
    _, row = next(read_rows(tmp_path / RESULTS))
    assert set(row) == {
        "schema", "key", "run_id", "config_sha256", "model", "tokenizer_sha", "length_target",
        "length_actual", "depth_target", "depth_actual", "needle_token_start", "needle_token_end",
        "chunk_border_crossed", "trial", "seed", "needle", "question", "gold", "mode", "forced",
        "generated", "score", "hit", "n_prefill_tokens", "n_reused_tokens", "prefill_s", "decode_s",
        "peak_kv_bytes", "prompt_sha256", "status", "error", "recipe",
    }  # fmt: skip
    assert row["length_actual"] == row["length_target"]


def test_summary_keys_are_frozen(tmp_path):
    report = prepare(replace(SMALL, out=tmp_path)).run()
    content = summary(report)
    assert list(content) == [
        "schema", "model", "mode", "lengths", "depths", "cells", "by_length", "effective_length",
        "controls", "compute",
    ]  # fmt: skip
    assert list(content["cells"][0]) == ["length", "depth", "trials", "hits", "interval"]
    assert list(content["by_length"][0]) == ["length", "trials", "hits", "interval"]
    assert list(content["controls"]) == ["no_needle", "wrong_key", "short"]
    assert list(content["compute"]) == ["prefill_tokens", "naive_prefill_tokens", "seconds"]
    assert json.loads((tmp_path / "summary.json").read_bytes()) == content


@pytest.mark.parametrize("mode", ["single", "packed", "sweep"])
def test_a_run_that_was_cut_anywhere_ends_as_a_whole_one(tmp_path, mode):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = replace(SMALL, mode=mode, straddle=mode == "single")
    prepare(replace(options, out=whole)).run()
    lines = (whole / RESULTS).read_bytes().splitlines(keepends=True)
    for keep in (1, len(lines) // 2, len(lines) - 1):
        cut.mkdir(exist_ok=True)
        # Torn in the middle of a line, as a kill leaves it.
        (cut / RESULTS).write_bytes(b"".join(lines[:keep]) + lines[min(keep, len(lines) - 1)][:50])
        (cut / "summary.json").unlink(missing_ok=True)
        prepare(replace(options, out=cut)).run()
        assert without_timings(cut) == without_timings(whole)
        rows = [row for _, row in read_rows(cut / RESULTS)]
        assert len(rows) == len(lines)
        by_key = {row["key"]: row for row in map(json.loads, lines)}
        for row in rows:
            assert row["forced"]["logprob"] == by_key[row["key"]]["forced"]["logprob"]


def test_a_killed_process_is_resumed(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [
        sys.executable, "-m", "llamatool", "needle", "--length", "256,512", "--depths", "3",
        "--trials", "3", "--score", "forced",
    ]  # fmt: skip
    started = subprocess.Popen(
        [*command, "--out", str(killed)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    results = killed / RESULTS
    for _ in range(1200):  # until some trials are done, but not all
        if results.exists() and results.read_bytes().count(b"\n") >= 4:
            break
        time.sleep(0.05)
    started.send_signal(signal.SIGKILL)
    started.wait()
    done = results.read_bytes().count(b"\n")
    assert 4 <= done < 36
    options = replace(SMALL, trials=3)
    prepare(replace(options, out=killed)).run()
    prepare(replace(options, out=whole)).run()
    assert without_timings(killed) == without_timings(whole)
    first = results.read_bytes().splitlines()[:done]
    assert results.read_bytes().splitlines()[:done] == first


def test_a_finished_run_computes_nothing_again(tmp_path):
    prepare(replace(SMALL, out=tmp_path)).run()
    size = (tmp_path / RESULTS).stat().st_size
    report = prepare(replace(SMALL, out=tmp_path)).run()
    assert report.compute.prefill_tokens == 0
    assert (tmp_path / RESULTS).stat().st_size == size
    fresh = prepare(replace(SMALL, out=tmp_path, fresh=True)).run()
    assert fresh.compute.prefill_tokens > 0


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1}, {"values": "digits:5"}, {"max_new_tokens": 30}, {"distractors": 1},
        {"needle": "{key} has {value}.", "question": "What has {key}?", "scoring": "generate"},
        {"dtype": "bfloat16"}, {"language": "zh"},
    ],
)  # fmt: skip
def test_runs_of_other_settings_are_kept_apart(tmp_path, change):
    few = replace(SMALL, lengths=(512,), depths=(0.5,), trials=1, controls=False)
    prepare(replace(few, out=tmp_path)).run()
    prepare(replace(few, out=tmp_path, **change)).run()
    rows = [row for _, row in read_rows(tmp_path / RESULTS)]
    assert len(rows) == 2
    assert len({row["config_sha256"] for row in rows}) == 2
    assert len({row["key"] for row in rows}) == 2
    # Going back finds the first row again.
    report = prepare(replace(few, out=tmp_path)).run()
    assert report.compute.prefill_tokens == 0
    assert len(load_trials(tmp_path)) == 1


def test_failed_trials_are_tried_again(tmp_path, monkeypatch):
    from llamatool.needle import run

    asked = run.Runner._predict

    def fails(self, question, cache):
        if question.cell.trial == 1:
            raise torch.OutOfMemoryError("no memory left")
        return asked(self, question, cache)

    monkeypatch.setattr(run.Runner, "_predict", fails)
    report = prepare(replace(SMALL, out=tmp_path)).run()
    assert report.errors
    assert "no memory left" in report.errors[0]
    assert report.num_missing == len([t for t in prepare(SMALL).outlines if 1 in t.trials]) + 8
    statuses = [row["status"] for _, row in read_rows(tmp_path / RESULTS)]
    assert "error" in statuses
    monkeypatch.setattr(run.Runner, "_predict", asked)
    report = prepare(replace(SMALL, out=tmp_path)).run()
    assert not report.errors
    assert report.num_missing == 0
    whole = tmp_path / "whole"
    prepare(replace(SMALL, out=whole)).run()
    assert without_timings(tmp_path) == without_timings(whole)


def test_a_budget_stops_between_texts(tmp_path):
    report = prepare(replace(SMALL, out=tmp_path, budget=Budget(flops=1.0))).run()
    assert 0 < len(report.trials) < 24
    assert report.num_missing > 0
    report = prepare(replace(SMALL, out=tmp_path)).run()
    assert report.num_missing == 0


def test_every_prompt_can_be_shown_again(tmp_path):
    options = replace(SMALL, straddle=True, distractors=2)
    prepare(replace(options, out=tmp_path)).run()
    for number, row in list(read_rows(tmp_path / RESULTS))[::5]:
        shown = show_prompt(tmp_path, number)
        assert sha256_of(list(shown.ids)) == row["prompt_sha256"]
        if row["needle"] is not None and row["recipe"]["kind"] != "wrong_key":
            assert row["needle"] in shown.text
        assert shown.text.startswith("<|begin_of_text|>")
        assert len(shown.ids) + shown.num_answer_tokens == row["length_actual"]
    with pytest.raises(InputError, match="there is no row 999"):
        show_prompt(tmp_path, 999)


def test_own_needle_in_own_documents(tmp_path):
    book = tmp_path / "handbook.md"
    text = "".join(f"Rule {i}: the door of room {i} stays shut at night.\n" for i in range(300))
    book.write_text(text, encoding="utf-8")
    options = Options(
        lengths=(1024,),
        depths=(0.0, 1.0),
        trials=1,
        haystack=str(book),
        needle="The office cat is called Miso.",
        question="What is the office cat called?",
        answer="Miso",
        answer_prefix="The office cat is called",
        out=tmp_path / "out",
    )
    report = prepare(options).run()
    assert len(report.trials) == 5
    shown = show_prompt(tmp_path / "out", 1)
    assert "stays shut at night" in shown.text
    assert shown.text.endswith("The office cat is called")
    book.write_text(text + "One more rule.\n", encoding="utf-8")
    with pytest.raises(InputError, match="another haystack"):
        show_prompt(tmp_path / "out", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"needle": "A cat."}, "needs --question"),
        ({"needle": "A cat.", "question": "What?"}, "needs --answer"),
        ({"question": "What?"}, "belong to --needle"),
        ({"answer_prefix": "none", "scoring": "forced"}, "needs an answer prefix"),
        ({"lengths": (64,)}, "the smallest length that works is"),
        ({"values": "colour"}, "no kind of value"),
        ({"mode": "sweep", "needle": "A cat.", "question": "?", "answer": "cat"}, "{key}"),
    ],
)
def test_contradictions_are_usage_errors(change, message):
    with pytest.raises(UsageError) as error:
        prepare(replace(SMALL, scoring=change.pop("scoring", "both"), **change))
    assert message in str(error.value)


def test_a_damaged_results_file_is_refused(tmp_path):
    (tmp_path / RESULTS).write_text('{"schema": 1}\nnonsense\n', encoding="utf-8")
    with pytest.raises(InputError, match="line 2 is no row"):
        Store(tmp_path, "x")
    (tmp_path / RESULTS).write_text('{"schema": 1, "status": "ok", "key": "k"}\n', encoding="utf-8")
    with pytest.raises(InputError, match="row 0 is incomplete"):
        load_trials(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("x", encoding="utf-8")
    with pytest.raises(ResourceError, match="cannot write the results"):
        Store(file, "x")


def test_defaults_follow_the_subject():
    test = prepare(Options())
    assert test.design.lengths == (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    assert test.design.mode == "single"
    assert len(test.design.depths) == 11
    rope = prepare(Options(source="pocket-rope"))
    assert rope.design.lengths == (1024, 2048, 4096)
    beyond = prepare(Options(source="pocket-rope", lengths=(8192, 16384)))
    assert any("8k, 16k are beyond the trained window of 4k" in note for note in beyond.notes())


def test_large_models_are_packed_by_default(tiny_models):
    source = str(tiny_models["dense"])
    assert prepare(Options(source=source, lengths=(8192,))).design.mode == "single"
    assert prepare(Options(source=source, lengths=(16384,))).design.mode == "packed"
    own = {"needle": "A cat.", "question": "What?", "answer": "cat"}
    assert prepare(Options(source=source, lengths=(16384,), **own)).design.mode == "single"
