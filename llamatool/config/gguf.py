"""GGUF metadata to ModelConfig, for the architectures `llama` and `llama4`.

GGUF keeps some facts outside the metadata: the tie of the two vocabulary tables shows in the
absence of `output.weight`, biases in their tensors, and the llama3 scaling of RoPE only in a
tensor of divisors. So this parser also takes the tensors' shapes and these divisors.

Source: llama.cpp convert_hf_to_gguf.py and src/llama-hparams.h; gguf-py constants.py.
"""

import struct
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from llamatool.config.model import (
    MAX_LAYERS,
    ModelConfig,
    MoeConfig,
    Note,
    Origin,
    QuantizationConfig,
    RopeConfig,
    TemperatureConfig,
)
from llamatool.config.reader import Reader
from llamatool.config.rope import inverse_frequencies
from llamatool.errors import ConfigError, UnsupportedError

# What `general.file_type` says about the whole file, where it is not quantised.
_FILE_TYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
# Original contexts and frequency factors that the llama3 scaling was published with.
_LLAMA3_FACTORS = ((1.0, 4.0), (1.0, 1.0))
_LLAMA3_ORIGINAL = 8192
_LLAMA4_NO_ROPE_STEP = 4  # constant in llama.cpp, as is the chunk
_LLAMA4_CHUNK = 8192


def parse_gguf(
    metadata: Mapping[str, object],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    rope_divisors: Sequence[float] | None = None,
) -> ModelConfig:
    """The model that the metadata of a GGUF file describes.

    Args: metadata: arrays as tuples, or as anything with a length. shapes: of all tensors by
    name, slowest dimension first. rope_divisors: the values of `rope_freqs.weight`.
    Raises: ConfigError, naming the key, if a size is missing or wrong; UnsupportedError for
    another architecture.
    """
    file = Reader(_as_json(metadata), where=where)
    arch = file.text("general.architecture")
    if arch is None:
        raise file.missing("general.architecture")
    if arch not in ("llama", "llama4"):
        raise UnsupportedError(
            f"a GGUF file of the architecture `{arch[:60]}`",
            where=where,
            hint="llamatool reads the architectures llama and llama4",
        )
    prefix = arch + "."
    reader = Reader(
        {key[len(prefix) :]: value for key, value in file.values.items() if key.startswith(prefix)},
        where=where,
        path=prefix,
    )
    return _config(arch, file, reader, shapes, rope_divisors)


def _config(
    arch: str,
    file: Reader,
    reader: Reader,
    shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: Sequence[float] | None,
) -> ModelConfig:
    notes: list[Note] = []
    num_layers = reader.size("block_count")
    if num_layers > MAX_LAYERS:
        raise reader.wrong("block_count", num_layers, f"at most {MAX_LAYERS}")
    hidden_size = reader.size("embedding_length")
    num_heads = reader.size("attention.head_count")
    per_layer = _kv_heads(reader, num_heads, num_layers)
    num_kv_heads = max(per_layer)
    head_dim = _head_dim(reader, hidden_size, num_heads)
    vocab_size, rows = _vocab_size(file, reader, shapes, notes)
    llama4 = arch == "llama4"
    no_rope = tuple(range(_LLAMA4_NO_ROPE_STEP - 1, num_layers, _LLAMA4_NO_ROPE_STEP))
    moe = _moe(reader, num_layers, llama4)
    intermediate_size = reader.size("feed_forward_length")
    return ModelConfig(
        model_type="llama4_text" if llama4 else "llama",
        architectures=(),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_key_value_heads_per_layer=per_layer if len(set(per_layer)) > 1 else None,
        head_dim=head_dim,
        intermediate_size=reader.size("expert_feed_forward_length") if moe else intermediate_size,
        intermediate_size_mlp=intermediate_size if llama4 else None,
        vocab_size=vocab_size,
        embedding_rows=rows,
        max_position_embeddings=reader.optional_size("context_length"),
        rms_norm_eps=_single(reader.number("attention.layer_norm_rms_epsilon", 1e-5)),
        hidden_act="silu",
        tie_word_embeddings="output.weight" not in shapes,
        rope=_rope(reader, head_dim, llama4, "rope_freqs.weight" in shapes, rope_divisors, notes),
        dtype=_dtype(file),
        attention_bias="blk.0.attn_q.bias" in shapes,
        attention_output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        # The one published model without the norm is Maverick, which has 128 experts.
        qk_norm="unit" if llama4 and not (moe and moe.num_local_experts == 128) else "none",
        attention_chunk_size=_LLAMA4_CHUNK if llama4 else None,
        no_rope_layers=no_rope if llama4 else (),
        temperature=TemperatureConfig(8192.0, 0.1) if llama4 else None,
        moe=moe,
        quantization=_quantization(file),
        bos_token_id=file.token_id("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos(file),
        pad_token_id=file.token_id("tokenizer.ggml.padding_token_id"),
        name_or_path=file.text("general.name"),
        source_format="gguf",
        origins=_origins(reader),
        present_keys=frozenset(file.values),
        notes=tuple(notes),
    )


def _as_json(metadata: Mapping[str, object]) -> dict[str, Any]:
    """Small arrays as lists, as the readers of JSON configurations expect them."""
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in metadata.items()
    }


