"""From logits to the next token.

All in fp32 and in the order of transformers: repetition penalty, temperature, top-k, top-p, min-p.

Letters: B batch, V vocab_size, T tokens seen so far.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llamatool.errors import UsageError
from llamatool.records import record

if TYPE_CHECKING:
    from torch import Generator, Tensor


@record
class Sampling:
    """How the next token is chosen. A temperature of 0 takes the most likely one."""

    temperature: float = 0.6
    top_p: float = 0.9
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off

    @property
    def is_greedy(self) -> bool:
        """Whether no chance is involved."""
        return self.temperature == 0.0 or self.top_k == 1

    def checked(self) -> "Sampling":
        """This, if all values are in their range. Raises: UsageError naming the one that is not."""
        ranges = (
            ("temperature", self.temperature, 0 <= self.temperature < 1e6, "0 or more"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("min-p", self.min_p, 0 <= self.min_p <= 1, "from 0 (off) to 1"),
            ("repetition-penalty", self.repetition_penalty, 0 < self.repetition_penalty < 1e6,
             "above 0; 1 is off"),
        )  # fmt: skip
        for name, value, fits, expected in ranges:
            if not fits:
                raise UsageError(f"--{name} is {value}: {expected}")
        return self


# Meta's own code and the Instruct models' generation_config.json.
DEFAULTS = Sampling()


def from_generation_config(values: Mapping[str, object]) -> Sampling:
    """What a generation_config.json asks for; Meta's defaults where it says nothing.

    A file that says `do_sample: false` asks for greedy decoding. `top_k` is off unless the file
    names it: the 50 of transformers is a default of its own, not of the model.
    Example: {} -> temperature 0.6, top_p 0.9; {"temperature": 1.0} -> 1.0 and 0.9.
    """

    def number(name: str, default: float) -> float:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return default
        return float(value)

    temperature = number("temperature", DEFAULTS.temperature)
    if values.get("do_sample") is False:
        temperature = 0.0
    return Sampling(
        temperature=temperature,
        top_p=number("top_p", DEFAULTS.top_p),
        top_k=int(number("top_k", DEFAULTS.top_k)),
        min_p=number("min_p", DEFAULTS.min_p),
        repetition_penalty=number("repetition_penalty", DEFAULTS.repetition_penalty),
    )


def choose(
    logits_BV: "Tensor",
    sampling: Sampling,
    *,
    seen_BT: "Tensor | None" = None,
    generator: "Generator | None" = None,
) -> "Tensor":
    """The next token of each row, [B].

    The draw is argmax(p / e) with e from an exponential distribution: it picks token i with
    probability p_i, and nothing has to be brought from the device for it.
    Args: seen_BT: prompt and output so far, for the repetition penalty. generator: of chance.
    """
    import torch

    if sampling.is_greedy:
        if sampling.repetition_penalty == 1.0 or seen_BT is None:
            return logits_BV.argmax(dim=-1)
        return penalise(logits_BV.float(), seen_BT, sampling.repetition_penalty).argmax(dim=-1)
    scores_BV = processed(logits_BV, sampling, seen_BT=seen_BT)
    probs_BV = torch.softmax(scores_BV, dim=-1)
    chance_BV = torch.empty_like(probs_BV).exponential_(1.0, generator=generator)
    return (probs_BV / chance_BV).argmax(dim=-1)


def processed(
    logits_BV: "Tensor", sampling: Sampling, *, seen_BT: "Tensor | None" = None
) -> "Tensor":
    """Scores in fp32 whose softmax is the distribution to draw from, [B, V].

    Tokens that are ruled out have -inf. With a temperature of 0 only the penalty applies.
    """
    scores_BV = logits_BV.float()
    if sampling.repetition_penalty != 1.0 and seen_BT is not None:
        scores_BV = penalise(scores_BV, seen_BT, sampling.repetition_penalty)
    if sampling.temperature not in (0.0, 1.0):
        scores_BV = scores_BV / sampling.temperature
    if sampling.top_k:
        scores_BV = keep_top_k(scores_BV, sampling.top_k)
    if sampling.top_p < 1.0:
        scores_BV = keep_top_p(scores_BV, sampling.top_p)
    if sampling.min_p:
        scores_BV = keep_min_p(scores_BV, sampling.min_p)
    return scores_BV


def penalise(scores_BV: "Tensor", seen_BT: "Tensor", penalty: float) -> "Tensor":
    """Scores of every token seen, divided by `penalty` if positive, else multiplied; once each.

    Example: penalty 2, scores 3 and -3 -> 1.5 and -6.
    """
    import torch

    score_BT = scores_BV.gather(1, seen_BT)
    score_BT = torch.where(score_BT < 0, score_BT * penalty, score_BT / penalty)
    return scores_BV.scatter(1, seen_BT, score_BT)


def keep_top_k(scores_BV: "Tensor", k: int) -> "Tensor":
    """Scores of the `k` most likely tokens (more where the last ones are equal); -inf elsewhere."""
    kept_Bk = scores_BV.topk(min(k, scores_BV.shape[-1]), dim=-1).values
    return scores_BV.masked_fill(scores_BV < kept_Bk[:, -1:], -float("inf"))


def keep_top_p(scores_BV: "Tensor", p: float) -> "Tensor":
    """Scores of the most likely tokens that together have probability `p`; -inf elsewhere.

    The token that crosses the threshold stays. Summed from the least likely one on, as
    transformers does, so that rounding falls alike.
    Example: probabilities 0.5, 0.3, 0.2 and p 0.7 -> the first two.
    """
    ascending_BV, order_BV = scores_BV.sort(dim=-1)
    sums_BV = ascending_BV.softmax(dim=-1).cumsum(dim=-1)
    out_BV = sums_BV <= 1 - p
    out_BV[:, -1] = False  # the most likely token always stays
    return scores_BV.masked_fill(out_BV.scatter(1, order_BV, out_BV), -float("inf"))


def keep_min_p(scores_BV: "Tensor", p: float) -> "Tensor":
    """Scores of tokens with at least `p` times the highest probability; -inf elsewhere."""
    probs_BV = scores_BV.softmax(dim=-1)
    least_B1 = p * probs_BV.amax(dim=-1, keepdim=True)
    return scores_BV.masked_fill(probs_BV < least_B1, -float("inf"))
