"""`models`: the list, its filter and its JSON."""

import json

from llamatool.config.catalog import entries
from tests.cli.runner import run


def test_the_list_has_every_model_in_80_columns():
    text = run("models").out
    for entry in entries():
        assert entry.id in text
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_the_filter():
    lines = run("models", "scout").out.splitlines()
    assert len([line for line in lines if line.lstrip().startswith("llama-4-scout")]) == 2
    assert not any("maverick" in line for line in lines)
    ones = run("models", "llama-1").out.splitlines()
    assert [line.split()[0] for line in ones[1:5]] == [
        "llama-1-7b", "llama-1-13b", "llama-1-30b", "llama-1-65b",
    ]  # fmt: skip
    assert ones[5] == ""
    both = run("models", "8b", "instruct").out
    assert "llama-3.1-8b-instruct" in both
    assert "405b" not in both
    assert "405b" not in run("models", "4").out
    missing = run("models", "llama-9")
    assert missing.code == 3
    assert "no published model's name contains `llama-9`" in missing.err


def test_json():
    found = json.loads(run("models", "--json").out)
    assert list(found) == ["schema", "models"]
    rows = {row["model"]: row for row in found["models"]}
    assert len(rows) == len(entries())
    scout = rows["llama-4-scout-17b-16e-instruct"]
    assert sorted(scout) == [
        "active_parameters", "assumed", "generation", "hub_id", "kv_bytes_per_token", "license",
        "max_position_embeddings", "meta_shards", "model", "name", "parameters",
        "published_parameters", "released", "training_tokens", "variant",
    ]  # fmt: skip
    assert scout["parameters"] == scout["published_parameters"] == 108_641_793_536
    assert scout["active_parameters"] == 17_172_894_720
    assert scout["kv_bytes_per_token"] == {"growing": 49_152, "while_in_window": 196_608}
    assert rows["llama-3.1-70b-instruct"]["meta_shards"] == 8
