"""A needle grid prompt by prompt, and by one sweep: prompt tokens read, and the time of both.

    python benchmarks/needle.py [--lengths 10] [--step 1024] [--model pocket]

Both ask the same number of questions at the same lengths and depths, in the same process, one
after the other; what counts is the ratio. The other two modes stand between them.
"""

import argparse
import time

import torch

from llamatool.needle.experiment import Design, Experiment, Mode
from llamatool.needle.haystack import Encoder, GrammarHaystack
from llamatool.needle.run import Runner, few_threads, load_decoder
from llamatool.needle.subject import Subject, open_subject

DEPTHS = tuple(i / 10 for i in range(11))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--lengths", type=int, default=10)
    parser.add_argument("--step", type=int, default=1024)
    args = parser.parse_args()
    lengths = tuple(args.step * (i + 1) for i in range(args.lengths))
    subject = open_subject(args.model)
    print(
        f"{subject.name}: {len(lengths)} lengths to {lengths[-1]:,}, {len(DEPTHS)} depths, 1 trial"
    )
    print(f"{'way':<10}{'tokens read':>14}{'fewer':>8}{'seconds':>10}{'faster':>8}{'hits':>10}")
    with few_threads(subject):
        first = None
        for way in ("naive", "single", "packed", "sweep"):
            tokens, seconds, hits, asked = measure(subject, lengths, way)
            first = first or (tokens, seconds)
            print(
                f"{way:<10}{tokens:>14,}{first[0] / tokens:>7.1f}x{seconds:>10.2f}"
                f"{first[1] / seconds:>7.1f}x{f'{hits}/{asked}':>10}",
                flush=True,
            )


def measure(subject: Subject, lengths: tuple[int, ...], way: str) -> tuple[int, float, int, int]:
    """Tokens, seconds, hits and questions; building the prompts is not measured."""
    mode: Mode = "single" if way == "naive" else way  # type: ignore[assignment]
    design = Design(lengths, DEPTHS, 1, mode=mode, controls=False)
    encoder = Encoder(subject.tokenizer)
    experiment = Experiment(design, encoder, subject.frame, GrammarHaystack(encoder, "en"))
    decoder = load_decoder(subject, max(lengths))
    runner = Runner(decoder, subject, experiment, scoring="forced", with_rank=False)
    jobs = [experiment.build(outline) for outline in experiment.outlines(subject.chunk)]
    started = time.perf_counter()
    if way != "naive":
        outcomes = [outcome for job in jobs for outcome in runner.run(job)]
        seconds = time.perf_counter() - started
        return runner.prefill_tokens, seconds, sum(o.hit for o in outcomes), len(outcomes)
    tokens = hits = asked = 0
    for job in jobs:
        for question in job.questions:
            prompt, gold = experiment.prompt(job, question), question.needle.gold
            tokens, asked = tokens + len(prompt), asked + 1
            hits += greedy_answers(runner, prompt, gold)
    return tokens, time.perf_counter() - started, hits, asked


def greedy_answers(runner: Runner, prompt: tuple[int, ...], gold: tuple[int, ...]) -> bool:
    """Whether greedy decoding behind a freshly read prompt gives the gold answer."""
    ids = torch.tensor([[*prompt, *gold[:-1]]], device=runner.decoder.device)
    cache = runner.decoder.new_cache(ids.shape[1])
    with torch.inference_mode():
        logits = runner.decoder.prefill(ids, cache, piece=runner.piece, logits_to_keep=len(gold))
    return logits[0].argmax(-1).tolist() == list(gold)


if __name__ == "__main__":
    main()
