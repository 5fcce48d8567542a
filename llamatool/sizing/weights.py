"""Bytes of the weights: in one dtype throughout, or as a quantisation_config packs them."""

import re
from collections.abc import Iterator

from llamatool.config.layers import LayerSpec, plan_layers
from llamatool.config.model import ModelConfig, QuantizationConfig
from llamatool.dtypes import DType, by_name
from llamatool.records import record
from llamatool.sizing.parameters import ParameterCount

# The types that `inspect` prints; any other is `num_bytes` of the total.
PRINTED = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int4")


@record
class StoredWeights:
    """Bytes of the weights in the form that the configuration describes."""

    num_bytes: int
    description: str  # `bfloat16`, or the quantisation and what it leaves out
    exact: bool  # False where the scheme's scales or packing are only estimated


def uniform_bytes(count: ParameterCount) -> dict[str, int]:
    """Bytes of all parameters in each of the usual dtypes.

    Example: Llama 3.1 8B in bfloat16 -> 16060522496 (14.96 GiB).
    """
    return {name: _dtype(name).num_bytes(count.total) for name in PRINTED}


def stored_weights(config: ModelConfig, count: ParameterCount) -> StoredWeights:
    """Bytes of the weights as their files hold them.

    A quantisation packs the linear layers of the decoder, except those it names; embeddings,
    output table, norms, router and image tower stay in the base dtype. The parameter count is
    the same.

    Example: Llama 3.1 405B FP8 -> 487229259776.
    """
    base = _base_dtype(config)
    quantization = config.quantization
    if quantization is None:
        return StoredWeights(base.num_bytes(count.stored), base.name, True)
    if quantization.bits is None:
        return StoredWeights(
            base.num_bytes(count.stored),
            f"{quantization.method}: not understood, sized as {base.name}",
            False,
        )
    packed = packed_elements = 0
    for name, num_rows, num_columns in linear_modules(config):
        if _left_out(name, quantization.modules_to_not_convert):
            continue
        packed_elements += num_rows * num_columns
        packed += _packed_bytes(num_rows, num_columns, quantization)
    if quantization.embedding_bits is not None:
        table = count.by_group["embedding"] + count.by_group.get("lm_head", 0)
        packed_elements += table
        packed += int(table * quantization.embedding_bits) // 8
    total = packed + base.num_bytes(count.stored - packed_elements)
    share = packed_elements / count.total
    return StoredWeights(
        total,
        f"{quantization.method}, {quantization.bits:g} bits, on {share:.0%} of the parameters, "
        f"the rest {base.name}",
        quantization.method in ("fp8", "fbgemm_fp8", "gptq", "awq"),
    )


def linear_modules(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Name, rows and columns of each linear layer of the decoder that a quantiser packs.

    Expert matrices count one by one, under the name of their common module.
    """
    prefix = "language_model.model.layers" if config.vision else "model.layers"
    for layer in plan_layers(config):
        yield from _layer_modules(f"{prefix}.{layer.index}", layer, config.hidden_size)


def _layer_modules(
    prefix: str, layer: LayerSpec, hidden_size: int
) -> Iterator[tuple[str, int, int]]:
    query = layer.num_attention_heads * layer.head_dim
    key = layer.num_key_value_heads * layer.head_dim
    attention = f"{prefix}.{'cross_attn' if layer.attention == 'cross' else 'self_attn'}"
    yield f"{attention}.q_proj", query, hidden_size
    yield f"{attention}.k_proj", key, hidden_size
    yield f"{attention}.v_proj", key, hidden_size
    yield f"{attention}.o_proj", hidden_size, query
    inner = layer.intermediate_size
    if layer.moe is None:
        yield from _mlp_modules(f"{prefix}.mlp", hidden_size, inner)
        return
    for _ in range(layer.moe.num_experts):
        yield from _mlp_modules(f"{prefix}.feed_forward.experts", hidden_size, inner)
    shared = layer.moe.shared_intermediate_size
    yield from _mlp_modules(f"{prefix}.feed_forward.shared_expert", hidden_size, shared)


def _mlp_modules(prefix: str, hidden_size: int, inner: int) -> Iterator[tuple[str, int, int]]:
    yield f"{prefix}.gate_proj", inner, hidden_size
    yield f"{prefix}.up_proj", inner, hidden_size
    yield f"{prefix}.down_proj", hidden_size, inner


def _left_out(name: str, patterns: tuple[str, ...]) -> bool:
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name):
                return True
        elif name == pattern or name.startswith(f"{pattern}.") or f".{pattern}." in f".{name}.":
            return True
    return False


def _packed_bytes(num_rows: int, num_columns: int, quantization: QuantizationConfig) -> int:
    """Bytes of one packed matrix with its scales.

    Sources: transformers integrations/fbgemm_fp8.py (one float32 scale per row) and
    finegrained_fp8.py (one per block); the AutoGPTQ and AutoAWQ layouts (int32 words, float16
    scales and packed zero points per group; GPTQ adds an int32 index per input).
    """
    elements = num_rows * num_columns
    bits = quantization.bits or 0
    weights = int(elements * bits) // 8
    group = quantization.group_size
    if quantization.method in ("fp8", "fbgemm_fp8"):
        if group is None:
            return weights + 4 * num_rows
        side = int(group**0.5)
        return weights + 4 * -(-num_rows // side) * -(-num_columns // side)
    groups = num_rows * (-(-num_columns // group) if group else 1)
    scales = 2 * groups
    zeros = int(groups * bits) // 8 if quantization.zero_points else 0
    index = 4 * num_columns if quantization.method == "gptq" else 0
    return weights + scales + zeros + index


def _base_dtype(config: ModelConfig) -> DType:
    found = by_name(config.dtype) if config.dtype else None
    return found or _dtype("bfloat16")


def _dtype(name: str) -> DType:
    found = by_name(name)
    assert found is not None, name
    return found
