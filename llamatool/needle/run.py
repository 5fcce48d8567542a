"""Carries out the jobs on a model: every text is read once, questions are asked on forks of it.

A question costs its own tail: the cache is marked, the tail is read, the answer is scored and
written, and the cache is wound back. Logits exist for scored positions alone.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from llamatool.errors import InputError
from llamatool.needle.experiment import Experiment, Job, Question
from llamatool.needle.plan import Change, chunks_around
from llamatool.needle.score import Score, score_answer, spent_in_thinking
from llamatool.needle.subject import Subject
from llamatool.records import record

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from llamatool.model.cache import CacheMark, KVCache
    from llamatool.model.decoder import Decoder
    from llamatool.model.load import Announce

Scoring = Literal["forced", "generate", "both"]

PREFILL_CHUNK = 2048
RANDOM_RIVALS = 8  # values that no needle has, for the rank
MAX_RIVALS = 8  # values of other needles that are ranked
TINY_HIDDEN = 256  # hidden_size up to which one thread is the fastest
SMALL_BYTES = 2**30  # a model up to this size in fp32 runs in fp32 on a CPU


@record
class Forced:
    """The gold answer, forced: would greedy decoding have written it?"""

    logprob: float  # of all its tokens together
    argmax_match: bool
    rank: int | None  # among the values of other needles and random ones, 1 is best
    best: str | None  # the value that ranks first


@record
class Outcome:
    """What a model did with one question."""

    question: Question
    forced: Forced | None
    generated: str | None
    score: Score
    hit: bool  # the headline; of a control: the answer it must not give
    new_tokens: int  # read for this question, its tail included
    reused_tokens: int
    prefill_seconds: float  # of what was read for this question
    decode_seconds: float
    spent_thinking: bool = False
    also: tuple["Outcome", ...] = ()  # of the prompt's other needles


@record
class Prediction:
    """What the model says behind a tail."""

    forced: Forced | None
    generated: str | None
    seconds: float


class Runner:
    """A model with one cache, through which all jobs go."""

    def __init__(
        self,
        decoder: "Decoder",
        subject: Subject,
        experiment: Experiment,
        *,
        scoring: Scoring,
        prefill_chunk: int = PREFILL_CHUNK,
        with_rank: bool = True,
    ) -> None:
        """A runner. Args: with_rank: rank the gold answer among others, one token each."""
        self.decoder = decoder
        self.subject = subject
        self.experiment = experiment
        self.scoring = scoring
        self.with_rank = with_rank
        self.piece = _piece(prefill_chunk, subject.chunk)
        self.local_chunk = subject.chunk if subject.is_local_below_top else None
        self.prefill_tokens = 0
        self.peak_kv_bytes = 0
        self._cache: KVCache | None = None

    def run(
        self,
        job: Job,
        wanted: Callable[[Question], bool] = lambda question: True,
        tick: Callable[[], None] = lambda: None,
    ) -> Iterator[Outcome]:
        """The outcomes of a job's questions, as they come.

        Args: wanted: which questions to answer; the text is read alike for any choice, so that
        an interrupted run gives the same numbers when it is resumed. tick: called now and then.
        """
        cache = self._empty_cache(job)
        reader = _Reader(self, cache, job, tick)
        patched = [q for q in job.questions if q.patch is not None]
        plain = [q for q in job.questions if q.patch is None]
        if patched and self.local_chunk is not None:
            ask = self._with_local_changes(reader, patched, plain)
        elif patched:
            ask = self._with_changes(reader, patched, plain)
        else:
            ask = self._forks(reader, plain)
        for question, used in ask:
            if wanted(question):
                yield self._outcome(question, cache, used, reader.seconds, tick)
                tick()
            reader.seconds = 0.0

    def _forks(
        self, reader: "_Reader", questions: Sequence[Question]
    ) -> Iterator[tuple[Question, int]]:
        """Questions to one text at growing lengths of it."""
        for question in sorted(questions, key=lambda q: q.end):
            before = reader.num_read
            reader.read_base(question.end)
            yield question, reader.num_read - before

    def _with_changes(
        self, reader: "_Reader", patched: Sequence[Question], plain: Sequence[Question]
    ) -> Iterator[tuple[Question, int]]:
        """Up to each needle once; from there to the end for each of them."""
        for question in sorted(patched, key=lambda q: q.start or 0):
            before = reader.num_read
            start, patch = _patch(question)
            reader.read_base(start)
            mark = reader.cache.mark()
            reader.read(patch)
            reader.read(reader.job.ids[start + len(patch) : question.end])
            yield question, reader.num_read - before
            reader.cache.rewind(mark)
        yield from self._forks(reader, plain)

    def _with_local_changes(
        self, reader: "_Reader", patched: Sequence[Question], plain: Sequence[Question]
    ) -> Iterator[tuple[Question, int]]:
        """The text once; a needle changes its own chunk and nothing else.

        Only the last layer sees beyond a chunk. Its keys and values at a position depend on that
        position's chunk alone, so those of the other chunks stay as they are in the cache.
        """
        assert self.local_chunk is not None
        cache, ids = reader.cache, reader.job.ids
        end = max(q.end for q in reader.job.questions)
        reader.read_base(end)
        whole = cache.mark()
        yield from self._forks(reader, plain)
        top = cache.layers[max(cache.layers)]
        for question in sorted(patched, key=lambda q: q.start or 0):
            before = reader.num_read
            start, patch = _patch(question)
            touched = chunks_around(Change(start, start + len(patch)), end, self.local_chunk)
            kept = slice(touched.start, touched.stop)
            keys, values = top.k_BKSE[:, :, kept].clone(), top.v_BKSE[:, :, kept].clone()
            cache.truncate(touched.start)
            behind = ids[start + len(patch) : touched.stop]
            reader.read((*ids[touched.start : start], *patch, *behind))
            if touched.stop < end:
                # The tokens behind are still in the last layer; the rings of the others, which
                # hold the last chunk, come back with the mark.
                cache.advance(end - touched.stop)
                cache.rewind(whole)
            yield question, reader.num_read - before
            cache.rewind(whole)
            top.k_BKSE[:, :, kept], top.v_BKSE[:, :, kept] = keys, values

    def _outcome(
        self,
        question: Question,
        cache: "KVCache",
        used: int,
        read_seconds: float,
        tick: Callable[[], None],
    ) -> Outcome:
        """Of a prompt's needle, and of its other needles, each on a fork of its own."""
        outcome, also = self._ask(question, cache, used, read_seconds), []
        for other in question.also:
            tick()
            also.append(self._ask(other, cache, 0, 0.0))
        return replace(outcome, also=tuple(also)) if also else outcome

    def _ask(self, question: Question, cache: "KVCache", used: int, read_seconds: float) -> Outcome:
        started = time.perf_counter()
        mark = cache.mark()
        prediction = self._predict(question, cache)
        cache.rewind(mark)
        tail = len(question.needle.tail)
        self.prefill_tokens += tail
        score, hit = self._judge(question, prediction)
        return Outcome(
            question=question,
            forced=prediction.forced,
            generated=prediction.generated,
            score=score,
            hit=hit,
            new_tokens=used + tail,
            reused_tokens=question.end - used,
            prefill_seconds=read_seconds + prediction.seconds,
            decode_seconds=time.perf_counter() - started - prediction.seconds,
            spent_thinking=spent_in_thinking(prediction.generated or ""),
        )

    def _predict(self, question: Question, cache: "KVCache") -> Prediction:
        """Reads the tail, forces the gold answer and its rivals, and writes an own answer."""
        import torch

        started = time.perf_counter()
        needle = question.needle
        with torch.inference_mode():
            first_V = self._logits(needle.tail, cache, 1)[0]
            _require_finite(first_V)
            seconds = time.perf_counter() - started
            mark, forced, generated = cache.mark(), None, None
            if self.scoring != "generate" and self.experiment.design.use_prefix:
                forced = self._force(question, first_V, cache, mark)
            # With a wrong key there is no right answer to force. Some value always ranks first;
            # whether one would be given is seen by what is written.
            is_open = question.cell.kind == "wrong_key"
            if self.scoring != "forced" or forced is None or is_open:
                generated = self._write(first_V, cache)
        return Prediction(forced, generated, seconds)

    def _force(
        self, question: Question, first_V: "Tensor", cache: "KVCache", mark: "CacheMark"
    ) -> Forced:
        gold = question.needle.gold
        rows = self._rows(gold, first_V, cache)
        cache.rewind(mark)
        match = all(int(row.argmax()) == token for row, token in zip(rows, gold, strict=False))
        if match and question.needle.value[-1:].isdecimal():
            # One digit more would make it another number.
            match = not self._bytes(int(rows[-1].argmax()))[:1].isdigit()
        logprob = _logprob(rows, gold)
        if not self.with_rank:
            return Forced(logprob, match, None, None)
        rivals = self._rival_logprobs(question, rows, cache, mark)
        better = [value for value in rivals if rivals[value] > logprob]
        best = max(better, key=lambda value: rivals[value], default=question.needle.value)
        return Forced(logprob, match, 1 + len(better), best)

    def _rival_logprobs(
        self, question: Question, rows: Sequence["Tensor"], cache: "KVCache", mark: "CacheMark"
    ) -> dict[str, float]:
        """The log-probability of every rival: what it shares with the gold answer is known.

        Args: rows: logits along the gold answer.
        """
        gold, rivals = question.needle.gold, self._rivals(question)
        found = {}
        for shared, values in _by_shared_start(gold, rivals):
            if shared:
                self._logits(gold[:shared], cache, 1)
            fork = cache.mark()
            for value in values:
                ids, known = rivals[value], list(rows[: shared + 1])
                rest = ids[shared:-1]
                if rest:
                    known += self._logits(rest, cache, len(rest))
                found[value] = _logprob(known, ids)
                cache.rewind(fork)
            cache.rewind(mark)
        return found

    def _rivals(self, question: Question) -> dict[str, tuple[int, ...]]:
        """Other answers with as many tokens: of the text's other needles, and random ones."""
        experiment, gold = self.experiment, question.needle.gold
        values = [value for value, _ in question.others[:MAX_RIVALS]]
        values += experiment.random_values(question.cell.trial, RANDOM_RIVALS)
        found = {}
        for value in values:
            ids = experiment.answer_ids(question.needle, value)
            if len(ids) == len(gold) and ids != gold:
                found[value] = ids
        return found

    def _rows(self, ids: Sequence[int], first_V: "Tensor", cache: "KVCache") -> list["Tensor"]:
        """Logits that predict each of `ids` and what follows them."""
        return [first_V, *self._logits(ids, cache, len(ids))]

    def _write(self, first_V: "Tensor", cache: "KVCache") -> str:
        """Greedy decoding up to a stop token, in raw prompts up to the end of the line."""
        tokenizer, raw = self.subject.tokenizer, not self.subject.frame.is_chat
        stream, text = tokenizer.stream(), ""
        row_V = first_V
        for _ in range(self.experiment.design.max_new_tokens):
            token = int(row_V.argmax())
            if token in self.subject.stop_ids or token >= tokenizer.vocab_size:
                break
            text += stream.feed(token)
            if raw and "\n" in text.lstrip("\n"):
                break
            row_V = self._logits((token,), cache, 1)[0]
        return text + stream.finish()

    def _judge(self, question: Question, prediction: Prediction) -> tuple[Score, bool]:
        """The score of the written answer, or where there is none, of the forced one."""
        needle, forced = question.needle, prediction.forced
        others = dict(question.others)
        if prediction.generated is not None:
            text = prediction.generated
            if not self.subject.frame.is_chat:
                text = first_statement(text)
            score = score_answer(text, needle.value, others=others)
        else:
            assert forced is not None
            if forced.argmax_match:
                score = Score(True, True, "correct", needle.value)
            elif forced.best in others:
                key = others[forced.best]
                score = Score(False, False, "distractor", forced.best, key)
            else:
                score = Score(False, False, "other")
        if question.cell.kind == "wrong_key":
            # Nothing is right here: a number of the text belongs to another key.
            copied = score.exact or score.verdict == "distractor"
            return replace(score, exact=False, verdict="distractor") if copied else score, copied
        return score, score.exact

    def _bytes(self, token: int) -> bytes:
        """Of one token; nothing for rows of the table that no token has."""
        tokenizer = self.subject.tokenizer
        return tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""

    def _logits(self, ids: Sequence[int], cache: "KVCache", keep: int) -> "Tensor":
        import torch

        ids_BT = torch.tensor([ids], dtype=torch.long, device=self.decoder.device)
        logits_QV: Tensor = self.decoder(ids_BT, cache=cache, logits_to_keep=keep)[0]
        return logits_QV

    def _empty_cache(self, job: Job) -> "KVCache":
        """The one cache, large enough for this job."""
        room = max(
            question.end + len(question.needle.tail) + self.experiment.sizes.budget
            for question in job.questions
        )
        if self._cache is None or self._cache.max_tokens < room:
            self._cache = None  # freed before the larger one is made
            self._cache = self.decoder.new_cache(room)
            self.peak_kv_bytes = max(self.peak_kv_bytes, self._cache.num_bytes)
        self._cache.truncate(0)
        # Scaling by length (dynamic, longrope) sees the prompt's length from the first token on.
        self._cache.rope_length = max(q.end + len(q.needle.tail) for q in job.questions)
        return self._cache


