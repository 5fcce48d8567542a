"""Answers of a real model: greedy ids are those of transformers, one seed gives one text."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import llamatool  # noqa: E402
from llamatool.errors import InputError, UnsupportedError, UsageError  # noqa: E402
from llamatool.generate.engine import Plan, Run, fit_context  # noqa: E402
from llamatool.generate.formats import Message  # noqa: E402
from llamatool.generate.prompt import Writing, encode_raw  # noqa: E402
from llamatool.generate.sampling import Sampling  # noqa: E402
from llamatool.generate.stats import bandwidth, measure, weight_bytes_per_token  # noqa: E402
from llamatool.generate.text_model import TextModel, load_generator  # noqa: E402
from tests.model.tiny_models import BY_NAME, DENSE, Tiny  # noqa: E402
from tests.tokenizers.conftest import smollm_file  # noqa: E402

PROMPTS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three prime numbers.",
    "\u4e2d\u56fd\u7684\u9996\u90fd\u662f\u54ea\u91cc\uff1f",
    "def fibonacci(n):",
]
NUM_TOKENS = 64


def greedy(model: TextModel, text: str) -> list[int]:
    plan = Plan(Sampling(0.0), NUM_TOKENS, frozenset())
    return [i for (i,) in Run(model.decoder, [model.prompt(text).ids], plan, step=model.step)]


@pytest.fixture(scope="module")
def our_ids(smollm: TextModel) -> list[list[int]]:
    """64 greedy ids for each prompt, whatever stops there are."""
    return [greedy(smollm, text) for text in PROMPTS]


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_greedy_ids_are_those_of_transformers(number: int, our_ids, smollm, theirs: Any) -> None:
    """Its own loop for the first prompt. For the others one pass over prompt and answer: if the
    most likely token behind every position is the next one, the loop would write the same.
    """
    prompt, ours = list(smollm.prompt(PROMPTS[number]).ids), our_ids[number]
    assert len(ours) == NUM_TOKENS
    if number == 0:
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert ours == out[0, len(prompt) :].tolist()
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt + ours])).logits[0]
    assert ours == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face folder that `convert` makes of the GGUF."""
    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    command = [sys.executable, "-m", "llamatool", "convert", str(smollm_file()), str(folder)]
    done = subprocess.run([*command, "--dtype", "fp32"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return folder


def test_greedy_ids_from_the_converted_folder(converted: Path, smollm, our_ids) -> None:
    """The loop for the first prompt, one pass for the others, as above."""
    model = load_generator(converted, device="cpu", dtype="float32")
    assert (model.layout, model.writing.mode) == ("huggingface", "chat")
    assert greedy(model, PROMPTS[0]) == our_ids[0]
    for text, ours in zip(PROMPTS, our_ids, strict=True):
        assert model.prompt(text) == smollm.prompt(text)
        ids = torch.tensor([[*model.prompt(text).ids, *ours[:-1]]])
        logits = model.decoder(ids, logits_to_keep=NUM_TOKENS)[0]
        assert ours == logits.argmax(-1).tolist()


def test_paris(smollm: TextModel) -> None:
    answer = smollm.generate(PROMPTS[0], temperature=0)
    assert "Paris" in answer.text
    assert answer.stop_reason == "stop_token"
    assert 2 not in answer.output_ids
    assert answer.text == smollm.tokenizer.decode(answer.output_ids)


def test_streamed_pieces_add_up(smollm: TextModel) -> None:
    answer = smollm.stream("Say it in Chinese: hello", seed=3, temperature=1.2, max_new_tokens=40)
    pieces = list(answer)
    assert "".join(pieces) == answer.result.text
    assert answer.result.text == smollm.tokenizer.decode(answer.result.output_ids)
    assert all(pieces)


def test_one_seed_one_text(smollm: TextModel) -> None:
    def text(seed: int) -> str:
        return smollm.generate("Tell a story.", seed=seed, temperature=1.0, max_new_tokens=24).text

    first = text(1)
    torch.manual_seed(99)
    assert text(1) == first
    assert text(2) != first


def test_stop_texts_end_the_answer(smollm: TextModel) -> None:
    whole = smollm.generate(PROMPTS[0], temperature=0).text
    answer = smollm.generate(PROMPTS[0], temperature=0, stops=["of Fra", "Paris"])
    assert answer.text == whole[: whole.index("of Fra")]
    assert answer.stop_reason == "stop_text"


def test_a_conversation_goes_on(smollm: TextModel) -> None:
    turns = [
        Message("user", "My name is Ada."),
        Message("assistant", "Hello Ada!"),
        Message("user", "What is my name?"),
    ]
    answer = smollm.generate(turns, system="Be brief.", temperature=0, max_new_tokens=2)
    assert smollm.tokenizer.decode(answer.prompt_ids, specials=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nMy name is Ada.<|im_end|>\n"
        "<|im_start|>assistant\nHello Ada!<|im_end|>\n"
        "<|im_start|>user\nWhat is my name?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_raw_mode_refuses_what_only_chat_has(smollm: TextModel) -> None:
    raw = TextModel(
        smollm.decoder, smollm.tokenizer, writing=Writing("raw", "as asked for"),
        settings=smollm.settings, name="raw",
    )  # fmt: skip
    raw.step = smollm.step
    assert raw.prompt("hi") == encode_raw("hi", smollm.tokenizer)
    with pytest.raises(UsageError, match="a system text needs a chat model"):
        raw.prompt("hi", system="x")
    with pytest.raises(UsageError, match="a conversation needs a chat model"):
        raw.prompt([Message("user", "hi")])


def test_context_is_a_hard_limit() -> None:
    assert fit_context(8000, None, 8192) == 192
    assert fit_context(100, None, 8192) == 512
    assert fit_context(100, 400, None) == 400
    assert fit_context(8000, 500, 8192, beyond_context=True) == 500
    with pytest.raises(InputError, match=r"8,000 tokens and 500 new tokens .* 8,192 tokens"):
        fit_context(8000, 500, 8192)
    with pytest.raises(InputError, match="of 8,192 tokens leaves no room"):
        fit_context(8192, None, 8192)


def test_rows_of_equal_length_are_answered_as_alone() -> None:
    """huggingface/transformers#22312, #33095: no pad token and no padding at all."""
    _, model = BY_NAME["gqa"].build()
    plan = Plan(Sampling(0.9, 0.95), 12, frozenset())
    prompts = [[3, 4, 5], [9, 8, 7], [1, 1, 1]]
    together = list(Run(model, prompts, plan, seeds=(5, 6, 7)))
    for row, (prompt, seed) in enumerate(zip(prompts, (5, 6, 7), strict=True)):
        alone = [i for (i,) in Run(model, [prompt], plan, seeds=(seed,))]
        assert [ids[row] for ids in together] == alone


def test_ids_without_a_row_are_refused() -> None:
    """huggingface/transformers#23401: an added pad id at or above the rows of the table."""
    _, model = BY_NAME["gqa"].build()
    with pytest.raises(InputError, match="token id 97 has no embedding"):
        list(Run(model, [[1, 97]], Plan(Sampling(0.0), 4, frozenset())))


def test_logits_that_overflow_are_said_to() -> None:
    """meta-llama/llama#380, JIA-Lab/LongLoRA#165, haotian-liu/LLaVA#886."""
    _, model = Tiny("", "Llama", DENSE).build(dtype=torch.float16)
    model.norm.weight.data.fill_(60000.0)
    with pytest.raises(UnsupportedError, match=r"not finite.* float16"):
        list(Run(model, [[1, 2]], Plan(Sampling(0.0), 4, frozenset())))


def test_repetition_penalty_sees_prompt_and_output() -> None:
    theirs, model = BY_NAME["mha"].build()
    prompt = [5, 6, 7, 8]
    expected = theirs.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 4), do_sample=False,
        max_new_tokens=30, repetition_penalty=1.5, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    plan = Plan(Sampling(0.0, repetition_penalty=1.5), 30, frozenset())
    assert [i for (i,) in Run(model, [prompt], plan)] == expected[0, 4:].tolist()


def test_statistics(smollm: TextModel) -> None:
    answer = smollm.generate(PROMPTS[0], temperature=0, max_new_tokens=5)
    stats = measure(smollm, answer, probe=True)
    assert answer.timing.num_new_tokens == 5
    assert answer.timing.num_prompt_tokens == len(answer.prompt_ids)
    # 30 layers x 2 x 3 heads x 64 x 4 bytes for each of the prompt's tokens and 5 more
    assert answer.kv_bytes == 46_080 * (len(answer.prompt_ids) + 5)
    # float32, tied: the table is read once, for the logits
    assert weight_bytes_per_token(smollm.decoder) == 4 * 134_515_008
    assert bandwidth(smollm.decoder.device) > 1e8
    assert stats.bandwidth_limit_share is not None
    assert stats.bandwidth_limit_share > 0
    assert stats.peak_memory_bytes is None or stats.peak_memory_bytes > 4 * 134_515_008


def test_weights_read_by_a_token_of_llama_3_1() -> None:
    """The docstring's figure, on the meta device."""
    from llamatool.model.decoder import Decoder

    config, _ = llamatool.load_source("llama-3.1-8b").need_config()
    with torch.device("meta"):
        model = Decoder(config).bfloat16()
    assert weight_bytes_per_token(model) == 15_009_849_344


def test_options_are_checked_before_anything_is_written(smollm: TextModel) -> None:
    with pytest.raises(UsageError, match="--top-p is 0"):
        smollm.generate("hi", top_p=0.0)
    with pytest.raises(UsageError, match="--max-new-tokens is 0"):
        smollm.generate("hi", max_new_tokens=0)
    with pytest.raises(InputError, match="9,000 new tokens"):
        smollm.generate("hi", max_new_tokens=9000)


def test_public_name() -> None:
    assert llamatool.load_generator is load_generator


def test_a_conversation_reads_only_what_is_new(tiny_chat: Path, monkeypatch) -> None:
    model, fresh = (load_generator(tiny_chat, device="cpu") for _ in range(2))
    read: list[int] = []
    prefill = model.decoder.prefill
    monkeypatch.setattr(
        model.decoder,
        "prefill",
        lambda ids, cache, **rest: read.append(ids.shape[1]) or prefill(ids, cache, **rest),
    )
    messages: list[Message] = []
    for text in ("one two three", "four", "five six"):
        messages.append(Message("user", text))
        prompt = model.prompt(messages)
        options = {"temperature": 0.0, "max_new_tokens": 20}
        answer = model.answer(model.request(prompt, **options), keep=True)
        shown = "".join(answer)
        alone = fresh.answer(fresh.request(fresh.prompt(messages), **options))
        assert shown == "".join(alone)
        assert answer.result.output_ids == alone.result.output_ids
        messages.append(Message("assistant", shown))
    lengths = [len(model.prompt(messages[:n]).ids) for n in (1, 3, 5)]
    assert read[0] == lengths[0]
    assert read[1] < lengths[1]
    assert read[2] < lengths[2]
    # Another conversation has only its beginning in common.
    other = model.answer(model.request(model.prompt("zero"), **options), keep=True)
    assert "".join(other) == fresh.generate("zero", **options).text


def test_a_cache_that_does_not_fit_is_refused(smollm: TextModel, monkeypatch) -> None:
    from llamatool.errors import ResourceError
    from llamatool.model import load

    monkeypatch.setattr(load, "free_memory", lambda device, num_sharing: 10_000_000)
    with pytest.raises(
        ResourceError, match=r"KV cache of 8,0\d\d tokens takes .* 9.54 MiB are free"
    ):
        smollm.generate("hi", max_new_tokens=8000)


def test_memory_that_runs_out_is_an_error_in_words(monkeypatch) -> None:
    from llamatool.errors import ResourceError

    _, model = BY_NAME["gqa"].build()

    def step(token, cache):
        raise torch.OutOfMemoryError("out of memory")

    run = iter(Run(model, [[1, 2]], Plan(Sampling(0.0), 4, frozenset()), step=step))
    next(run)
    with pytest.raises(ResourceError, match="memory of the device ran out"):
        next(run)


def test_a_hub_id_is_downloaded_first(tiny_chat: Path, monkeypatch) -> None:
    from llamatool.checkpoint import hub

    asked = []

    def download(hub_id, *, patterns, progress):
        asked.append((str(hub_id), patterns))
        progress(1, 1)
        return tiny_chat

    monkeypatch.setattr(hub, "download", download)
    seen = []
    model = load_generator(
        "org/name@main", device="cpu", progress=lambda done, total: seen.append((done, total))
    )
    assert asked[0][0] == "org/name@main"
    assert "*.safetensors" in asked[0][1]
    assert seen == [(1, 1)]
    assert (model.name, model.writing.mode) == ("org/name@main", "chat")
