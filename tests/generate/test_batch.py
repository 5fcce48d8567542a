"""Many prompts: the same answers as one by one, bad lines refused early, and going on later."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from llamatool.errors import InputError, UsageError  # noqa: E402
from llamatool.generate.batch import answer_file, read_rows  # noqa: E402
from llamatool.generate.text_model import Options, TextModel, load_generator  # noqa: E402

LINES = [
    {"prompt": "one two"},
    {"id": "b", "prompt": "three"},
    {"id": 7, "messages": [{"role": "user", "content": "one two"}]},
    {"prompt": "\u4e2d\u6587 \U0001f999"},
    {"prompt": "four", "system": "be brief"},
    {"prompt": "two one"},
]


@pytest.fixture(scope="module")
def tiny(tiny_chat: Path) -> TextModel:
    return load_generator(tiny_chat, device="cpu")


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def request(**options: object):
    asked: Options = {"max_new_tokens": 6, "temperature": 0.0, **options}  # type: ignore[typeddict-item]

    def made(model: TextModel, row):
        text = row.text if isinstance(row.text, str) else list(row.text)
        return model.request(model.prompt(text, system=row.system), **asked)

    return made


def answer_all(model: TextModel, prompts: Path, out: Path, make, **how):
    return answer_file(model, [(row, make(model, row)) for row in read_rows(prompts)], out, **how)


def answers(path: Path) -> list[dict]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return sorted(map(json.loads, lines), key=lambda answer: answer["index"])


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 4}, {"stops": ["e"]}])
def test_answers_are_those_of_one_by_one(
    batch_size: int, options: dict, tiny: TextModel, tmp_path: Path
) -> None:
    prompts = write(tmp_path / "in.jsonl", LINES)
    out = tmp_path / "out.jsonl"
    seen = []
    summary = answer_all(
        tiny, prompts, out, request(**options), batch_size=batch_size,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    found = answers(out)
    assert [answer["index"] for answer in found] == list(range(6))
    assert [answer["id"] for answer in found] == [None, "b", 7, None, None, None]
    for row, answer in zip(read_rows(prompts), found, strict=True):
        alone = tiny.answer(request(**options)(tiny, row))
        text = "".join(alone)
        assert answer["text"] == text
        assert answer["output_ids"] == list(alone.result.output_ids)
        assert answer["stop_reason"] == alone.result.stop_reason
    assert found[0]["text"] == found[2]["text"]
    assert (summary.num_rows, summary.num_answered) == (6, 6)
    assert seen[0] == (0, 6)
    assert seen[-1] == (6, 6)


def test_it_goes_on_where_it_ended(tiny: TextModel, tmp_path: Path) -> None:
    prompts, out = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    answer_all(tiny, prompts, out, request())
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # the machine went down in a line
    summary = answer_all(tiny, prompts, out, request())
    assert (summary.num_rows, summary.num_answered) == (6, 3)
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
    again = answer_all(tiny, prompts, out, request())
    assert again.num_answered == 0
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize("change", [{"max_new_tokens": 5}, {"temperature": 1.0}, {"stops": ["x"]}])
def test_two_runs_are_never_mixed(change: dict, tiny: TextModel, tmp_path: Path) -> None:
    prompts, out = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    answer_all(tiny, prompts, out, request())
    before = out.read_bytes()
    with pytest.raises(UsageError, match="answers of another run"):
        answer_all(tiny, prompts, out, request(**change))
    write(prompts, LINES[::-1])
    with pytest.raises(UsageError, match="answers of another run"):
        answer_all(tiny, prompts, out, request())
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("not json", "expected a prompt"),
        ("[1]", "expected a prompt"),
        ('{"text": "a"}', "unknown key `text`"),
        ("{}", "either `prompt` or `messages`"),
        ('{"prompt": "a", "messages": []}', "either `prompt` or `messages`"),
        ('{"prompt": 3}', "`prompt` is no text"),
        ('{"messages": []}', "no list of messages"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "a message needs"),
        ('{"prompt": "a", "id": [1]}', "`system` or `id`"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_answered(
    line: str, says: str, tiny: TextModel, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "fine"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=says) as caught:
        answer_all(tiny, prompts, out, request())
    assert "line 3" in (caught.value.where or "")
    assert not out.exists()
