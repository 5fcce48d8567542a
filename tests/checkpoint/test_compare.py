"""A folder against its configuration in both layouts, with files that torch itself wrote."""

import json

import pytest
import torch

from llamatool.checkpoint.compare import compare
from llamatool.checkpoint.names import expected_meta_tensors
from llamatool.config.meta import parse_meta
from llamatool.inspection import inspect_source
from llamatool.source import load_source
from tests.config.helpers import params_values

DENSE = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "multiple_of": 32}
DENSE |= {"norm_eps": 1e-5, "vocab_size": 128}


def small_llama4():
    values = params_values("llama-4-scout-17b-16e")
    values.update(
        dim=64, n_layers=4, n_heads=8, n_kv_heads=4, vocab_size=256, multiple_of=32, head_dim=8
    )
    values["moe_args"] = {**values["moe_args"], "num_experts": 4, "interleave_moe_layer_step": 2}
    values["vision_args"] = {**values["vision_args"], "dim": 32, "n_layers": 2, "n_heads": 4}
    return values


def small_vision():
    values = params_values("llama-3.2-11b-vision")
    values.update(dim=64, n_layers=4, n_heads=8, n_kv_heads=4, vocab_size=256, multiple_of=32)
    values["vision_num_cross_attention_layers"] = 2
    return values


def write(folder, values, num_shards, change=None):
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(values))
    config = parse_meta(values, where="params.json")
    for rank in range(num_shards):
        tensors = {
            # One stored element behind each tensor: the vision tower alone would be 1.7 GB.
            name: torch.zeros((1,), dtype=torch.bfloat16).expand(shape)
            for name, shape in expected_meta_tensors(config, num_shards).items()
        }
        if change is not None:
            change(rank, tensors)
        torch.save(tensors, folder / f"consolidated.{rank:02d}.pth")
    return folder


def inspect(folder):
    return inspect_source(load_source(str(folder), with_tensors=True))


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize(
    "values", [DENSE, small_llama4(), small_vision()], ids=["dense", "llama4", "vision"]
)
def test_complete_folders_of_meta(tmp_path, values, num_shards):
    found = inspect(write(tmp_path / "m", values, num_shards))
    report = found.checkpoint
    assert report.num_files == num_shards
    assert (report.missing, report.unexpected, report.ill_shaped) == ((), (), ())
    assert not [note.code for note in found.notes if note.code != "temperature-derived"]


@pytest.mark.parametrize("axis", [0, 1])
def test_both_splits_of_the_embedding_are_right(tmp_path, axis):
    def change(rank, tensors):
        shape = (64, 64) if axis == 0 else (128, 32)
        tensors["tok_embeddings.weight"] = torch.zeros(shape, dtype=torch.bfloat16)

    folder = write(tmp_path / "m", DENSE, 2, change)
    (folder / "params.json").write_text(json.dumps({**DENSE, "vocab_size": -1}))
    found = inspect(folder)
    assert found.config.vocab_size == 128
    assert found.checkpoint.ill_shaped == ()


def test_differences_name_the_rank(tmp_path):
    def change(rank, tensors):
        if rank == 1:
            del tensors["norm.weight"]
            tensors["layers.0.attention.wk.weight"] = torch.zeros((8, 64), dtype=torch.bfloat16)
            tensors["extra"] = torch.zeros((1,), dtype=torch.bfloat16)
            tensors["rope.freqs"] = torch.zeros((4,))

    found = inspect(write(tmp_path / "m", DENSE, 2, change))
    assert found.checkpoint.missing == ("rank 1: norm.weight",)
    assert found.checkpoint.unexpected == ("rank 1: extra",)
    assert found.checkpoint.ill_shaped == (
        "rank 1: layers.0.attention.wk.weight: found (8, 64), expected (16, 64)",
    )
    assert "left-behind" in [note.code for note in found.notes]


def test_a_missing_last_file_is_told(tmp_path):
    folder = write(tmp_path / "m", DENSE, 2)
    (folder / "consolidated.01.pth").unlink()
    notes = {note.code: note.message for note in inspect(folder).notes}
    assert "the shapes are those of 2 files, and 1 is here" in notes["shards-missing"]


def test_a_copy_of_the_output_table_may_be_there_or_not(tmp_path):
    values = params_values("llama-3.2-1b") | {"dim": 2048, "n_layers": 16}
    config = parse_meta(values, where="p")
    assert config.tie_word_embeddings
    assert "output.weight" in expected_meta_tensors(config, 1)


def test_packed_weights_are_not_compared(tmp_path):
    def change(rank, tensors):
        tensors["layers.0.attention.wq.scales"] = torch.zeros((4,))

    found = inspect(write(tmp_path / "m", DENSE, 1, change))
    assert found.checkpoint.compared is False
    assert [note.code for note in found.notes] == ["not-compared"]


def test_a_file_without_tensors_misses_everything(tmp_path):
    def change(rank, tensors):
        tensors.clear()
        tensors["rope.freqs"] = torch.zeros((4,))

    folder = write(tmp_path / "m", DENSE, 1, change)
    loaded = load_source(str(folder), with_tensors=True)
    found = compare(loaded.tables, loaded.config)
    assert len(found.missing) == 3 + 2 * 9
