"""Plans for the published models at their full size, from files that hold only headers.

The files are sparse: they have the size of the model and take no space.
"""

import json
from pathlib import Path

import pytest

from llamatool import conversion, dtypes
from llamatool.checkpoint import names, writers
from llamatool.config.catalog import find
from llamatool.conversion import Conversion, ConvertOptions


def sparse_folder(model: str, folder: Path) -> Path:
    """A Hugging Face folder of a published model, in one file of zeros."""
    entry = find(model)
    assert entry is not None
    kind = dtypes.by_name("bfloat16")
    assert kind is not None
    shapes = names.expected_tensors(entry.config)
    layout = writers.safetensors_layout(
        "model.safetensors", [writers.Target(name, kind, shape) for name, shape in shapes.items()]
    )
    folder.mkdir()
    with (folder / layout.name).open("wb") as stream:
        for offset, content in layout.fixed:
            stream.seek(offset)
            stream.write(content)
        stream.truncate(layout.num_bytes)
    (folder / "config.json").write_text(json.dumps(entry.config_values))
    return folder


def plan_of(source: Path, **options: object) -> Conversion:
    chosen = ConvertOptions(with_tokenizer=False, **options)  # type: ignore[arg-type]
    return conversion.prepare(conversion.load_weights(str(source)), chosen)


@pytest.mark.parametrize(
    ("model", "num_files"),
    [
        ("llama-1-7b", 1),
        ("llama-1-30b", 4),
        ("llama-2-13b", 2),
        ("llama-3.1-8b", 1),
        ("llama-3.1-70b", 8),
        ("llama-3.2-11b-vision", 1),
        ("llama-3.2-90b-vision", 8),
        ("llama-4-scout-17b-16e", 8),
    ],
)
def test_as_many_files_as_published(tmp_path: Path, model: str, num_files: int) -> None:
    assert len(plan_of(sparse_folder(model, tmp_path / "hf")).plan.files) == num_files


@pytest.mark.parametrize(
    ("num_shards", "tensor_bytes", "published"),
    # Sizes of the files consolidated.00.pth that Meta published of Llama 3.1 405B.
    [(8, 101470601216, 101470976045), (16, 51267928064, 51268302389)],
)
def test_files_of_405b_have_the_published_size(
    tmp_path: Path, num_shards: int, tensor_bytes: int, published: int
) -> None:
    made = plan_of(sparse_folder("llama-3.1-405b", tmp_path / "hf"), num_shards=num_shards)
    for layout in made.plan.files:
        assert sum(target.num_bytes for target in layout.targets) == tensor_bytes
        assert abs(layout.num_bytes - published) < 10_000  # the pickle and the zip headers
    params = json.loads(made.small_files["params.json"])
    assert params["n_kv_heads"] == max(8, num_shards)
    assert (params["multiple_of"], params["ffn_dim_multiplier"]) == (4096, 1.2)


def test_rope_factor_of_the_small_models(tmp_path: Path) -> None:
    made = plan_of(sparse_folder("llama-3.2-1b", tmp_path / "hf"))
    assert "RoPE factor 32" in made.lost[0]
    written = [target.name for target in made.plan.files[0].targets]
    assert "output.weight" in written  # as in Meta's own files, although it is tied
    params = json.loads(made.small_files["params.json"])
    assert params["use_scaled_rope"] is True
    assert "rope_scaling_factor" not in params


def test_name_of_a_model_settles_what_the_file_leaves_open(tmp_path: Path) -> None:
    source = sparse_folder("llama-3.1-8b", tmp_path / "hf")
    made = plan_of(source, model="Llama 3 8B")
    assert made.config.rope.type == "default"


def test_code_llama_keeps_its_theta(tmp_path: Path) -> None:
    params = json.loads(
        plan_of(sparse_folder("codellama-7b", tmp_path / "hf")).small_files["params.json"]
    )
    assert (params["rope_theta"], params["vocab_size"]) == (1000000.0, 32016)


def test_memory_and_time_do_not_grow_with_the_model(tmp_path: Path) -> None:
    """A plan holds places, not data: 405B in some thousand blocks."""
    made = plan_of(sparse_folder("llama-3.1-405b", tmp_path / "hf"), num_shards=8)
    assert len(made.plan.blocks) < 20_000
    assert made.plan.num_bytes > 800e9
