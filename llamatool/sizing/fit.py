"""Does it fit, how many tokens and how many users fit, and what is in the way.

One inequality, for the fullest of the equal devices that share a model by tensor parallelism:

    memory x utilization >= weights + runtime + activations + KV cache

Every answer is found by searching this inequality itself, pages and windows included: the curve
of a chunked or sliding model is not a line, so nothing is divided.
"""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Literal

from llamatool.config.layers import LayerSpec, possible_splits, split_layers
from llamatool.config.model import ModelConfig
from llamatool.dtypes import DType
from llamatool.errors import UsageError
from llamatool.records import record
from llamatool.sizing.hardware import GPUS, Machine
from llamatool.sizing.kv_cache import (
    DEFAULT_MAX_BATCHED_TOKENS,
    KvGroup,
    Policy,
    held_tokens,
    kv_cache,
)
from llamatool.sizing.ranks import rank_parameters

Binding = Literal["weights", "kv_cache", "context"]

PAGE_TOKENS = 16  # tokens of one page of a paged cache
UTILIZATION = Fraction(9, 10)  # share of a GPU's memory that an engine takes for itself
UNIFIED_UTILIZATION = Fraction(3, 4)  # macOS leaves about a quarter of unified memory to the CPU
RUNTIME_BYTES = 2**29  # driver context, kernels and communication buffers: an assumption
ACTIVATION_BYTES = 2  # bytes of one element of an activation: bfloat16 or float16
LOGIT_BYTES = 4  # logits are float32
DEVICE_COUNTS = (1, 2, 4, 8)  # sets that the search for the smallest machine tries

_MAX_TOKENS = 2**40  # beyond any context; a cache that fits even then is not limited by memory
_MAX_SEQUENCES = 2**30


