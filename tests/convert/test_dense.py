"""Llama 1 to 3.3 in both directions, against torch and transformers."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamatool import conversion
from llamatool.errors import LlamatoolError

from . import oracle
from .models import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    convert,
    load_strictly,
    rewrite,
    save_llama,
    shards,
    tensors,
)

PARAMS = {"dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "multiple_of": 64, "norm_eps": 1e-5}
# F = 64 * ceil(int(8 * 128 / 3) * m / 64) with m = 0.5 gives the 192 of the models.
PARAMS |= {"ffn_dim_multiplier": 0.5}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def meta_folder(
    tmp_path: Path,
    *,
    num_shards: int,
    axis: int,
    params: dict[str, Any] | None = None,
    **model: Any,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model of transformers in Meta's layout, by the oracle, and its original tensors."""
    save_llama(tmp_path / "hf", **model)
    hf = tensors(tmp_path / "hf")
    kv_heads = model.get("num_key_value_heads", KV_HEADS)
    made = oracle.dense(
        hf,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=kv_heads,
        num_shards=num_shards,
        embedding_axis=axis,
    )
    values = PARAMS | {"n_kv_heads": kv_heads, "vocab_size": -1 if axis else 512}
    if not axis:
        values["rope_theta"] = 500000.0
    return made.save(tmp_path / "meta", values | (params or {})), hf


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS], ids=["mha", "gqa"])
@pytest.mark.parametrize("axis", [1, 0], ids=["llama-2", "llama-3"])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_meta_to_hugging_face(tmp_path: Path, num_shards: int, axis: int, kv_heads: int) -> None:
    theta = 10000.0 if axis else 500000.0
    meta, expected = meta_folder(
        tmp_path,
        num_shards=num_shards,
        axis=axis,
        num_key_value_heads=kv_heads,
        rope_theta=theta,
    )
    report = convert(meta, tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 512
    assert config["torch_dtype"] == "bfloat16"
    assert config["rope_theta"] == theta
    assert report.conversion.lost == ()


@pytest.mark.parametrize("axis", [1, 0], ids=["llama-2", "llama-3"])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_hugging_face_to_meta(tmp_path: Path, num_shards: int, axis: int) -> None:
    theta = 10000.0 if axis else 500000.0
    meta, _ = meta_folder(tmp_path, num_shards=num_shards, axis=axis, rope_theta=theta)
    convert(tmp_path / "hf", tmp_path / "out", num_shards=num_shards)
    for expected, found in zip(shards(meta), shards(tmp_path / "out"), strict=True):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def test_loads_with_the_same_logits_as_metas_own_formula(tmp_path: Path) -> None:
    """Interleaved RoPE on Meta's rows gives what transformers computes on the converted ones."""
    meta, _ = meta_folder(tmp_path, num_shards=2, axis=0, rope_theta=500000.0, dtype=torch.float32)
    convert(meta, tmp_path / "out")
    model = load_strictly(tmp_path / "out", transformers.LlamaForCausalLM)
    ids = torch.randint(0, 512, (1, 96), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits[0, 64:]
    merged = oracle.dense(
        tensors(tmp_path / "out"),
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        num_shards=1,
        embedding_axis=0,
    ).files[0]
    found = reference_logits(merged, ids[0], theta=500000.0)[64:]
    assert float((found - expected).abs().max()) < 1e-4
    # The test can fail: without the permutation the logits are far off.
    swapped = {
        name: oracle.to_halves(t, HEADS if "wq" in name else KV_HEADS)
        if name.endswith(("wq.weight", "wk.weight"))
        else t
        for name, t in merged.items()
    }
    assert float((reference_logits(swapped, ids[0], 500000.0)[64:] - expected).abs().max()) > 1e-3


def reference_logits(weights: dict[str, torch.Tensor], ids: torch.Tensor, theta: float) -> Any:
    """Meta's block, written from its paper: RMSNorm, complex RoPE, GQA, SwiGLU."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        size = x.shape[-1]
        rates = theta ** (-torch.arange(0, size, 2).double() / size)
        angles = torch.outer(torch.arange(len(ids)).double(), rates).float()
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    x = weights["tok_embeddings.weight"][ids]
    mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)
    for i in range(LAYERS):
        p = f"layers.{i}."
        h = norm(x, weights[p + "attention_norm.weight"])
        q = rotated((h @ weights[p + "attention.wq.weight"].T).view(len(ids), HEADS, -1))
        k = rotated((h @ weights[p + "attention.wk.weight"].T).view(len(ids), KV_HEADS, -1))
        v = (h @ weights[p + "attention.wv.weight"].T).view(len(ids), KV_HEADS, -1)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5 + mask
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + mixed @ weights[p + "attention.wo.weight"].T
        h = norm(x, weights[p + "ffn_norm.weight"])
        gate = torch.nn.functional.silu(h @ weights[p + "feed_forward.w1.weight"].T)
        up = h @ weights[p + "feed_forward.w3.weight"].T
        x = x + (gate * up) @ weights[p + "feed_forward.w2.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["output.weight"].T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_bit_survives(tmp_path: Path, dtype: torch.dtype) -> None:
    """Odd values too: NaN with a payload, minus zero, infinities, denormals."""
    meta, _ = meta_folder(tmp_path, num_shards=2, axis=0, dtype=dtype)
    kind = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for path in sorted(meta.glob("*.pth")):
        content = torch.load(path, weights_only=True)
        for name, tensor in content.items():
            raw = tensor.view(kind)
            if "norm" not in name:
                raw.copy_(torch.randint(-(2**15), 2**15, raw.shape).to(kind) * 65537)
        torch.save(content, path)
    convert(meta, tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "back", num_shards=2, verify="full")
    for expected, found in zip(shards(meta), shards(tmp_path / "back"), strict=True):
        for name, tensor in expected.items():
            assert torch.equal(found[name].view(kind), tensor.view(kind)), name


def test_shared_storage_views_and_rope_freqs(tmp_path: Path) -> None:
    """Llama 1 and 2: one storage per layer, a frequency tensor, a stray file."""
    meta, expected = meta_folder(tmp_path, num_shards=4, axis=1)
    for path in sorted(meta.glob("consolidated.*.pth")):
        content = torch.load(path, weights_only=True)
        flat = torch.cat([tensor.reshape(-1) for tensor in content.values()])
        offset = 0
        views = {}
        for name, tensor in content.items():
            views[name] = flat[offset : offset + tensor.numel()].view(tensor.shape)
            offset += tensor.numel()
        views["rope.freqs"] = torch.rand(4)
        torch.save(views, path)
    torch.save({"step": torch.ones(1)}, meta / "optimizer.pth")
    report = convert(meta, tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert "rope.freqs" in report.conversion.lost[0]


def test_transposed_and_strided_views(tmp_path: Path) -> None:
    meta, expected = meta_folder(tmp_path, num_shards=1, axis=0)
    path = meta / "consolidated.00.pth"
    content = torch.load(path, weights_only=True)
    name = "layers.0.feed_forward.w2.weight"
    content[name] = content[name].t().contiguous().t()
    wide = torch.zeros(content["norm.weight"].numel(), 3, dtype=torch.bfloat16)
    wide[:, 1] = content["norm.weight"]
    content["norm.weight"] = wide[:, 1]
    assert not content[name].is_contiguous()
    torch.save(content, path)
    convert(meta, tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_legacy_format(tmp_path: Path) -> None:
    meta, expected = meta_folder(tmp_path, num_shards=2, axis=0)
    for path in meta.glob("*.pth"):
        content = torch.load(path, weights_only=True)
        torch.save(content, path, _use_new_zipfile_serialization=False)
    convert(meta, tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_tied_model(tmp_path: Path) -> None:
    """Meta stores both tables; Hugging Face one. The bytes say that they are tied."""
    save_llama(tmp_path / "hf", tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "meta", num_shards=2)
    parts = shards(tmp_path / "meta")
    whole = torch.cat([part["output.weight"] for part in parts])
    assert torch.equal(whole, tensors(tmp_path / "hf")["model.embed_tokens.weight"])
    convert(tmp_path / "meta", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"]
    back, expected = tensors(tmp_path / "back"), tensors(tmp_path / "hf")
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())
    load_strictly(tmp_path / "back", transformers.LlamaForCausalLM)


def test_tied_in_name_only(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf", tie_word_embeddings=True)
    content = tensors(tmp_path / "hf")
    content["lm_head.weight"] = torch.randn(512, DIM).bfloat16()
    rewrite(tmp_path / "hf", content)
    with pytest.raises(LlamatoolError, match="is stored and differs"):
        convert(tmp_path / "hf", tmp_path / "meta")
    content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()
    rewrite(tmp_path / "hf", content)
    convert(tmp_path / "hf", tmp_path / "meta")  # an old save with a copy


def test_norms_that_differ_between_shards(tmp_path: Path) -> None:
    """So in Llama 3 70B: the first shard counts, and the loss is told."""
    meta, expected = meta_folder(tmp_path, num_shards=2, axis=0)
    path = meta / "consolidated.01.pth"
    content = torch.load(path, weights_only=True)
    content["norm.weight"] += 0.0625
    torch.save(content, path)
    report = convert(meta, tmp_path / "out")
    assert "by 0.0625 at most" in report.conversion.lost[0]
    assert torch.equal(
        tensors(tmp_path / "out")["model.norm.weight"], expected["model.norm.weight"]
    )
    with pytest.raises(LlamatoolError, match="the shards disagree"):
        convert(meta, tmp_path / "strict", strict_replicas=True)


def test_key_value_heads_stored_twice(tmp_path: Path) -> None:
    """405B for 16 GPUs: 8 heads on 16 ranks, `n_kv_heads` 16."""
    save_llama(tmp_path / "hf", rope_theta=500000.0, num_key_value_heads=4)
    convert(tmp_path / "hf", tmp_path / "meta", num_shards=8)
    assert json.loads((tmp_path / "meta" / "params.json").read_text())["n_kv_heads"] == 8
    parts = shards(tmp_path / "meta")
    key = "layers.0.attention.wk.weight"
    assert parts[0][key].shape == (8, DIM)
    assert torch.equal(parts[0][key], parts[1][key])
    assert not torch.equal(parts[1][key], parts[2][key])
    report = convert(tmp_path / "meta", tmp_path / "back")
    assert "kv-heads-merged" in [note.code for note in report.conversion.notes]
    expected, found = tensors(tmp_path / "hf"), tensors(tmp_path / "back")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    convert(tmp_path / "meta", tmp_path / "kept", keep_replicated_kv=True)
    kept = tensors(tmp_path / "kept")["model.layers.0.self_attn.k_proj.weight"]
    assert kept.shape == (64, DIM)
    load_strictly(tmp_path / "kept", transformers.LlamaForCausalLM)


@pytest.mark.parametrize(("first", "second"), [(1, 8), (8, 2), (4, 2), (2, 4)])
def test_resharding(tmp_path: Path, first: int, second: int) -> None:
    meta, _ = meta_folder(tmp_path, num_shards=first, axis=1)
    convert(meta, tmp_path / "other", to="meta", num_shards=second, verify="full")
    convert(tmp_path / "hf", tmp_path / "expected", num_shards=second)
    for expected, found in zip(
        shards(tmp_path / "expected"), shards(tmp_path / "other"), strict=True
    ):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_files_of_limited_size(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "out", to="hf", shard_bytes=200_000)
    names = [path.name for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert len(names) > 2
    largest = 512 * DIM * 2
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert path.stat().st_size <= max(200_000, largest) + 4096
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.conversion.plan.num_bytes
    assert index["weight_map"].keys() == tensors(tmp_path / "hf").keys()
    load_strictly(tmp_path / "out", transformers.LlamaForCausalLM)
    convert(tmp_path / "out", tmp_path / "one", to="hf")
    expected, found = tensors(tmp_path / "hf"), tensors(tmp_path / "one")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("stored", "wanted", "name"),
    [
        (torch.float32, torch.bfloat16, "bf16"),
        (torch.float32, torch.float16, "fp16"),
        (torch.bfloat16, torch.float32, "fp32"),
        (torch.bfloat16, torch.float16, "fp16"),
        (torch.float16, torch.bfloat16, "bf16"),
    ],
)
def test_casts_are_those_of_torch(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, name: str
) -> None:
    meta, hf = meta_folder(tmp_path, num_shards=2, axis=0, dtype=stored)
    report = convert(meta, tmp_path / "out", dtype=name)
    found = tensors(tmp_path / "out")
    for key, tensor in hf.items():
        assert torch.equal(found[key], tensor.to(wanted)), key
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == str(
        wanted
    ).removeprefix("torch.")
    rounded = sum(int((t.to(wanted).double() != t.double()).sum()) for t in hf.values())
    assert report.written.casts is not None
    assert report.written.casts.num_rounded == rounded


def test_pytorch_bin_files(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    content = tensors(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    content["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
    torch.save(content, tmp_path / "hf" / "pytorch_model.bin")
    report = convert(tmp_path / "hf", tmp_path / "out", to="hf")
    found = tensors(tmp_path / "out")
    content.pop("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert found.keys() == content.keys()
    assert "inv_freq" in report.conversion.lost[0]


def test_params_without_kv_heads_and_vocabulary(tmp_path: Path) -> None:
    """Llama 1 has no `n_kv_heads`, Code Llama no `vocab_size`, and theta may be a million."""
    meta, expected = meta_folder(
        tmp_path, num_shards=2, axis=1, num_key_value_heads=HEADS, params={"rope_theta": 1e6}
    )
    params = json.loads((meta / "params.json").read_text())
    del params["n_kv_heads"], params["vocab_size"]
    (meta / "params.json").write_text(json.dumps(params))
    convert(meta, tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_key_value_heads"], config["vocab_size"]) == (HEADS, 512)
    assert (config["rope_theta"], config["max_position_embeddings"]) == (1e6, 16384)


def test_shapes_win_over_the_formula(tmp_path: Path) -> None:
    meta, expected = meta_folder(tmp_path, num_shards=2, axis=0, params={"ffn_dim_multiplier": 1.0})
    report = convert(meta, tmp_path / "out")
    assert "feed-forward-differs" in [n.code for n in report.conversion.plan.notes]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["intermediate_size"] == 192
    assert tensors(tmp_path / "out").keys() == expected.keys()


@pytest.mark.parametrize("name", ["consolidated.{}.pth", "consolidated.{:04d}.pth"])
def test_names_of_shards(tmp_path: Path, name: str) -> None:
    meta, expected = meta_folder(tmp_path, num_shards=8, axis=0)
    for rank in range(8):
        (meta / f"consolidated.{rank:02d}.pth").rename(meta / name.format(rank))
    convert(meta, tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_more_shards_than_sizes_allow(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    with pytest.raises(LlamatoolError, match="16 heads cannot be shared by 6 shards") as error:
        convert(tmp_path / "hf", tmp_path / "out", num_shards=6)
    assert error.value.hint == "the largest number that works is --mp 4"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention_bias": True}, "Meta's layout has no place for|attention_bias"),
        ({"head_dim": 16}, "head_dim 16"),
        ({"hidden_act": "gelu"}, "hidden_act `gelu`"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "RoPE scaling `linear`",
        ),
    ],
)
def test_what_metas_layout_cannot_hold(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_llama(tmp_path / "hf", **changes)
    with pytest.raises(LlamatoolError, match=expected):
        convert(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_shape_over_any_number_of_files(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Meta to Hugging Face to Meta with other files and back: the same bits, always proven."""
    first, second = (data.draw(st.sampled_from([1, 2, 4, 8])) for _ in range(2))
    kv_heads = data.draw(st.sampled_from([1, 2, 4, 8]))
    heads = max(8, kv_heads * data.draw(st.sampled_from([1, 2, 3])))
    heads = -(-heads // 8) * 8
    dim = heads * data.draw(st.sampled_from([2, 4, 8, 10]))
    width, vocab = (8 * data.draw(st.integers(1, 9)) for _ in range(2))
    axis = data.draw(st.sampled_from([0, 1]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    kv_size = kv_heads * (dim // heads)
    hf = {"model.embed_tokens.weight": random(vocab, dim), "model.norm.weight": random(dim)}
    hf["lm_head.weight"] = random(vocab, dim)
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        for name, shape in (
            ("self_attn.q_proj", (dim, dim)),
            ("self_attn.k_proj", (kv_size, dim)),
            ("self_attn.v_proj", (kv_size, dim)),
            ("self_attn.o_proj", (dim, dim)),
            ("mlp.gate_proj", (width, dim)),
            ("mlp.up_proj", (width, dim)),
            ("mlp.down_proj", (dim, width)),
            ("input_layernorm", (dim,)),
            ("post_attention_layernorm", (dim,)),
        ):
            hf[f"{p}{name}.weight"] = random(*shape)
    shared = {"layers": LAYERS, "heads": heads, "kv_heads": kv_heads, "embedding_axis": axis}
    made = oracle.dense(hf, num_shards=min(first, kv_heads), **shared)
    params = {"dim": dim, "n_layers": LAYERS, "n_heads": heads, "n_kv_heads": kv_heads}
    params |= {"hidden_dim": width, "vocab_size": -1, "norm_eps": 1e-5}
    params |= {"rope_theta": 500000.0} if axis == 0 else {}
    folder = tmp_path_factory.mktemp("any")
    made.save(folder / "meta", params)
    small = {"max_memory_bytes": 1 << 20}  # many tasks for each tensor
    convert(folder / "meta", folder / "hf", **small)
    found = tensors(folder / "hf")
    assert found.keys() == hf.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in hf.items())
    convert(folder / "hf", folder / "other", num_shards=second, verify="full", **small)
    if second <= kv_heads:
        expected = oracle.dense(hf, num_shards=second, **shared).files
        for one, other in zip(expected, shards(folder / "other"), strict=True):
            assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    convert(folder / "other", folder / "back", **small)
    found = tensors(folder / "back")
    assert all(torch.equal(found[name], tensor) for name, tensor in hf.items())


def test_plan_names_every_tensor_once(tmp_path: Path) -> None:
    meta, expected = meta_folder(tmp_path, num_shards=2, axis=0)
    loaded = conversion.load_weights(str(meta))
    plan = conversion.prepare(loaded, conversion.ConvertOptions(with_tokenizer=False)).plan
    written = [target.name for layout in plan.files for target in layout.targets]
    assert sorted(written) == sorted(expected)
