"""Many prompts from a file of JSON lines, answered into another, with a way to go on later.

A line of the input is an object with `prompt` (a text) or `messages` (a list of objects with
`role` and `content`), and perhaps `system` and `id`. For each, the output gets a line of its own
as soon as it is answered. Lines carry a key made of the prompt and of everything that decides the
answer, so that a second call answers only what is missing and never mixes two runs.

Prompts of equal length are answered together, row by row independent of each other: no padding,
so a row is what it would be alone (but for the rounding of larger products).
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamatool import strictjson
from llamatool.checkpoint import files
from llamatool.errors import InputError, LlamatoolError, ResourceError, UsageError
from llamatool.generate.engine import Plan, Run, fit_context
from llamatool.generate.formats import ROLES, Message
from llamatool.generate.stream import TextStream
from llamatool.records import record

if TYPE_CHECKING:
    from llamatool.generate.text_model import Request, TextModel
    from llamatool.model.launch import Crew

Progress = Callable[[int, int], None]  # done, total

MAX_LINE_BYTES = 64 * 2**20


@record
class Row:
    """One prompt of the file."""

    index: int  # from 0
    id: str | int | None
    text: str | tuple[Message, ...]
    system: str | None


@record
class Summary:
    """What a call has done."""

    num_rows: int
    num_answered: int  # by this call
    num_tokens: int  # written by this call


@record
class _Task:
    row: Row
    request: "Request"
    key: str


def answer_file(
    model: "TextModel",
    asked: "Sequence[tuple[Row, Request]]",
    out: Path,
    *,
    batch_size: int = 1,
    progress: Progress | None = None,
    crew: "Crew | None" = None,
) -> Summary:
    """Answers every request of `asked` that `out` has no answer to yet.

    Args: asked: the rows of a file, see `read_rows`, and what was made of each. progress: told
    rows done and rows in all. crew: the ranks that do this together, of which the first reads and
    writes `out`.
    Raises: UsageError if `out` holds answers to something else; ResourceError if it cannot be
    written.
    """
    if batch_size < 1:
        raise UsageError(f"--batch-size is {batch_size}: at least 1")
    tasks = [_task(model, row, request) for row, request in asked]
    keys = {task.row.index: task.key for task in tasks}
    if crew is None:
        done = _finished(out, keys)
    else:
        crew.agree(sorted(keys.items()), "the prompts")
        done = set(json.loads(crew.tell(lambda: json.dumps(sorted(_finished(out, keys))))))
    writes = crew is None or crew.is_first
    pending = [task for task in tasks if task.row.index not in done]
    report = progress or (lambda done, total: None)
    report(len(done), len(tasks))
    num_tokens = 0
    try:
        with (out if writes else Path(os.devnull)).open(
            "a", encoding="utf-8", newline="\n"
        ) as stream:
            for batch in _batches(pending, batch_size):
                for answer in _answers(model, batch):
                    num_tokens += len(answer["output_ids"])
                    stream.write(json.dumps(answer, ensure_ascii=False) + "\n")
                stream.flush()
                done |= {task.row.index for task in batch}
                report(len(done), len(tasks))
    except OSError as error:
        raise ResourceError(f"cannot write: {error.strerror}", where=str(out)) from None
    return Summary(len(tasks), len(pending), num_tokens)


def read_rows(path: Path) -> Iterator[Row]:
    """The prompts of a file of JSON lines; empty lines are passed over.

    Raises: InputError naming the line that is no prompt.
    """
    with files.open_regular(path) as stream:
        index = 0
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), 1):
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise InputError("the line is too long", where=where)
            if line.strip():
                yield _row(
                    index, strictjson.parse_object(line, where=where, what="a prompt"), where
                )
                index += 1


def _row(index: int, values: Mapping[str, Any], where: str) -> Row:
    unknown = set(values) - {"id", "prompt", "messages", "system"}
    if unknown:
        raise InputError(f"unknown key `{min(unknown)[:80]}`", where=where, hint=_EXPECTED)
    if ("prompt" in values) == ("messages" in values):
        raise InputError("a line has either `prompt` or `messages`", where=where, hint=_EXPECTED)
    system, name = values.get("system"), values.get("id")
    if not isinstance(system, str | None) or not isinstance(name, str | int | None):
        raise InputError("`system` or `id` is no text", where=where, hint=_EXPECTED)
    if "messages" in values:
        return Row(index, name, tuple(_messages(values["messages"], where)), system)
    if not isinstance(values["prompt"], str):
        raise InputError("`prompt` is no text", where=where, hint=_EXPECTED)
    return Row(index, name, values["prompt"], system)


_EXPECTED = 'a line is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


def _messages(values: object, where: str) -> Iterator[Message]:
    if not isinstance(values, list) or not values:
        raise InputError("`messages` is no list of messages", where=where, hint=_EXPECTED)
    for value in values:
        match value:
            case {"role": str(role), "content": str(content)} if role in ROLES and len(value) == 2:
                yield Message(role, content)
            case _:
                raise InputError(
                    f"a message needs `content` and a `role` of {', '.join(ROLES)}", where=where
                )


def _task(model: "TextModel", row: Row, request: "Request") -> _Task:
    decides = {
        "model": model.name,
        "dtype": str(model.decoder.dtype),
        "prompt": request.prompt.ids,
        "stop_ids": sorted(model.stop_ids(request.prompt).ids),
        "stops": request.stops,
        "sampling": str(request.sampling),
        "max_new_tokens": request.max_new_tokens,
        "seed": request.seed,
        "index": row.index,
    }
    text = json.dumps(decides, ensure_ascii=False)
    return _Task(row, request, hashlib.sha256(text.encode()).hexdigest()[:16])


def _finished(out: Path, keys: Mapping[int, str]) -> set[int]:
    """Indices that `out` answers already; a torn last line is cut off."""
    if not out.exists():
        return set()
    try:
        data = out.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):  # written while the machine went down
            with out.open("r+b") as stream:
                stream.truncate(len(whole))
    except OSError as error:
        raise ResourceError(f"cannot read or write: {error.strerror}", where=str(out)) from None
    done = set()
    for number, line in enumerate(whole.splitlines(), 1):
        where = f"{out}, line {number}"
        try:
            values = strictjson.parse_object(line, where=where, what="an answer")
        except LlamatoolError:
            values = {}
        index = values.get("index")
        if not isinstance(index, int) or keys.get(index) != values.get("key"):
            raise UsageError(
                "the file holds answers of another run: other prompts, model or options",
                where=where,
                hint="name another file with --out",
            )
        done.add(index)
    return done


def _batches(tasks: Sequence[_Task], batch_size: int) -> Iterator[list[_Task]]:
    """Tasks of equal prompt length and equal options, at most `batch_size` at a time."""

    def kind(task: _Task) -> tuple[int, int, str]:
        asked = task.request.max_new_tokens
        return len(task.request.prompt.ids), asked or 0, str(task.request.sampling)

    for _, group in groupby(sorted(tasks, key=kind), key=kind):
        alike = list(group)
        for first in range(0, len(alike), batch_size):
            yield alike[first : first + batch_size]


def _answers(model: "TextModel", batch: Sequence[_Task]) -> list[dict[str, Any]]:
    """The answers to a batch, as objects to write."""
    requests = [task.request for task in batch]
    stops = [model.stop_ids(request.prompt) for request in requests]
    first = requests[0]
    max_new_tokens = fit_context(
        len(first.prompt.ids),
        first.max_new_tokens,
        model.decoder.config.max_position_embeddings,
        beyond_context=first.beyond_context,
    )
    model.require_memory(len(first.prompt.ids) + max_new_tokens, len(batch))
    run = Run(
        model.decoder,
        [request.prompt.ids for request in requests],
        Plan(first.sampling, max_new_tokens, frozenset().union(*(stop.ids for stop in stops))),
        step=model.step,
        seeds=[request.seed for request in requests],
    )
    texts = [TextStream(model.tokenizer, after=r.prompt.ids, stops=r.stops) for r in requests]
    pieces: list[list[str]] = [[] for _ in batch]
    output: list[list[int]] = [[] for _ in batch]
    for ids in run:
        for row, token_id in enumerate(ids):
            if run.reasons[row] is not None or token_id in stops[row].ids:
                continue
            output[row].append(token_id)
            pieces[row].append(texts[row].feed(token_id))
            if texts[row].stopped_at is not None:
                run.stop(row, "stop_text")
    return [
        {
            "index": task.row.index,
            "id": task.row.id,
            "key": task.key,
            "text": "".join(pieces[row]) + texts[row].finish(),
            "stop_reason": run.reasons[row],
            "num_prompt_tokens": len(task.request.prompt.ids),
            "output_ids": output[row],
        }
        for row, task in enumerate(batch)
    ]