class _Reader:
    """Reads a job's text into the cache, and counts."""

    def __init__(
        self, runner: Runner, cache: "KVCache", job: Job, tick: Callable[[], None]
    ) -> None:
        self.cache = cache
        self.job = job
        self.num_read = 0
        self.seconds = 0.0
        self._runner = runner
        self._tick = tick

    def read_base(self, stop: int) -> None:
        """Reads the job's own ids from where the cache ends."""
        self.read(self.job.ids[self.cache.length : stop])

    def read(self, ids: Sequence[int]) -> None:
        import torch

        if not ids:
            return
        started = time.perf_counter()
        runner = self._runner
        # Some pieces at a time, so that a display can move on.
        step = runner.piece * max(1, 8192 // runner.piece)
        for first in range(0, len(ids), step):
            part = ids[first : first + step]
            ids_BT = torch.tensor([part], dtype=torch.long, device=runner.decoder.device)
            with torch.inference_mode():
                runner.decoder.prefill(ids_BT, self.cache, piece=runner.piece, logits_to_keep=0)
            self._tick()
        self.num_read += len(ids)
        runner.prefill_tokens += len(ids)
        self.seconds += time.perf_counter() - started


def load_decoder(
    subject: Subject,
    max_tokens: int,
    *,
    device: str = "auto",
    dtype: str | None = None,
    rope_factor: float | None = None,
    mesh: "DeviceMesh | None" = None,
    device_map: str | None = None,
    piece_tokens: int = PREFILL_CHUNK,
    announce: "Announce | None" = None,
) -> "Decoder":
    """The weights of the subject.

    Args: dtype: by default fp32 for small models on a CPU, else that of the checkpoint.
    rope_factor: another scaling of RoPE than the model's own, to try it. mesh, device_map,
    piece_tokens, announce: as in `load_model`.
    Raises: ResourceError, with the numbers, if weights and cache do not fit.
    """
    from llamatool.model.load import find_device, load_model

    if dtype is None and find_device(device).type == "cpu" and _is_small(subject):
        dtype = "float32"
    decoder = load_model(
        subject.path,
        device=device,
        dtype=dtype,
        max_tokens=max_tokens,
        mesh=mesh,
        device_map=device_map,
        piece_tokens=piece_tokens,
        announce=announce,
    )
    if rope_factor is not None:
        from llamatool.model.rope import RotaryEmbedding

        rope = subject.config.rope
        kind = "linear" if rope.type == "default" else rope.type
        scaled = replace(rope, type=kind, factor=rope_factor)
        decoder.rope = RotaryEmbedding(replace(subject.config, rope=scaled))
    return decoder


@contextmanager
def few_threads(subject: Subject) -> Iterator[None]:
    """One thread for a model so small that several would only wait for each other.

    The user's own choice, by OMP_NUM_THREADS, stands.
    """
    import torch

    before = torch.get_num_threads()
    if subject.config.hidden_size <= TINY_HIDDEN and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def matmul_flops_per_second(device: str = "auto") -> float:
    """FLOPs per second of a matrix product on the device, measured in a moment."""
    import torch

    from llamatool.model.load import find_device

    a = torch.ones(512, 512, device=find_device(device))
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(8):
            (a @ a).sum()
        if a.device.type == "cuda":
            torch.cuda.synchronize()
        best = max(best, 8 * 2 * 512**3 / (time.perf_counter() - started))
    return best


def first_statement(text: str) -> str:
    """The first line of an answer up to the end of its first sentence.

    A base model goes on writing; what follows is no part of the answer.
    Example: ` 482913. The farmer` -> ` 482913.`
    """
    line = text.lstrip().split("\n")[0]
    return re.split(r"(?<=[.!?])\s|(?<=[。！？])", line, maxsplit=1)[0]


def _patch(question: Question) -> tuple[int, tuple[int, ...]]:
    assert question.start is not None
    assert question.patch is not None
    return question.start, question.patch


def _piece(wanted: int, chunk: int | None) -> int:
    """A prefill chunk that divides the attention chunk, so that a border falls on a border."""
    if chunk is None or chunk % wanted == 0 or wanted % chunk == 0:
        return wanted
    return max(n for n in range(1, min(wanted, chunk) + 1) if chunk % n == 0)


def _is_small(subject: Subject) -> bool:
    from llamatool.sizing.parameters import count_parameters

    return 4 * count_parameters(subject.config).total <= SMALL_BYTES


def _by_shared_start(
    gold: Sequence[int], rivals: Mapping[str, Sequence[int]]
) -> list[tuple[int, list[str]]]:
    """Rivals by the number of tokens with which they begin like the gold answer."""
    groups: dict[int, list[str]] = {}
    for value, ids in rivals.items():
        shared = 0
        while shared < len(ids) - 1 and ids[shared] == gold[shared]:
            shared += 1
        groups.setdefault(shared, []).append(value)
    return sorted(groups.items())


def _logprob(rows: "Sequence[Tensor]", ids: Sequence[int]) -> float:
    total = 0.0
    for row_V, token in zip(rows, ids, strict=False):
        total += float(row_V.log_softmax(-1)[token])
    return total


def _require_finite(logits_V: "Tensor") -> None:
    if not bool(logits_V.isfinite().all()):
        raise InputError(
            "logits are not finite: activations overflow, or the weights are damaged",
            hint="run it with --dtype fp32",
        )
