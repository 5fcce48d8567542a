"""Names in every spelling, and the facts of the published models."""

import re

import pytest

from llamatool.config import catalog
from llamatool.config.catalog import by_shape, entries, find, suggest
from tests.config.helpers import GOLDEN


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("Llama 3.1 8B", "llama-3.1-8b"),
        ("LLAMA_3.1_8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b-instruct"),
        ("llama3-8b", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Llama-2-7b-chat-hf", "llama-2-7b-chat"),
        ("CodeLlama-34b-Instruct-hf", "codellama-34b-instruct"),
        ("Code Llama 7B", "codellama-7b"),
        ("Llama 4 Scout", "llama-4-scout-17b-16e"),
        ("llama-4-maverick-instruct", "llama-4-maverick-17b-128e-instruct"),
        ("LlamaGuard-7b", "llama-guard-1-7b"),
        ("llama-1-33b", "llama-1-30b"),
        (" llama-3.3-70b-instruct ", "llama-3.3-70b-instruct"),
    ],
)
def test_a_name_is_found_in_any_spelling(spelling, expected):
    found = find(spelling)
    assert found is not None
    assert found.id == expected


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpt2",
        "llama",
        "org/unknown",
        "llama-5-9b",
        "/",
        "a" * 500,
        "unsloth/Llama-3.1-8B",
        "someone/Meta-Llama-3.1-8B-Instruct",
        "x/codellama-7b",
    ],
)
def test_an_unknown_name_is_not_found(name):
    assert find(name) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lama-3.1-8b", "llama-3.1-8b"),
        ("llama-3.1-8", "llama-3.1-8b"),
        ("lamma-4-scout", None),
        ("scout", "llama-4-scout-17b-16e"),
        ("scot", None),
        ("llama-3", "llama-3-8b"),
        ("someone/llama-3.1-8", "llama-3.1-8b"),
    ],
)
def test_a_near_miss_suggests(name, expected):
    near = suggest(name)
    assert near
    assert expected is None or near[0] == expected


def test_ids_and_hub_names_lead_to_their_own_entry():
    for entry in entries():
        assert find(entry.id) is entry
        assert find(entry.name) is entry
    assert len({entry.id for entry in entries()}) == len(entries())


def test_facts_agree_with_the_reference_data():
    for name, golden in GOLDEN["models"].items():
        entry = find(name)
        if entry is None or entry.id != name or golden.get("license_id") is None:
            continue
        assert entry.released == golden["release_date"], name
        assert entry.meta_shards == golden["meta_shards"], name
        assert entry.config.max_position_embeddings == golden["context"], name
        assert entry.published_total in (None, golden["params"]["total"]), name
        if not entry.generation.startswith("guard") and entry.generation != "1":
            assert entry.license == golden["license_id"], name


def test_every_generation_is_there():
    generations = {entry.generation for entry in entries()}
    for generation in ("1", "2", "code", "3", "3.1", "3.2", "3.2-vision", "3.3", "4"):
        assert generation in generations
    assert {g for g in generations if g.startswith("guard")} == {
        "guard-1",
        "guard-2",
        "guard-3",
        "guard-4",
    }


def test_entries_are_well_formed():
    for entry in entries():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry.released), entry.id
        assert entry.hub_id.count("/") == 1
        assert entry.config.notes == () or entry.id == "llama-guard-4-12b", entry.id
        assert entry.meta_shards in (1, 2, 4, 8, 16)


def test_lookalikes_that_are_published_share_the_shape():
    for entry in entries():
        for name in entry.lookalikes:
            other = find(name)
            if other is not None and other.id == name:
                assert other in by_shape(entry.config), (entry.id, name)


def test_the_data_file_is_what_its_generator_writes(tmp_path, monkeypatch):
    import importlib.util
    from pathlib import Path

    path = Path(__file__).resolve().parents[2] / "tools" / "make_catalog.py"
    spec = importlib.util.spec_from_file_location("make_catalog", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TARGET", tmp_path / "catalog.json")
    module.main()
    written = (tmp_path / "catalog.json").read_bytes()
    assert written == Path(catalog.__file__).with_name("catalog.json").read_bytes()


def test_a_path_that_a_model_was_saved_from_is_read_by_its_last_part():
    assert find("/data/models/Llama-3.3-70B-Instruct").id == "llama-3.3-70b-instruct"
    assert find("./Llama-2-7b-hf").id == "llama-2-7b"