def _kv_heads(reader: Reader, num_heads: int, num_layers: int) -> tuple[int, ...]:
    key = "attention.head_count_kv"
    if isinstance(reader.values.get(key), list):
        counts = reader.sizes(key, minimum=1) or ()
        if len(counts) != num_layers:
            raise reader.wrong(key, list(counts), f"a list of {num_layers}")
    else:
        counts = (reader.size(key, num_heads),) * num_layers
    for count in set(counts):
        if num_heads % count:
            raise ConfigError(
                f"`{reader.path}{key}` = {count} does not divide the {num_heads} heads",
                where=reader.where,
            )
    return counts


def _head_dim(reader: Reader, hidden_size: int, num_heads: int) -> int:
    head_dim = reader.optional_size("attention.key_length")
    if head_dim is None:
        if hidden_size % num_heads:
            raise ConfigError(
                f"`{reader.path}attention.head_count` = {num_heads} does not divide"
                f" `embedding_length` = {hidden_size}",
                where=reader.where,
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ConfigError(f"head size {head_dim} is odd: RoPE needs pairs", where=reader.where)
    values = reader.size("attention.value_length", head_dim)
    rotated = reader.size("rope.dimension_count", head_dim)
    if values != head_dim or rotated != head_dim:
        raise UnsupportedError(
            f"heads of {head_dim} elements, of which {rotated} are rotated and whose values have"
            f" {values}",
            where=reader.where,
        )
    return head_dim


def _vocab_size(
    file: Reader, reader: Reader, shapes: Mapping[str, tuple[int, ...]], notes: list[Note]
) -> tuple[int, int]:
    """Size of the vocabulary and rows of the input table; the tensor counts."""
    stated = reader.optional_size("vocab_size")
    tokens = file.values.get("tokenizer.ggml.tokens")
    if stated is None and isinstance(tokens, Sized):
        stated = reader.check_size("vocab_size", len(tokens))
        reader.origins["vocab_size"] = "derived"
    table = shapes.get("token_embd.weight")
    if table is None or len(table) != 2:
        if stated is None:
            raise reader.missing("vocab_size")
        return stated, stated
    rows = reader.check_size("vocab_size", table[0])
    if stated is not None and stated != rows:
        notes.append(
            Note(
                "vocab-rows-differ",
                f"the vocabulary has {stated} entries, the embedding {rows} rows; the rows count",
            )
        )
    if stated != rows:
        reader.origins["vocab_size"] = "derived"
    return rows, rows


def _moe(reader: Reader, num_layers: int, llama4: bool) -> MoeConfig | None:
    num_experts = reader.size("expert_count", 0, minimum=0)
    if not num_experts:
        return None
    if not llama4:
        raise UnsupportedError(
            "a mixture of experts under the architecture `llama` (Mixtral)", where=reader.where
        )
    step = reader.size("interleave_moe_layer_step", 1)
    used = reader.size("expert_used_count", 1)
    if used > num_experts:
        raise reader.wrong("expert_used_count", used, f"at most expert_count = {num_experts}")
    return MoeConfig(num_experts, used, tuple(range(step - 1, num_layers, step)))


def _rope(
    reader: Reader,
    head_dim: int,
    interleaved: bool,
    has_divisors: bool,
    divisors: Sequence[float] | None,
    notes: list[Note],
) -> RopeConfig:
    theta = _single(reader.number("rope.freq_base", 500000.0 if interleaved else 10000.0))
    plain = RopeConfig(theta=theta, interleaved=interleaved)
    kind = reader.text("rope.scaling.type") or "none"
    factor = reader.optional_number("rope.scaling.factor")
    if factor is None:
        factor = reader.optional_number("rope.scale_linear")
    if has_divisors:
        return _llama3(plain, head_dim, divisors, notes)
    if kind == "none" or factor in (None, 1.0):
        return plain
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"RoPE scaling of type `{kind[:40]}`", where=reader.where)
    return RopeConfig(
        theta=theta,
        type=kind,
        factor=factor,
        original_max_position_embeddings=reader.optional_size(
            "rope.scaling.original_context_length"
        ),
        attention_factor=reader.optional_number("rope.scaling.attn_factor"),
        interleaved=interleaved,
    )


