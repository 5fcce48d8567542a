import json
from pathlib import Path

import pytest
import torch

from tests.convert.models import convert, rewrite, save_llama, tensors

from .runner import run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as Hugging Face folder, in Meta's layout, in another type, and changed."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("verify")
    save_llama(home / "hf", dtype=torch.float32)
    convert(home / "hf", home / "meta", num_shards=4)
    convert(home / "hf", home / "bf16", to="hf", dtype="bf16")
    save_llama(home / "changed", dtype=torch.float32)
    content = tensors(home / "changed")
    content["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.25
    content["model.norm.weight"][:2] = 0
    rewrite(home / "changed", content)
    return home


def test_equal_in_two_layouts(folders: Path) -> None:
    result = run("verify", folders / "hf", folders / "meta")
    assert result.code == 0
    elements = sum(tensor.numel() for tensor in tensors(folders / "hf").values())
    assert result.out == f"equal, bit for bit: 21 tensors, {elements:,} elements compared\n"


def test_equal_after_narrowing(folders: Path) -> None:
    result = run("verify", folders / "meta", folders / "bf16", "--json")
    content = json.loads(result.out)
    assert result.code == 0
    assert (content["equal"], content["equal_after_narrowing"]) == (True, 21)


def test_differences_are_listed(folders: Path) -> None:
    result = run("verify", folders / "meta", folders / "changed")
    assert result.code == 1
    assert result.out.startswith("2 tensors differ: 21 tensors,")
    row = next(line for line in result.out.splitlines() if "up_proj" in line)
    assert row.split() == ["model.layers.1.mlp.up_proj.weight", "values", "1", "0.25"]
    found = json.loads(run("verify", folders / "meta", folders / "changed", "--json").out)
    assert list(found) == [
        *("schema", "first", "second", "equal", "tensors", "elements"),
        *("equal_after_narrowing", "differences"),
    ]
    assert found["differences"][0] == {
        "name": "model.norm.weight",
        "kind": "values",
        "elements": 2,
        "of": 128,
        "max_difference": 1.0,
    }


def test_other_models(folders: Path, tmp_path: Path) -> None:
    save_llama(tmp_path / "wider", intermediate_size=256)
    result = run("verify", folders / "hf", tmp_path / "wider")
    assert result.code == 1
    assert "shape" in result.out
    save_llama(tmp_path / "deeper", num_hidden_layers=3, dtype=torch.float32)
    result = run("verify", folders / "hf", tmp_path / "deeper", "--json")
    only = [d for d in json.loads(result.out)["differences"] if d["kind"] == "only in the second"]
    assert len(only) == 9


def test_something_that_is_no_checkpoint(folders: Path) -> None:
    result = run("verify", folders / "hf", "llama-3.1-8b")
    assert result.code == 2
    assert "has no weights here" in result.err
