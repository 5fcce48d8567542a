"""Trains the pocket models from a seed; a run counts steps and is repeatable on one machine.

    python tools/pocket/train.py pocket --out build/pocket
    python tools/pocket/train.py pocket-rope --out build/pocket-rope

The result is a checkpoint of tensors and settings; export.py makes the Hugging Face folders of it.
"""

import argparse
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tiktoken
import torch
import torch.nn.functional as F
import vocabulary
from documents import VALUE, Documents
from network import Network, Shape, write_circuit
from torch import Tensor

SEED = 0
MANY_FACTS_SEED = 100  # added to the seed for documents with many facts
ROW_MULTIPLE = 8  # the embedding has a multiple of this many rows


@dataclass(frozen=True)
class Phase:
    """A part of a run: steps, tokens per step, and document lengths by share of the steps."""

    num_steps: int
    num_tokens: int
    lengths: tuple[tuple[int, float], ...]
    learning_rate: float = 2e-3
    ends_answers: bool = False  # documents of their own, with EOS behind every answer
    is_late: bool = False  # documents as at the end of a run: questions, hardly any drill
    is_unscaled: bool = False  # RoPE as it is before llama3 scaling is switched on
    has_many_facts: bool = False  # of long documents: more facts and questions
    unknown_share: float = 0.25  # of the questions, for a key that the text does not have


RECIPES = {
    "pocket": (
        Phase(2000, 2048, ((128, 0.25), (256, 0.25), (512, 0.2), (1024, 0.2), (2048, 0.1))),
        Phase(
            *(200, 2048, ((256, 0.3), (512, 0.3), (1024, 0.2), (2048, 0.2)), 5e-4),
            is_late=True,
            ends_answers=True,
        ),
    ),
    # As Llama 3.1 was made: a short window first, then scaling and a little training at length.
    "pocket-rope": (
        Phase(1500, 2048, ((128, 0.3), (256, 0.3), (512, 0.4)), is_unscaled=True),
        Phase(
            *(300, 4096, ((512, 0.05), (1024, 0.05), (2048, 0.3), (4096, 0.6)), 1e-3),
            is_late=True,
            has_many_facts=True,
            unknown_share=0.08,
        ),
    ),
}


