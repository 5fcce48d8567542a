"""The loop: read the prompt, then choose and append one token after the other.

Letters: B batch (1, or several prompts of one length), T tokens, V vocab_size.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from llamatool.errors import InputError, ResourceError
from llamatool.generate.sampling import Sampling, choose
from llamatool.records import record

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Generator, Tensor

    from llamatool.model.cache import KVCache
    from llamatool.model.decoder import Decoder
    from llamatool.model.images import Tiles

    Step = Callable[[Tensor, KVCache], Tensor]  # ids [B] -> logits [B, V]

StopReason = Literal["stop_token", "stop_text", "length", "interrupted"]

DEFAULT_NEW_TOKENS = 512


@record
class Plan:
    """How far and how to go on from a prompt."""

    sampling: Sampling
    max_new_tokens: int
    stop_ids: frozenset[int]


@record
class Timing:
    """When things happened, in seconds of wall-clock time."""

    prefill_seconds: float
    decode_seconds: float
    num_prompt_tokens: int
    num_new_tokens: int  # of one row, a stop token included

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens read per second, the first choice included."""
        return _rate(self.num_prompt_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens per second after the first one; None if there was one only."""
        return _rate(self.num_new_tokens - 1, self.decode_seconds)


def fit_context(
    num_prompt_tokens: int,
    max_new_tokens: int | None,
    context: int | None,
    *,
    beyond_context: bool = False,
) -> int:
    """Tokens that may be written: as many as asked for, or as fit where nobody asked.

    Raises: InputError naming both numbers if prompt and answer exceed the model's context.
    Example: a prompt of 8000 in a context of 8192 -> 192 by default, and an error for 500.
    """
    wanted = DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    if context is None or beyond_context or num_prompt_tokens + wanted <= context:
        return wanted
    left = context - num_prompt_tokens
    if max_new_tokens is None and left > 0:
        return left
    asked = "" if max_new_tokens is None else f" and {max_new_tokens:,} new tokens"
    raise InputError(
        f"the prompt of {num_prompt_tokens:,} tokens{asked} exceed the model's context of"
        f" {context:,} tokens"
        if asked
        else f"the prompt of {num_prompt_tokens:,} tokens leaves no room in the model's context of"
        f" {context:,} tokens",
        hint="shorten the prompt, lower --max-new-tokens, or try --beyond-context",
    )


class Run:
    """One answer, or one for each row of a batch, token by token.

    Iterate over it once: every item has the next id of each row. A row that has met a stop id
    goes on with ids that mean nothing until all rows are done; `reasons` says which are.
    """

    def __init__(
        self,
        model: "Decoder",
        prompts: Sequence[Sequence[int]],
        plan: Plan,
        *,
        seeds: Sequence[int | None] = (None,),
        step: "Step | None" = None,
        cache: "KVCache | None" = None,
        images: "Sequence[Tiles]" = (),
    ) -> None:
        """A run that has not begun.

        Args:
        prompts: ids, all rows of one length.
        seeds: of each row's chance; None: another answer each time.
        step: reads one token of each row and gives logits; the model itself if None.
        cache: with room for prompt and answer, which may hold the beginning of the prompt already;
        a fresh one if None.
        images: those that the prompt has places for, in a run of one row.
        """
        self.model = model
        self.plan = plan
        self.step = step or _plain_step(model)
        self.num_prompt_tokens = len(prompts[0])
        self.reasons: list[StopReason | None] = [None] * len(prompts)
        self.cache = cache or model.new_cache(
            self.num_prompt_tokens + max(plan.max_new_tokens, 1),
            batch_size=len(prompts),
            images=images,
        )
        self._images = images
        self._prompts = prompts
        self._seeds = seeds
        self._first = 0.0
        self._last = 0.0
        self._start = 0.0
        self._count = 0

    @property
    def timing(self) -> Timing:
        """Of what has happened so far."""
        return Timing(
            prefill_seconds=self._first - self._start,
            decode_seconds=self._last - self._first,
            num_prompt_tokens=self.num_prompt_tokens * len(self._prompts),
            num_new_tokens=self._count,
        )

    def __iter__(self) -> Iterator[list[int]]:
        import torch

        from llamatool.model.decoder import require_finite

        # Ids go in at one end of the model, logits come out at the other.
        device, plan = self.model.device, self.plan
        chances = self._chances()
        self._start = time.perf_counter()
        ids_BT = torch.tensor(self._prompts, dtype=torch.long, device=device)
        with _memory_explained(), torch.inference_mode():
            images = self._unread_images()
            new_BT = ids_BT[:, self.cache.length :]
            logits_BV = self.model.prefill(new_BT, self.cache, images=images)[:, -1]
        require_finite(logits_BV, self.model.dtype)
        seen_BT = None
        if plan.sampling.repetition_penalty != 1.0:
            # An image's id may have no logit; the first id, which is seen anyway, stands for it.
            has_logit_BT = ids_BT < logits_BV.shape[-1]
            seen_BT = torch.where(has_logit_BT, ids_BT, ids_BT[:, :1])
            seen_BT = seen_BT.to(self.model.logits_device)
        # On a GPU the next step is under way before this token is looked at; on a CPU that would
        # only waste a step at the end.
        ahead = all(place.type == "cuda" for place in self.model.devices)
        for number in range(plan.max_new_tokens):
            with _memory_explained(), torch.inference_mode():
                token_B = self._choose(logits_BV, seen_BT, chances)
                if self.model.ranks is not None:  # seeds differ where none was given
                    token_B = self.model.ranks.first(token_B)
                if seen_BT is not None:
                    seen_BT = torch.cat((seen_BT, token_B[:, None]), dim=1)
                is_last = number + 1 == plan.max_new_tokens
                if ahead and not is_last:
                    logits_BV = self.step(token_B, self.cache)
                ids = token_B.tolist()
            self._clock()
            yield ids
            self._note_stops(ids)
            if all(self.reasons):
                return
            if not ahead and not is_last:
                with _memory_explained(), torch.inference_mode():
                    logits_BV = self.step(token_B, self.cache)
        self.reasons = [reason or "length" for reason in self.reasons]

    def _unread_images(self) -> "Sequence[Tiles]":
        """The images that the cache does not hold yet; it is emptied if it ends within one."""
        if not self._images or not self.cache.length:
            return self._images
        model, vision = self.model, self.model.config.vision
        assert vision is not None
        read = list(self._prompts[0][: self.cache.length]).count(vision.image_token_id)
        for number, image in enumerate(self._images):
            if not read:
                return self._images[number:]
            read -= 1 if model.has_cross_layers else model.vision_model.num_tokens(image)
            if read < 0:
                self.cache.truncate(0)
                return self._images
        return ()

    def stop(self, row: int, reason: StopReason) -> None:
        """Says from outside that a row is done."""
        self.reasons[row] = self.reasons[row] or reason

    def _chances(self) -> "list[Generator]":
        """A source of chance for each row, so that a row's answer does not depend on the others."""
        import torch

        if self.plan.sampling.is_greedy:
            return []
        generators = []
        for seed in self._seeds:
            generator = torch.Generator(device=self.model.logits_device)
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)
            generators.append(generator)
        return generators

    def _choose(
        self, logits_BV: "Tensor", seen_BT: "Tensor | None", chances: "list[Generator]"
    ) -> "Tensor":
        import torch

        if len(chances) <= 1:
            chance = chances[0] if chances else None
            return choose(logits_BV, self.plan.sampling, seen_BT=seen_BT, generator=chance)
        rows = [
            choose(
                logits_BV[row : row + 1],
                self.plan.sampling,
                seen_BT=None if seen_BT is None else seen_BT[row : row + 1],
                generator=chance,
            )
            for row, chance in enumerate(chances)
        ]
        return torch.cat(rows)

    def _clock(self) -> None:
        self._last = time.perf_counter()
        if not self._count:
            self._first = self._last
        self._count += 1

    def _note_stops(self, ids: Sequence[int]) -> None:
        for row, token_id in enumerate(ids):
            if token_id in self.plan.stop_ids:
                self.stop(row, "stop_token")


def _plain_step(model: "Decoder") -> "Step":
    """A step through the model as it is.

    It gives vectors, not ids: ids that the model has chosen itself need no check of their range,
    which would wait for the device.
    """

    def step(token_B: "Tensor", cache: "KVCache") -> "Tensor":
        embeddings_BTD = model.embed_tokens(token_B[:, None].to(model.device))
        logits_BQV: Tensor = model(embeddings_BTD=embeddings_BTD, cache=cache)
        return logits_BQV[:, -1]

    return step


@contextmanager
def _memory_explained() -> Iterator[None]:
    """Turns torch's report that memory ran out into a ResourceError."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise ResourceError(
            "the memory of the device ran out", hint="shorten the prompt, or try --quantize int8"
        ) from None


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
