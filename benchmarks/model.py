"""What the decoder costs: loading, memory of a long prefill, speed, routed experts.

Run it as `python benchmarks/model.py [load] [memory] [speed] [experts]`; without a name, all.
Figures of time are CPU seconds of one thread and are compared within one run only; memory is the
peak of resident memory in a process of its own.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from llamatool.config.huggingface import parse_huggingface
from llamatool.model.decoder import Decoder
from llamatool.units import format_bytes

# The shape of SmolLM2-135M: 134,515,008 parameters.
SHAPE_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
}
# A Llama and a Llama 4, for lengths that a CPU can read.
SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
}
SMALL_CHUNKED = {
    **SMALL,
    "model_type": "llama4_text",
    "head_dim": 64,
    "intermediate_size_mlp": 768,
    "moe_layers": [],
    "num_local_experts": 1,
    "attention_chunk_size": 8192,
}


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or ["load", "memory", "speed", "experts"]
    for name in chosen:
        if name.startswith("prefill:"):  # a process of its own, started by `memory`
            print(json.dumps(prefill_in_this_process(json.loads(name.removeprefix("prefill:")))))
        elif name.startswith("load:"):
            print(json.dumps(load_in_this_process(json.loads(name.removeprefix("load:")))))
        else:
            {"load": load, "memory": memory, "speed": speed, "experts": experts}[name]()


def random_model(values: dict[str, object], dtype: torch.dtype) -> Decoder:
    config = parse_huggingface(values, where="a benchmark")
    with torch.device("meta"):
        model = Decoder(config)
    state = {
        name: torch.randn(parameter.shape, dtype=dtype) * 0.02
        for name, parameter in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False)


def asked_elsewhere(question: str) -> dict[str, float]:
    """The answer of a process of its own, whose peak of memory is this question's alone."""
    command = [sys.executable, __file__, question]
    answer: dict[str, float] = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    )
    return answer


# --- load ---