@record
class Weights:
    """Weight bytes by what tensor parallelism does with them, and what a step reads.

    Of weights in one type throughout, a rank's part is counted tensor by tensor (sizing/ranks.py).
    A quantised file mixes types, and its part is estimated by `per_rank_bytes`.
    """

    sharded_bytes: int  # cut into as many parts as there are ranks
    replicated_bytes: int  # whole on every rank: norms and routers
    kv_projections: tuple[tuple[int, int], ...] = ()  # (KV heads, bytes): cut by KV heads only
    read_share: Fraction = Fraction(1)  # part that one decode step reads
    dtype: DType | None = None  # of every parameter; None: of several types

    @property
    def total_bytes(self) -> int:
        """Bytes on one device."""
        return self.per_rank_bytes(1)

    def per_rank_bytes(self, tensor_parallel: int) -> int:
        """Bytes on the fullest rank: an estimate, as if every matrix could be cut anywhere.

        sharded / ranks + replicated + for each projection to keys or values: bytes x
        ceil(KV heads / ranks) / KV heads

        Example: Llama 3.1 70B in bfloat16 on two ranks -> 70555025408.
        """
        projections = sum(
            Fraction(num_bytes * -(-heads // tensor_parallel), heads)
            for heads, num_bytes in self.kv_projections
        )
        sharded = Fraction(self.sharded_bytes, tensor_parallel) + projections
        return -(-sharded.numerator // sharded.denominator) + self.replicated_bytes


@record
class Load:
    """What is asked to fit: the sequences and their lengths."""

    num_tokens: int  # of one sequence
    batch_size: int = 1  # sequences at the same time
    num_images: int = 0  # in each sequence


@record
class Assumptions:
    """What is assumed about the engine; each can be set, and each is shown."""

    utilization: Fraction | None = None  # None: 9/10, of unified memory 3/4
    overhead_bytes: int | None = None  # all but weights and KV cache; None: estimated
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS
    policy: Policy = "capped"
    page_tokens: int = PAGE_TOKENS


DEFAULTS = Assumptions()


@record
class Line:
    """One line of the equation that a person can check by hand."""

    sign: str
    label: str
    num_bytes: int
    how: str = ""
    estimate: bool = False


@record
class Fit:
    """The answer for one model on one machine; bytes are those of the fullest device."""

    machine: Machine
    tensor_parallel: int
    utilization: Fraction
    load: Load
    usable_bytes: int  # memory x utilization
    weights_bytes: int
    runtime_bytes: int
    activation_bytes: int
    kv_budget_bytes: int  # what is left for the cache; negative if nothing is
    kv_bytes: int  # of the asked load, pages whole
    spare_bytes: int  # negative if it does not fit in memory
    max_position_embeddings: int | None
    fits_memory: bool
    fits: bool  # in memory and in the trained context
    binding: Binding  # what is in the way, or what will be with more tokens
    max_tokens_in_memory: int | None  # per sequence at the asked batch; None: memory is no limit
    max_tokens: int | None  # the same within the trained context
    needed_at_most: int | None  # bytes of everything at max_tokens_in_memory
    needed_beyond: int | None  # the same with one page more: above usable_bytes
    page_tokens: int
    max_batch_size: int  # sequences of the asked length
    read_bytes: int  # that one decode step must read
    decode_tokens_per_second: int | None  # upper bound, of all sequences together
    equation: tuple[Line, ...]
    smallest: Machine | None = None  # of the table, searched when it does not fit


def fit(
    config: ModelConfig,
    layers: Sequence[LayerSpec],
    weights: Weights,
    machine: Machine,
    load: Load,
    *,
    kv_dtype: str = "bfloat16",
    assumptions: Assumptions = DEFAULTS,
) -> Fit:
    """Whether a model fits a machine, and the most that does.

    Raises: UsageError if the utilization is not above 0 and at most 1, a count is not positive, or
    so many devices cannot share the model.
    Example: Llama 3.1 8B on 24 GiB, utilization 0.9, overhead 0 -> 54400 tokens at most.
    """
    check(load, assumptions)
    _check_policy(assumptions.policy)
    rank = _Rank(config, layers, weights, machine.count, kv_dtype)
    problem = _Problem(rank, machine, load, assumptions)
    kv = problem.kv_bytes(load.num_tokens, load.batch_size)
    activation = problem.activation_bytes(load.num_tokens, load.batch_size)
    kv_budget = problem.usable_bytes - problem.fixed_bytes - activation
    in_memory = problem.max_tokens()
    page = problem.assumptions.page_tokens
    context = config.max_position_embeddings
    fits_memory = kv <= kv_budget
    fits_context = context is None or load.num_tokens <= context
    return Fit(
        machine=machine,
        tensor_parallel=machine.count,
        utilization=problem.utilization,
        load=load,
        usable_bytes=problem.usable_bytes,
        weights_bytes=rank.weights_bytes,
        runtime_bytes=problem.runtime_bytes,
        activation_bytes=activation,
        kv_budget_bytes=kv_budget,
        kv_bytes=kv,
        spare_bytes=kv_budget - kv,
        max_position_embeddings=context,
        fits_memory=fits_memory,
        fits=fits_memory and fits_context,
        binding=_binding(kv_budget, fits_memory, fits_context, in_memory, context),
        max_tokens_in_memory=in_memory,
        max_tokens=_within(in_memory, context),
        needed_at_most=None if in_memory is None else problem.needed(in_memory),
        needed_beyond=None if in_memory is None else problem.needed(in_memory + page),
        page_tokens=page,
        max_batch_size=problem.max_batch_size(),
        read_bytes=problem.read_bytes(),
        decode_tokens_per_second=problem.decode_tokens_per_second(),
        equation=problem.equation(),
    )


def smallest_machine(
    config: ModelConfig,
    layers: Sequence[LayerSpec],
    weights: Weights,
    load: Load,
    *,
    kv_dtype: str = "bfloat16",
    assumptions: Assumptions = DEFAULTS,
) -> Machine | None:
    """The set of listed devices with the least memory on which the load fits in memory.

    Sets of 1, 2, 4 and 8 equal devices are tried where so many can share the model, unified memory
    only alone; of two with the same memory the one with fewer devices. None if not even the largest
    is enough.
    """
    check(load, assumptions)
    _check_policy(assumptions.policy)
    ranks = {
        count: _Rank(config, layers, weights, count, kv_dtype) for count in _device_counts(layers)
    }
    for machine in _machines(ranks):
        problem = _Problem(ranks[machine.count], machine, load, assumptions)
        if problem.fits(load.num_tokens, load.batch_size):
            return machine
    return None


def largest_machine(layers: Sequence[LayerSpec]) -> Machine:
    """The set of listed devices with the most memory that can share this model."""
    return _machines(_device_counts(layers))[-1]


def activation_bytes(
    config: ModelConfig,
    layers: Sequence[LayerSpec],
    num_tokens: int,
    *,
    num_sequences: int = 1,
    tensor_parallel: int = 1,
) -> int:
    """Bytes of activations at the peak of a prefill step of `num_tokens` tokens: an estimate.

    tokens x 2 x (2 hidden_size + the larger of attention and feed-forward / ranks) + the logits
    of the last position of each sequence, 4 x vocab_size. Attention holds q, k, v and its output;
    a feed-forward gate, up and their product; a layer with experts those of the routed and the
    shared ones, and one more row per routed expert. Scores are not stored (fused attention).

    Example: Llama 3.1 8B, 8192 tokens -> 839373824 (8192 x 2 x (8192 + 43008) + 513024).
    """
    width = _step_width(layers, config.hidden_size, tensor_parallel)
    return num_tokens * ACTIVATION_BYTES * width + num_sequences * LOGIT_BYTES * config.vocab_size


class _Rank:
    """One of some equal tensor-parallel ranks: what it holds, whatever device it is."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[LayerSpec],
        weights: Weights,
        count: int,
        kv_dtype: str,
    ) -> None:
        self.cache = kv_cache(split_layers(layers, count), dtype=kv_dtype, vision=config.vision)
        self.weights = weights
        self.weights_bytes = (
            weights.per_rank_bytes(count)
            if weights.dtype is None
            else weights.dtype.num_bytes(rank_parameters(config, count))
        )
        self.step_bytes_per_token = ACTIVATION_BYTES * _step_width(
            layers, config.hidden_size, count
        )
        self.logit_bytes = LOGIT_BYTES * config.vocab_size


class _Problem:
    """The inequality, its terms as functions of tokens and sequences."""

    def __init__(self, rank: _Rank, machine: Machine, load: Load, assumptions: Assumptions) -> None:
        default = UNIFIED_UTILIZATION if machine.gpu.unified else UTILIZATION
        given = assumptions.overhead_bytes
        self.rank = rank
        self.machine = machine
        self.load = load
        self.assumptions = assumptions
        self.utilization = assumptions.utilization or default
        self.usable_bytes = int(machine.gpu.memory_bytes * self.utilization)
        self.runtime_bytes = RUNTIME_BYTES if given is None else given
        self.fixed_bytes = rank.weights_bytes + self.runtime_bytes

    def kv_bytes(self, num_tokens: int, batch_size: int) -> int:
        return self.rank.cache.num_bytes(
            num_tokens,
            batch_size=batch_size,
            num_images=self.load.num_images,
            policy=self.assumptions.policy,
            max_batched_tokens=self.assumptions.max_batched_tokens,
            page_tokens=self.assumptions.page_tokens,
        )

    def activation_bytes(self, num_tokens: int, batch_size: int) -> int:
        if self.assumptions.overhead_bytes is not None:
            return 0  # the given overhead stands for them too
        step = self.step_tokens(num_tokens, batch_size)
        return step * self.rank.step_bytes_per_token + batch_size * self.rank.logit_bytes

    def step_tokens(self, num_tokens: int, batch_size: int) -> int:
        """Tokens of one prefill step, in whole pages like the cache they go into."""
        page = self.assumptions.page_tokens
        pages = -(-num_tokens // page) * page
        return min(pages * batch_size, self.assumptions.max_batched_tokens)

    def fits(self, num_tokens: int, batch_size: int) -> bool:
        return self.needed(num_tokens, batch_size) <= self.usable_bytes

    def needed(self, num_tokens: int, batch_size: int | None = None) -> int:
        """Bytes of everything, for sequences of `num_tokens` tokens (as many as were asked)."""
        sequences = batch_size or self.load.batch_size
        held = self.kv_bytes(num_tokens, sequences)
        return self.fixed_bytes + held + self.activation_bytes(num_tokens, sequences)

    def max_tokens(self) -> int | None:
        """The most whole pages of tokens in memory, or None where memory sets no limit."""
        page = self.assumptions.page_tokens
        batch_size = self.load.batch_size
        limit = _MAX_TOKENS // page
        pages = _largest(lambda count: self.fits(count * page, batch_size), limit)
        return None if pages == limit else pages * page

    def max_batch_size(self) -> int:
        return _largest(lambda count: self.fits(self.load.num_tokens, count), _MAX_SEQUENCES)

    def decode_tokens_per_second(self) -> int | None:
        """Bandwidth / bytes that one step must read: no engine can be faster."""
        bandwidth = self.machine.gpu.bandwidth
        if bandwidth is None:
            return None
        return self.load.batch_size * bandwidth // max(self.read_bytes(), 1)

    def read_bytes(self) -> int:
        """Bytes that one decode step reads at the least.

        Windowed layers read what they can see, and a mixture of experts the experts of one token,
        however many sequences there are.
        """
        read = int(self.rank.weights_bytes * self.rank.weights.read_share)
        return read + self.rank.cache.num_bytes(
            self.load.num_tokens,
            batch_size=self.load.batch_size,
            num_images=self.load.num_images,
            policy="live_chunk_only",
        )

    def equation(self) -> tuple[Line, ...]:
        load = self.load
        gpu = self.machine.gpu
        ranks = self.machine.count
        activation = self.activation_bytes(load.num_tokens, load.batch_size)
        budget = self.usable_bytes - self.fixed_bytes - activation
        kv = self.kv_bytes(load.num_tokens, load.batch_size)
        return (
            Line("", "memory", gpu.memory_bytes, gpu.memory_source),
            Line("", "usable", self.usable_bytes, f"x {_decimal(self.utilization)}"),
            self._weights_line(ranks),
            *self._overhead_lines(activation),
            Line("=", "left for KV cache", budget),
            Line("-", "KV cache", kv, self._kv_how()),
            Line("=", "spare", budget - kv),
        )

    def _overhead_lines(self, activation: int) -> tuple[Line, ...]:
        if self.assumptions.overhead_bytes is not None:
            return (Line("-", "overhead", self.runtime_bytes, "as given"),)
        step = self.step_tokens(self.load.num_tokens, self.load.batch_size)
        return (
            Line("-", "runtime", self.runtime_bytes, "assumed", estimate=True),
            Line("-", "activations", activation, f"prefill of {step:,} tokens", estimate=True),
        )

    def _weights_line(self, ranks: int) -> Line:
        weights = self.rank.weights
        if ranks == 1:
            return Line("-", "weights", self.rank.weights_bytes)
        how = f"of {weights.total_bytes:,} on {ranks}"
        return Line("-", "weights", self.rank.weights_bytes, how, estimate=weights.dtype is None)

    def _kv_how(self) -> str:
        load = self.load
        held = self.kv_terms()
        images = f" + {load.num_images} images x {self.rank.cache.bytes_per_image:,}"
        each = held + (images if load.num_images and self.rank.cache.bytes_per_image else "")
        if load.num_tokens % self.assumptions.page_tokens:
            each += f" (pages of {self.assumptions.page_tokens})"
        return f"{load.batch_size} x ({each})" if load.batch_size > 1 else each

    def kv_terms(self) -> str:
        """The cache of one sequence, written out: `49,152 x 100,000 + 147,456 x 8,192`."""
        return " + ".join(
            f"{group.bytes_per_token:,} x {self._held(group):,}" for group in self.rank.cache.groups
        )

    def _held(self, group: KvGroup) -> int:
        how = self.assumptions
        return held_tokens(
            group, self.load.num_tokens, how.policy, how.max_batched_tokens, how.page_tokens
        )


def check(load: Load, assumptions: Assumptions) -> None:
    """Refuses a question that makes no sense.

    Raises: UsageError saying which part does not.
    """
    if load.num_tokens < 1:
        raise UsageError("the number of tokens must be at least 1")
    if not 1 <= load.batch_size <= _MAX_SEQUENCES:
        raise UsageError(f"the number of sequences must be 1 to {_MAX_SEQUENCES:,}")
    if not 0 <= load.num_images <= _MAX_SEQUENCES:
        raise UsageError(f"the number of images must be 0 to {_MAX_SEQUENCES:,}")
    share = assumptions.utilization
    if share is not None and not 0 < share <= 1:
        raise UsageError("the utilization must be above 0 and at most 1")
    if assumptions.max_batched_tokens < 1 or assumptions.page_tokens < 1:
        raise UsageError("batched tokens and the tokens of a page must be at least 1")


def _check_policy(policy: Policy) -> None:
    if policy == "live_chunk_only":
        # While a sequence grows to its length, its chunk has once been full.
        raise UsageError(
            "`live_chunk_only` is no budget: every chunk is full once while it is read",
            hint="say capped, no_eviction or vllm_hybrid",
        )


def _binding(
    kv_budget: int,
    fits_memory: bool,
    fits_context: bool,
    in_memory: int | None,
    context: int | None,
) -> Binding:
    if kv_budget < 0:
        return "weights"
    if not fits_memory:
        return "kv_cache"
    if not fits_context:
        return "context"
    if context is not None and (in_memory is None or in_memory >= context):
        return "context"
    return "kv_cache"


def _within(in_memory: int | None, context: int | None) -> int | None:
    if in_memory is None:
        return context
    return in_memory if context is None else min(in_memory, context)


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """The largest count up to `limit` for which `holds`; 0 if it does not even hold for 1."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _step_width(layers: Sequence[LayerSpec], hidden_size: int, ranks: int) -> int:
    """Elements that one token of a prefill step needs at the widest layer, on one rank."""
    return 2 * hidden_size + max(_inner_width(layer, hidden_size, ranks) for layer in layers)


def _inner_width(layer: LayerSpec, hidden_size: int, ranks: int) -> int:
    """Elements per token inside the wider half of a layer, on one rank."""
    query = layer.num_attention_heads * layer.head_dim
    attention = -(-2 * query // ranks) + 2 * -(-layer.num_key_value_heads // ranks) * layer.head_dim
    if layer.moe is None:
        return max(attention, -(-3 * layer.intermediate_size // ranks))
    routed = layer.moe.num_experts_per_tok
    inner = 3 * (routed * layer.intermediate_size + layer.moe.shared_intermediate_size)
    return max(attention, -(-inner // ranks) + routed * hidden_size)


def _device_counts(layers: Sequence[LayerSpec]) -> list[int]:
    splits = possible_splits(layers)
    return [count for count in DEVICE_COUNTS if count in splits]


def _machines(counts: Iterable[int]) -> list[Machine]:
    sets = [
        Machine(gpu, count) for gpu in GPUS for count in counts if count == 1 or not gpu.unified
    ]
    return sorted(sets, key=lambda machine: (machine.memory_bytes, machine.count))


def _decimal(share: Fraction) -> str:
    return f"{float(share):g}"