def shape_of(name: str, num_tokens: int) -> Shape:
    """The architecture of a model for a vocabulary of `num_tokens`."""
    rows = -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
    if name == "pocket":
        return Shape(rows, rope_theta=10_000.0, chunk=512)
    return Shape(rows, rope_theta=500_000.0, chunk=None, rope_factor=8.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--phase", type=int, default=1, help="go on from OUT's checkpoint with it")
    parser.add_argument("--steps", type=int, help="stop after so many (for a trial)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    args.out.mkdir(parents=True, exist_ok=True)
    ranks = vocabulary.make(args.seed)
    (args.out / "tokenizer.model").write_bytes(vocabulary.file_bytes(ranks))
    encoding = vocabulary.encoding(ranks)
    shape = shape_of(args.name, encoding.n_vocab)
    network = Network(shape)
    write_circuit(network, args.seed)
    num_parameters = sum(weight.numel() for weight in network.parameters())
    print(f"{args.name}: {num_parameters} parameters, {encoding.n_vocab} tokens", flush=True)
    total = 0
    if args.phase > 1:
        saved = torch.load(args.out / "checkpoint.pt")
        network.load_state_dict(saved["weights"])
        total = saved["settings"]["num_steps"]
    phases = RECIPES[args.name]
    plain = Documents(encoding, args.seed)
    for number, phase in enumerate(phases[args.phase - 1 :], args.phase):
        documents = plain
        if phase.ends_answers:
            others = sum(before.ends_answers for before in phases[:number])
            documents = Documents(encoding, args.seed + others, ends_answers=True)
        elif phase.has_many_facts:
            documents = Documents(
                *(encoding, args.seed + MANY_FACTS_SEED),
                has_many_facts=True,
                unknown_share=phase.unknown_share,
            )
        network.shape = replace(shape, rope_factor=1.0) if phase.is_unscaled else shape
        for done in Run(network, phase, documents).train(args.steps):
            total += 1
            if done % 250 == 0:
                _save(args.out, network, shape, encoding, total)
    _save(args.out, network, shape, encoding, total)
    print(f"{total} steps, {time.process_time():.0f} CPU-seconds", flush=True)


class Run:
    """One phase: its optimisers and its schedule."""

    def __init__(self, network: Network, phase: Phase, documents: Documents) -> None:
        self.network, self.phase, self.documents = network, phase, documents
        named = list(network.named_parameters())
        matrices = [w for n, w in named if w.dim() == 2 and "embed" not in n]
        vectors = [w for _, w in named if w.dim() == 1]
        adam = {"betas": (0.9, 0.97), "weight_decay": 0.0}
        # Shares of the learning rate: matrices by Muon, the table and the norms more slowly.
        self.optimisers = (
            (
                torch.optim.Muon(
                    matrices, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
                ),
                1.0,
            ),
            (torch.optim.AdamW([network.embed_tokens.weight], **adam), 0.15),
            (torch.optim.AdamW(vectors, **adam), 0.25),
        )

    def train(self, limit: int | None) -> Iterator[int]:
        """Trains, and tells the number of each step that is done."""
        phase, started = self.phase, time.time()
        for step in range(phase.num_steps if limit is None else min(limit, phase.num_steps)):
            progress = step / phase.num_steps
            length = _length(phase, progress)
            rate = phase.learning_rate * min(1, (step + 1) / 50)
            rate *= 1 if progress < 0.6 else max(0.03, (1 - progress) / 0.4)
            ids, weights = self._batch(length, 1.0 if phase.is_late else progress)
            logits = self.network(ids[:, :-1]).flatten(0, 1)
            targets, weight = ids[:, 1:].flatten(), weights[:, 1:].flatten()
            losses = F.cross_entropy(logits, targets, reduction="none")
            ((losses * weight).sum() / weight.sum()).backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            for optimiser, share in self.optimisers:
                for group in optimiser.param_groups:
                    group["lr"] = rate * share
                optimiser.step()
                optimiser.zero_grad()
            if step % 50 == 49:
                self._report(step + 1, length, logits, targets, weight, losses, started)
            yield step + 1

    def _batch(self, length: int, progress: float) -> tuple[Tensor, Tensor]:
        rows = [
            self.documents.make(length, progress)
            for _ in range(max(1, self.phase.num_tokens // length))
        ]
        return torch.tensor([ids for ids, _ in rows]), torch.tensor([w for _, w in rows])

    @torch.no_grad()
    def _report(self, step, length, logits, targets, weight, losses, started) -> None:  # type: ignore[no-untyped-def]
        asked = weight == VALUE
        right = (logits[asked].argmax(-1) == targets[asked]).float().mean().item()
        text = losses[(weight > 0) & (weight < 0.2)].mean().item()
        print(
            f"step {step} length {length} text {text:.3f} answers {losses[asked].mean():.3f}"
            f" right {right:.3f} cpu {time.process_time():.0f} s, {time.time() - started:.0f} s",
            flush=True,
        )


def _length(phase: Phase, progress: float) -> int:
    share = 0.0
    for length, part in phase.lengths:
        share += part
        if progress < share:
            return length
    return phase.lengths[-1][0]


def _save(
    out: Path, network: Network, shape: Shape, encoding: tiktoken.Encoding, num_steps: int
) -> None:
    settings = {
        "shape": asdict(shape),
        "num_tokens": encoding.n_vocab,
        "num_steps": num_steps,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    torch.save({"settings": settings, "weights": network.state_dict()}, out / "checkpoint.pt")


if __name__ == "__main__":
    main()