def _llama3(
    plain: RopeConfig, head_dim: int, divisors: Sequence[float] | None, notes: list[Note]
) -> RopeConfig:
    """The llama3 scaling whose divisors these are: the largest one is its factor."""
    if divisors is None or len(divisors) != head_dim // 2 or not max(divisors) >= 1:
        notes.append(
            Note("rope-divisors-unread", "`rope_freqs.weight` scales RoPE in an unknown way")
        )
        return plain
    base = inverse_frequencies(plain, head_dim)
    for low, high in _LLAMA3_FACTORS:
        scaled = RopeConfig(
            theta=plain.theta,
            type="llama3",
            factor=float(max(divisors)),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=_LLAMA3_ORIGINAL,
            interleaved=plain.interleaved,
        )
        expected = [b / s for b, s in zip(base, inverse_frequencies(scaled, head_dim), strict=True)]
        if all(abs(e - d) <= 1e-4 * e for e, d in zip(expected, divisors, strict=True)):
            return scaled
    notes.append(
        Note(
            "rope-divisors-unknown",
            "`rope_freqs.weight` fits no published RoPE scaling; it is left out of the figures",
        )
    )
    return plain


def _dtype(file: Reader) -> str | None:
    return _FILE_TYPES.get(file.size("general.file_type", 0, minimum=0))


def _quantization(file: Reader) -> QuantizationConfig | None:
    file_type = file.size("general.file_type", 0, minimum=0)
    if file_type in _FILE_TYPES:
        return None
    return QuantizationConfig("gguf", None, None)


def _eos(file: Reader) -> tuple[int, ...]:
    """The end-of-sequence id, then the ids that also end a turn or a message."""
    ids = [file.token_id(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token for token in ids if token is not None and token >= 0))


def _single(value: float) -> float:
    """A number stored in single precision, as it was written: 9.99999974e-06 -> 1e-05."""
    short = float(f"{value:.7g}")
    return short if struct.pack("<f", short) == struct.pack("<f", value) else value


_NAMES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}


def _origins(reader: Reader) -> dict[str, Origin]:
    origins: dict[str, Origin] = {
        ours: reader.origins[theirs] for theirs, ours in _NAMES.items() if theirs in reader.origins
    }
    origins.setdefault("head_dim", "derived")
    origins["tie_word_embeddings"] = "derived"
    return origins
