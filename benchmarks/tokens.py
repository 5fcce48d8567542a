"""Speed of the tokenizers as ratios to the libraries in the same run, and the hard inputs.

    python benchmarks/tokens.py [speed] [runs] [stream] [start] [fuzz]     (without words: not fuzz)

speed   encoding 3 MB: tiktoken and sentencepiece called directly are 1.00
runs    nine inputs of one million characters of one kind
stream  a generated file of 200 MB: time and peak memory of `llamatool tokens --count`
start   CPU and wall time of `llamatool tokens --count` on a small file
fuzz    random strings cut and whole, one million for each tokenizer, with a new start value

Llama 3 and 4 come from the llama-models package, Llama 2 from tests/tokenizers/fetch.py.
"""

import ast
import importlib.util
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llamatool.tokenizers.base import Tokenizer  # noqa: E402
from llamatool.tokenizers.chunks import safe_chunks  # noqa: E402
from llamatool.tokenizers.load import load  # noqa: E402
from llamatool.tokenizers.sentencepiece import SentencePieceTokenizer  # noqa: E402
from llamatool.tokenizers.tiktoken import TiktokenTokenizer  # noqa: E402

MEGABYTES = 3
ROUNDS = 3
MILLION = 1_000_000
RUNS = {
    "a": "a" * MILLION,
    "A": "A" * MILLION,
    "^": "^" * MILLION,
    "newline": "\n" * MILLION,
    "han": "\u4e2d" * MILLION,
    "digit": "7" * MILLION,
    "base64": ("QUJDRGVmZ2hpamts" * (MILLION // 16 + 1))[:MILLION],
    "spaces": " " * MILLION,
    "spaces, x": " " * MILLION + "x",
}


def main() -> None:
    parts = {"speed": speed, "runs": runs, "stream": stream, "start": start, "fuzz": fuzz}
    wanted = sys.argv[1:] or [name for name in parts if name != "fuzz"]
    for name in wanted:
        if name not in parts:
            sys.exit(f"no part {name!r}; there are {', '.join(parts)}")
        parts[name]()
        print()


def tokenizers() -> dict[str, Tokenizer]:
    found: dict[str, Tokenizer] = {}
    for name, path in files().items():
        found[name] = load(path)
    return found


def files() -> dict[str, Path]:
    found = {}
    llama2 = ROOT / ".venv" / "tokenizers" / "llama2" / "tokenizer.model"
    if llama2.is_file():
        found["llama2"] = llama2
    else:
        print("(no Llama 2: python tests/tokenizers/fetch.py)")
    spec = importlib.util.find_spec("llama_models")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for name in ("llama3", "llama4"):
            found[name] = Path(location) / name / "tokenizer.model"
    return found


def speed() -> None:
    """CPU time of one call on the whole text, the best of some rounds, raw and ours in turn."""
    print(f"{'MB/s of CPU time, best of ' + str(ROUNDS):34}{'raw':>8}{'ours':>8}{'ratio':>8}  goal")
    for text_name, text in texts().items():
        size = len(text.encode()) / 1e6
        for name, tokenizer in tokenizers().items():
            raw, ours = library(tokenizer), cold(tokenizer)
            slow, fast = timed(raw, ours, text)
            goal = _goal(tokenizer, text_name)
            label = f"{name}, {text_name}"
            print(f"{label:34}{size / slow:8.2f}{size / fast:8.2f}{slow / fast:8.2f}  {goal}")
    compare_with_tokenizers()


def _goal(tokenizer: Tokenizer, text_name: str) -> str:
    if isinstance(tokenizer, SentencePieceTokenizer):
        return ">= 3" if text_name == "English, 3 MB" else ">= 0.95"
    return ">= 0.9"


def compare_with_tokenizers() -> None:
    """The converted Llama 3 in the tokenizers library, one thread, against our path."""
    from tokenizers import Tokenizer as Engine

    from llamatool.tokenizers.export import export

    path = files().get("llama3")
    if path is None:
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load(path)
    engine = Engine.from_str(export(tokenizer, "json").files["tokenizer.json"].decode())
    engine.encode_special_tokens = True
    for text_name, text in texts().items():
        slow, fast = timed(
            lambda t: engine.encode(t, add_special_tokens=False).ids, tokenizer.encode, text, 1
        )
        size = len(text.encode()) / 1e6
        label = f"llama3 / tokenizers, {text_name}"
        print(f"{label:34}{size / slow:8.2f}{size / fast:8.2f}{slow / fast:8.2f}  >= 3")


def library(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """The library itself."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=tokenizer.data).encode
    assert isinstance(tokenizer, TiktokenTokenizer)
    import tiktoken

    ranks = dict(tokenizer.ranks)
    return tiktoken.Encoding(
        "raw", pat_str=tokenizer.pattern, mergeable_ranks=ranks, special_tokens={}
    ).encode_ordinary


def cold(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Our path with no word remembered from an earlier round."""

    def encode(text: str) -> list[int]:
        if isinstance(tokenizer, SentencePieceTokenizer):
            tokenizer._words.clear()
            tokenizer._skip_blocks = 0
        return tokenizer.encode(text)

    return encode


def timed(
    raw: Callable[[str], list[int]],
    ours: Callable[[str], list[int]],
    text: str,
    rounds: int = ROUNDS,
) -> tuple[float, float]:
    slow, fast = [], []
    for _ in range(rounds):
        expected = _cpu(lambda: raw(text), slow)
        assert _cpu(lambda: ours(text), fast) == expected
    return min(slow), min(fast)


def _cpu(action: Callable[[], list[int]], seconds: list[float]) -> list[int]:
    before = time.process_time()
    result = action()
    seconds.append(time.process_time() - before)
    return result


def texts() -> dict[str, str]:
    """English that repeats no more than prose does, code, Chinese, and words that never repeat."""
    generator = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = (
        "".join(generator.choices(letters, k=generator.randint(2, 10))) for _ in range(450_000)
    )
    limit = MEGABYTES * MILLION
    corpus = (ROOT / "llamatool" / "tokenizers" / "corpus" / "zh-Hans.txt").read_text("utf-8")
    sentences = corpus.split("\n")
    chinese = "\n".join("".join(generator.sample(sentences, 5)) for _ in range(8_000))
    return {
        "English, 3 MB": docstrings(limit),
        "code, 3 MB": "".join(source for source in _sources(limit))[:limit],
        "Chinese": chinese[:MILLION],
        "words that never repeat": " ".join(words)[:limit],
        "English, 10 kB": docstrings(10_000),
    }


def docstrings(limit: int) -> str:
    """English prose: the docstrings of the standard library and of the installed packages."""
    found: dict[str, None] = {}
    size = 0
    for source in _sources(60 * MILLION):
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and text not in found:
                    found[text] = None
                    size += len(text)
        if size > limit:
            break
    return "\n\n".join(found)[:limit]


def _sources(limit: int) -> list[str]:
    sources, size = [], 0
    for folder in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(folder)).rglob("*.py")):
            source = path.read_text("utf-8", errors="replace")
            sources.append(source)
            size += len(source)
            if size > limit:
                return sources
    return sources


def runs() -> None:
    found = tokenizers()
    print(f"{'seconds for 1,000,000 of':24}" + "".join(f"{name:>10}" for name in found))
    for name, text in RUNS.items():
        seconds = []
        for tokenizer in found.values():
            before = time.perf_counter()
            ids = tokenizer.encode(text)
            seconds.append(time.perf_counter() - before)
            assert tokenizer.decode(ids) == text
        print(f"{name:24}" + "".join(f"{s:10.2f}" for s in seconds))


def stream() -> None:
    """200 MB of the built-in corpus and numbers, written once, counted in a process of its own."""
    corpus = ROOT / "llamatool" / "tokenizers" / "corpus"
    pages = [path.read_text("utf-8") for path in sorted(corpus.glob("*.txt"))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "big.txt"
        generator = random.Random(0)
        for megabytes in (20, 200):
            with path.open("w", encoding="utf-8") as file:
                while file.tell() < megabytes * MILLION:
                    file.write(generator.choice(pages) + f"{generator.random()}\n")
            for name, tokenizer in files().items():
                seconds, _, memory, count = _command("--count", str(path), "-t", str(tokenizer))
                print(
                    f"{name}: {megabytes:>4} MB, {int(count):>12,} tokens, {seconds:6.1f} s, "
                    f"peak {memory:5.0f} MiB"
                )


def start() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.txt"
        path.write_text("The river wakes before the town does.\n" * 100)
        times = [_command("--count", str(path)) for _ in range(9)]
    wall, cpu = (statistics.median(run[i] for run in times) for i in (0, 1))
    print(f"llamatool tokens --count FILE: {wall:.2f} s of wall time, {cpu:.2f} s of CPU (median)")
    print("goal 0.6 s; on a busy machine the CPU time is the one to read")


def _command(*arguments: str) -> tuple[float, float, float, str]:
    """Wall seconds, CPU seconds, peak MiB and output of one `llamatool tokens`."""
    code = (
        "import os, resource, subprocess, sys, time\n"
        "before = time.perf_counter()\n"
        "out = subprocess.run(sys.argv[1:], check=True, capture_output=True, text=True).stdout\n"
        "print(time.perf_counter() - before)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime)\n"
        "print(used.ru_maxrss / 1024)\n"
        "print(out)\n"
    )
    tool = [sys.executable, "-m", "llamatool", "tokens", *arguments]
    command = [sys.executable, "-c", code, *tool]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(lines[0]), float(lines[1]), float(lines[2]), lines[3]


def fuzz(num_strings: int = MILLION) -> None:
    from tests.tokenizers.conftest import random_text

    seed = random.SystemRandom().randrange(2**32)
    print(f"start value {seed}")
    for name, tokenizer in tokenizers().items():
        generator = random.Random(seed)
        bad = 0
        for _ in range(num_strings):
            text = random_text(generator)
            ids: list[int] = []
            for part in safe_chunks([text], tokenizer.cut_rule, size=generator.choice((1, 3, 9))):
                ids += tokenizer._encode(part, first=not ids)
            bad += ids != tokenizer.encode(text)
        print(f"{name}: {bad} mismatches in {num_strings:,} random strings")
        if bad:
            sys.exit(1)


if __name__ == "__main__":
    main()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"(this process: peak {peak:.0f} MiB)")