def load() -> None:
    """Seconds until a model is ready, and memory that its weights do not explain."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        model = random_model(SHAPE_135M, torch.bfloat16)
        tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        save_file(tensors, f"{folder}/model.safetensors")
        Path(folder, "config.json").write_text(json.dumps({**SHAPE_135M, "dtype": "bfloat16"}))
        for dtype in ("bfloat16", "float32"):
            answer = asked_elsewhere("load:" + json.dumps({"folder": folder, "dtype": dtype}))
            largest = 49152 * 576 * (2 if dtype == "bfloat16" else 4)
            print(
                f"load 135M as {dtype} from bfloat16: {answer['seconds']:.2f} s, "
                f"{format_bytes(int(answer['peak_bytes']))} of memory for "
                f"{format_bytes(int(answer['weight_bytes']))} of weights "
                f"(pages of the file that were read count too; largest tensor "
                f"{format_bytes(largest)}); first logits after "
                f"{answer['first_seconds']:.2f} s"
            )


def load_in_this_process(question: dict[str, str]) -> dict[str, float]:
    from llamatool.model.load import load_model

    torch.set_num_threads(1)
    torch.nn.functional.rms_norm(torch.ones(2, 2), (2,))  # what torch itself allocates once
    before = start_of_peak()
    start = time.perf_counter()
    model = load_model(question["folder"], device="cpu", dtype=question["dtype"])
    seconds = time.perf_counter() - start
    peak = peak_bytes() - before
    model(torch.tensor([[1, 2, 3]]))
    first_seconds = time.perf_counter() - start
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "seconds": seconds,
        "first_seconds": first_seconds,
        "peak_bytes": peak,
        "weight_bytes": weight_bytes,
    }


# --- memory ---


def memory() -> None:
    """The peak of a prefill above weights and cache does not grow with the prompt."""
    print("prefill, bfloat16, pieces of 2048: peak of resident memory above the weights")
    for name, values in (("full", {**SMALL, "num_hidden_layers": 2}), ("chunked", SMALL_CHUNKED)):
        for num_tokens in (4096, 16384, 65536):
            question = json.dumps({"values": values, "num_tokens": num_tokens})
            answer = asked_elsewhere(f"prefill:{question}")
            kv_bytes = int(answer["kv_bytes"])
            above = int(answer["peak_bytes"]) - kv_bytes
            print(
                f"  {name:8} {num_tokens:6} tokens: KV {format_bytes(kv_bytes):>10}, "
                f"everything else {format_bytes(above):>10}, {answer['seconds']:.1f} s; "
                f"all logits at once would take {format_bytes(num_tokens * 32000 * 4)}"
            )


def prefill_in_this_process(question: dict[str, object]) -> dict[str, float]:
    torch.set_num_threads(1)
    num_tokens = question["num_tokens"]
    assert isinstance(num_tokens, int)
    assert isinstance(question["values"], dict)
    model = random_model(question["values"], torch.bfloat16)
    ids = torch.randint(32000, (1, num_tokens))
    model(ids[:, :2048])  # what torch itself allocates once
    before = start_of_peak()
    start = time.process_time()
    cache = model.new_cache(num_tokens)
    model.prefill(ids, cache)
    seconds = time.process_time() - start
    return {
        "peak_bytes": peak_bytes() - before,
        "kv_bytes": cache.num_bytes,
        "seconds": seconds,
    }


def start_of_peak() -> int:
    """Bytes resident now; what `peak_bytes` tells afterwards counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark begins anew
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most bytes that were resident since `start_of_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    raise SystemExit("this benchmark needs Linux: it reads /proc")


# --- speed ---


def speed() -> None:
    """Prefill and decode of the 135M shape, ours and transformers', in turn."""
    for dtype in (torch.float32, torch.bfloat16):
        speed_in(dtype)


def speed_in(dtype: torch.dtype) -> None:
    import transformers

    ours = random_model(SHAPE_135M, dtype)
    config = transformers.LlamaConfig(**SHAPE_135M)
    theirs = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in theirs.named_parameters():
        parameter.data = ours.state_dict()[name.removeprefix("model.")]
    ids = torch.randint(49152, (1, 512))
    one = ids[:, :1]
    cache = ours.new_cache(2048)
    with torch.no_grad():
        output = theirs(ids, use_cache=True, logits_to_keep=1)
        key = "cache" if hasattr(output, "cache") else "past_key_values"
        past = {key: getattr(output, key)}
        ours(ids, cache=cache)
        prefill = compare(
            lambda: ours(ids), lambda: theirs(ids, use_cache=True, logits_to_keep=1), 3
        )
        decode = compare(
            lambda: ours(one, cache=cache), lambda: theirs(one, use_cache=True, **past), 40
        )
    weights = sum(p.numel() for p in ours.parameters()) * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    print(
        f"135M {name}: prefill of 512 {512 / prefill[0]:.0f} tokens/s, "
        f"{prefill[1] / prefill[0]:.2f} x transformers; "
        f"decode {1 / decode[0]:.1f} tokens/s, weights at {weights / decode[0] / 1e9:.1f} GB/s, "
        f"{decode[1] / decode[0]:.2f} x transformers"
    )


def compare(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """CPU seconds of one call of each: the median of calls in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, seconds in zip((ours, theirs), times, strict=True):
            start = time.process_time()
            function()
            seconds.append(time.process_time() - start)
    return sorted(times[0])[repeats // 2], sorted(times[1])[repeats // 2]


# --- experts ---


def experts() -> None:
    """Routed experts against the dense evaluation of the references."""
    from llamatool.config.layers import MoeSpec
    from llamatool.model.moe import MixtureOfExperts

    moe = MixtureOfExperts(MoeSpec(16, 1, 512), 512, 512).requires_grad_(False)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.02)

    def dense(x: torch.Tensor) -> torch.Tensor:
        logits = moe.router(x[0])
        top = logits.topk(1, dim=-1)
        hidden = torch.full_like(logits, float("-inf"))
        scores = hidden.scatter(-1, top.indices, top.values).sigmoid()
        routed = x[0] * scores.T[:, :, None]
        gate, up = (routed @ moe.experts.gate_up_proj).chunk(2, -1)
        down = (torch.nn.functional.silu(gate) * up) @ moe.experts.down_proj
        return moe.shared_expert(x) + down.sum(0)

    for num_tokens in (1, 512):
        x = torch.randn(1, num_tokens, 512)
        routed, everywhere = compare(lambda x=x: moe(x), lambda x=x: dense(x), 9)
        print(
            f"16 experts, 1 per token, {num_tokens} tokens: "
            f"{everywhere / routed:.1f} x the dense evaluation"
        )


if __name__ == "__main__":
    main()
