"""The design of a test: which needles stand where, and the prompts, exact to the token.

A prompt of length L counts everything: what the template writes, the text, the question, the
beginning of the answer, and the room for the rest of the answer. The text is laid out with a slot
of its own for every needle. A slot holds sentences of exactly the needle's length, so that putting
a needle into it moves nothing else: prompts of one trial differ in their slots alone.

    before | sentences | slot | sentences | slot | ... | question, answer prefix | answer

Prompts with the same text form one job, which run.py computes with as little work as it can.

With several needles in a prompt, one stands at the depth of the cell and moves from slot to slot;
the others stand between the slots, at the same places in all prompts of a text.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal, cast

from llamatool.errors import InputError, UsageError
from llamatool.needle.grammar import WORDINGS, KeySource, Language, ValueSource, Wording
from llamatool.needle.haystack import (
    DocumentHaystack,
    Encoder,
    Filler,
    Haystack,
    smallest_gap,
    spacing,
)
from llamatool.needle.places import PHASES, Stretch, free_stretches, room, spread
from llamatool.needle.subject import Frame
from llamatool.records import record
from llamatool.units import format_tokens

Mode = Literal["single", "packed", "sweep"]
Kind = Literal["needle", "straddle", "no_needle", "wrong_key", "short", "alone"]
CONTROLS: tuple[Kind, ...] = ("no_needle", "wrong_key", "short", "alone")

MIN_LENGTH = 64
SHORT_LENGTH = 1024  # of the control in a short context
MAX_NEEDLES = 64  # of one prompt
EASE = 4  # tokens around further needles beyond the smallest gap: few sentences are that short
MAX_NEEDLE_SHARE = 0.1  # of a text may be needles; further trials get texts of their own
DEPTH_TOLERANCE = 12  # tokens
SIGNATURE_SAMPLE = 200
_BREAK = "\n\n"  # between the text and the question


@record
class Design:
    """What is to be tested."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]  # 0 to 1
    trials: int = 6
    mode: Mode = "single"
    wording: Wording = WORDINGS["en"]
    language: Language = "en"
    keys: str = "words"
    values: str = "digits:6"
    distractors: int = 0
    needles: int = 1  # in every prompt, all asked for
    max_new_tokens: int = 24
    use_prefix: bool = True
    controls: bool = True
    straddle: bool = False
    seed: int = 0

    @property
    def has_keys(self) -> bool:
        """Whether needle and question are about a key, so that there can be several needles."""
        return "{key}" in self.wording.needle and "{key}" in self.wording.question


@record
class Needle:
    """A fact, its question and its answer, as text and as ids."""

    key: str
    value: str
    text: str
    ids: tuple[int, ...]
    question: str
    tail: tuple[int, ...]  # question, template, answer prefix
    gold: tuple[int, ...]  # what the model should write behind the tail


@record
class Cell:
    """One trial of the grid or of a control."""

    kind: Kind
    length: int  # tokens
    depth: float  # target, 0 to 1; where there is no needle, 0
    trial: int


@record
class Question:
    """One question to a job's text: an optional change of the text, then tail and answer."""

    cell: Cell
    needle: Needle  # asked for
    end: int  # tokens of the text that precede the tail
    start: int | None  # first token of the needle in the prompt, None if it is not in there
    patch: tuple[int, ...] | None  # ids that replace the text's own from `start` on
    others: tuple[tuple[str, str], ...] = ()  # values and keys of the other needles
    also: tuple["Question", ...] = ()  # to the same prompt; their cell's depth is their own


@record
class Job:
    """A text and the questions to it."""

    number: int
    ids: tuple[int, ...]
    questions: tuple[Question, ...]
    num_foreign: int = 0  # generated sentences that closed gaps in documents


@record
class Outline:
    """A job before it is built: what it costs can be told from this alone."""

    number: int
    kind: Literal["grid", "straddle", "short", "bare", "alone"]
    mode: Mode
    lengths: tuple[int, ...]  # one; several in a sweep
    depths: tuple[float, ...]
    trials: tuple[int, ...]  # that share the text: one, but in packed and sweep jobs
    controls: tuple[Kind, ...] = ()
    needles: int = 1  # in the prompt of each cell but the controls'

    def questions_to(self, cell: Cell) -> int:
        """How many questions one of its cells asks: one to each needle."""
        return 1 if cell.kind in self.controls else self.needles

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every trial of this job."""
        kind: Kind = "needle"
        if self.kind in ("straddle", "short", "alone"):
            kind = cast("Kind", self.kind)
        grid = [
            Cell(kind, length, depth, trial)
            for length in self.lengths
            for depth in self.depths
            for trial in self.trials
            if self.kind != "bare"
        ]
        return (
            *grid,
            *(
                Cell(control, self.lengths[-1], 0.0, trial)
                for control in self.controls
                for trial in self.trials
            ),
        )


@record
class Sizes:
    """Token counts that are the same in every trial."""

    needle: int
    tail: int
    gold: int
    budget: int  # kept free for the answer
    gap: int  # every stretch of at least so many tokens can be filled
    before: int

    def smallest_length(self) -> int:
        """The shortest prompt with a needle in some text."""
        return self.before + self.needle + 2 * self.gap + self.tail + self.budget


class Experiment:
    """Builds the jobs of a design for one tokenizer and prompt format."""

    def __init__(self, design: Design, encoder: Encoder, frame: Frame, haystack: Haystack) -> None:
        """Counts the tokens of needles and questions and checks that everything fits.

        Raises: UsageError if a length is too short or the design contradicts itself; InputError
        if the answer already stands in the haystack.
        """
        self.design = design
        self.encoder = encoder
        self.frame = frame
        self.haystack = haystack
        self._check_design()
        signature = self._signature()
        budget = max(design.max_new_tokens, signature[2] + 1)
        self.sizes = Sizes(*signature, budget, smallest_gap(haystack), len(frame.before))
        self._signature_wanted = signature
        self._check_lengths()

    def outlines(self, chunk: int | None = None) -> tuple[Outline, ...]:
        """The jobs, in the order in which they run: controls last.

        Args: chunk: of the model's chunked layers, for cells across its borders.
        Raises: UsageError if borders are asked for and there is none.
        """
        made = list(self._grid_outlines())
        if self.design.straddle:
            made += self._straddle_outlines(chunk)
        if self.design.controls:
            made += self._control_outlines()
        return tuple(replace(outline, number=number) for number, outline in enumerate(made))

    def build(self, outline: Outline, chunk: int | None = None) -> Job:
        """The job with its ids.

        Raises: InputError if the haystack is too short.
        """
        if outline.kind == "alone":
            return self._alone(outline)
        if outline.mode == "single":
            return self._single(outline, chunk)
        return self._packed(outline)

    def prompt(
        self, job: Job, question: Question, asked: Question | None = None
    ) -> tuple[int, ...]:
        """All ids of one prompt, without the answer.

        Args: asked: one of `question.also`, whose tail ends the prompt instead.
        """
        ids = list(job.ids[: question.end])
        if question.patch is not None and question.start is not None:
            ids[question.start : question.start + len(question.patch)] = question.patch
        return (*ids, *(asked or question).needle.tail)

    def body_end(self, length: int) -> int:
        """Tokens of a prompt of `length` that precede the question."""
        return length - self.sizes.budget - self.sizes.tail

    def target(self, length: int, depth: float, group: int = 1) -> int:
        """Where a needle of that depth should begin; `group` needles stand side by side.

        Depth 0 is the first token of the text, depth 1 the last sentence before the question.
        """
        first = self.sizes.before
        last = self.body_end(length) - group * self.sizes.needle
        return first + round(depth * (last - first))

    def depth_of(self, start: int, length: int) -> float:
        """The depth at which a needle that begins at `start` stands."""
        first = self.sizes.before
        last = self.body_end(length) - self.sizes.needle
        return (start - first) / (last - first) if last > first else 0.0

    def random_values(self, trial: int, how_many: int) -> list[str]:
        """Values that no needle of the trial has; none where the answer is given."""
        if "{value}" not in self.design.wording.needle:
            return []
        draw = random.Random(f"rivals {self.design.seed} {trial}")
        values = ValueSource(self.design.values, draw)
        return [values.next_value() for _ in range(how_many)]

    def answer_ids(self, needle: Needle, value: str) -> tuple[int, ...]:
        """The ids with which `value` would answer the needle's question."""
        return self._needle(needle.key, value).gold

    # The grid.

    def _grid_outlines(self) -> Iterator[Outline]:
        design = self.design
        if design.mode == "single":
            for length in design.lengths:
                groups = self._with_room(length, self._apart(length, design.depths))
                for trial in range(design.trials):
                    for number, depths in enumerate(groups):
                        extra: tuple[Kind, ...] = ()
                        if number == 0 and design.controls:
                            extra = self._controls_in_grid()
                        yield Outline(
                            0, "grid", "single", (length,), depths, (trial,), extra, design.needles
                        )
            return
        spans = [design.lengths] if design.mode == "sweep" else [(n,) for n in design.lengths]
        for lengths in spans:
            together = self.trials_per_text(lengths)
            for first in range(0, design.trials, together):
                trials = tuple(range(first, min(first + together, design.trials)))
                extra = ("wrong_key",) if design.controls else ()
                yield Outline(0, "grid", design.mode, lengths, design.depths, trials, extra)

    def _controls_in_grid(self) -> tuple[Kind, ...]:
        """Those that are asked of a text of the grid: without any needle it must hold no other."""
        if not self.design.has_keys:
            return ("no_needle",)
        return ("no_needle", "wrong_key") if self.design.needles == 1 else ("wrong_key",)

    def trials_per_text(self, lengths: Sequence[int]) -> int:
        """Trials whose needles share a text: as long as needles stay below a tenth of it."""
        if self.design.mode == "single":
            return 1
        room = min(self.body_end(length) * MAX_NEEDLE_SHARE for length in lengths)
        slots = len(self.design.depths) * (1 if self.design.mode == "packed" else len(lengths))
        return max(1, min(self.design.trials, int(room / (slots * self.sizes.needle))))

    def _apart(self, length: int, depths: Sequence[float]) -> list[tuple[float, ...]]:
        """Depths in groups whose slots do not meet; one group but in very short texts."""
        groups: list[list[float]] = []
        for depth in sorted(depths):
            start = self.target(length, depth)
            for group in groups:
                if self.target(length, group[-1]) + self.sizes.needle + self.sizes.gap <= start:
                    group.append(depth)
                    break
            else:
                groups.append([depth])
        return [tuple(group) for group in groups]

    def _straddle_outlines(self, chunk: int | None) -> Iterator[Outline]:
        if chunk is None:
            raise UsageError(
                "--straddle needs a model with chunked layers, and this one has none",
                hint="it is for Llama 4 and for `pocket`",
            )
        for length in self.design.lengths:
            borders = self.borders(length, chunk)
            if not borders:
                continue
            first, end = self.sizes.before, self.body_end(length) - self.sizes.needle
            depths = tuple(
                (border - self.sizes.needle // 2 - first) / (end - first) for border in borders
            )
            groups = self._with_room(length, [depths], chunk)
            for trial in range(self.design.trials):
                for group in groups:
                    yield Outline(
                        0, "straddle", "single", (length,), group, (trial,), (), self.design.needles
                    )

    def borders(self, length: int, chunk: int) -> tuple[int, ...]:
        """Chunk borders within the text, at most as many as there are depths, evenly chosen."""
        margin = self.sizes.needle + 2 * self.sizes.gap
        inside = [
            border
            for border in range(chunk, self.body_end(length) - margin, chunk)
            if border > self.sizes.before + margin
        ]
        wanted = min(len(inside), len(self.design.depths))
        if wanted < 2:
            return tuple(inside[:wanted])
        return tuple(inside[i * (len(inside) - 1) // (wanted - 1)] for i in range(wanted))

    def _control_outlines(self) -> Iterator[Outline]:
        design = self.design
        short = max(min(SHORT_LENGTH, design.lengths[0]), self.smallest_length())
        for trial in range(design.trials):
            depth = design.depths[trial % len(design.depths)]
            yield Outline(0, "short", "single", (short,), (depth,), (trial,), (), design.needles)
            bare = (short,) if design.mode != "single" else design.lengths
            if design.mode != "single" or design.needles > 1:
                for length in bare:
                    yield Outline(0, "bare", "single", (length,), (), (trial,), ("no_needle",))
            yield Outline(0, "alone", "single", (self._alone_length(),), (0.0,), (trial,))

    def _alone_length(self) -> int:
        sizes = self.sizes
        return sizes.before + sizes.needle + sizes.tail + sizes.budget

    # Building.

    def _single(self, outline: Outline, chunk: int | None) -> Job:
        (trial,), (length,) = outline.trials, outline.lengths
        apart, end = self.design.distractors, self.body_end(length)
        # Further needles come last, so that the others are the same with and without them.
        needle, decoy, *more = self._needles(trial, 1 + outline.needles + apart)
        distractors, further = more[:apart], more[apart:]
        wanted = [(self.target(length, depth), depth) for depth in outline.depths]
        if outline.kind == "straddle":
            first, last = self.sizes.before, end - self.sizes.needle
            wanted = [(first + round(d * (last - first)), d) for d in outline.depths]
        starts = [start for start, _ in wanted]
        extra = self._distractor_starts(starts, length, len(distractors), trial)
        slots = sorted((*starts, *extra))
        places: list[int] = []
        if further:
            kept_apart = chunk if outline.kind == "straddle" else None
            places = self._further_starts(slots, length, len(further), trial, kept_apart)
            layout = self._lay_out(
                trial, [(sorted((*self._settled(slots, end), *places)), end)], outline.kind
            )
        else:
            layout = self._lay_out(trial, [(slots, end)], outline.kind)
        found = [start for start in layout.starts if start not in places]
        placed = dict(zip(slots, found, strict=True))
        ids = list(layout.ids)
        for start, other in (
            *zip((placed[start] for start in extra), distractors, strict=True),
            *zip(places, further, strict=True),
        ):
            ids[start : start + len(other.ids)] = other.ids
        others = tuple((n.value, n.key) for n in (*distractors, *further))
        questions = [
            Question(
                cell, needle, end, placed[start], needle.ids, others,
                self._also(cell, needle, end, tuple(zip(places, further, strict=True)), others),
            )
            for cell, start in zip(outline.cells, starts, strict=False)
        ]  # fmt: skip
        for cell in outline.cells[len(starts) :]:
            if cell.kind == "no_needle":
                questions.append(Question(cell, needle, end, None, None, others))
            else:  # a needle with another key stands last; its value counts as a hit
                start = placed[starts[-1]] if further else layout.starts[-1]
                asked = replace(decoy, value=needle.value, gold=needle.gold)
                questions.append(Question(cell, asked, end, start, needle.ids, others))
        return Job(outline.number, tuple(ids), tuple(questions), layout.num_foreign)

    def _also(
        self,
        cell: Cell,
        needle: Needle,
        end: int,
        further: Sequence[tuple[int, Needle]],
        others: Sequence[tuple[str, str]],
    ) -> tuple[Question, ...]:
        """The questions to the further needles of a prompt."""
        everything = ((needle.value, needle.key), *others)
        return tuple(
            Question(
                replace(cell, depth=self.depth_of(start, cell.length)), asked, end, start, None,
                tuple(pair for pair in everything if pair[1] != asked.key),
            )
            for start, asked in further
        )  # fmt: skip

    def _packed(self, outline: Outline) -> Job:
        """Every slot holds its needle for good; the questions come at the end of each length."""
        trials = outline.trials
        slots = self._shared_slots(outline)
        segments: list[tuple[list[int], int]] = [([], self.body_end(n)) for n in outline.lengths]
        for target, _ in slots:
            self._into_segment(target, segments, len(trials) * self.sizes.needle)
        layout = self._lay_out(trials[0], segments, "grid", len(trials))
        needles = {trial: self._needles(trial, len(slots) + 1) for trial in trials}
        everything = tuple((n.value, n.key) for few in needles.values() for n in few[:-1])
        ids, questions = list(layout.ids), []
        for number, (start, (_, cells)) in enumerate(zip(layout.starts, slots, strict=True)):
            for member, trial in enumerate(trials):
                needle = needles[trial][number]
                at = start + member * self.sizes.needle
                ids[at : at + len(needle.ids)] = needle.ids
                others = tuple(pair for pair in everything if pair[0] != needle.value)
                for cell in cells:
                    asked = replace(cell, trial=trial)
                    end = self.body_end(cell.length)
                    questions.append(Question(asked, needle, end, at, None, others))
        for cell in outline.cells:
            if cell.kind == "wrong_key":
                # A key that no needle has: any value of the text would be a hit.
                asked_for, other = needles[cell.trial][-1], needles[cell.trial][-2]
                asked_for = replace(asked_for, value=other.value, gold=other.gold)
                end = self.body_end(cell.length)
                questions.append(Question(cell, asked_for, end, None, None, everything))
        questions.sort(key=lambda q: (q.end, q.cell.kind, q.cell.depth, q.cell.trial))
        return Job(outline.number, tuple(ids), tuple(questions), layout.num_foreign)

    def _shared_slots(self, outline: Outline) -> list[tuple[int, list[Cell]]]:
        """Where needles stand, and which cells each serves.

        In a sweep one needle serves several lengths where their depths fall onto one place: depth
        0 is the same for all.
        """
        group = len(outline.trials)
        targets = sorted(
            (
                (self.target(length, depth, group), length, depth)
                for length in outline.lengths
                for depth in outline.depths
            ),
        )
        slots: list[tuple[int, list[Cell]]] = []
        for target, length, depth in targets:
            cell = Cell("needle", length, depth, outline.trials[0])
            if slots and target - slots[-1][0] <= DEPTH_TOLERANCE:
                slots[-1][1].append(cell)
            else:
                slots.append((target, [cell]))
        return slots

    def _into_segment(
        self, target: int, segments: Sequence[tuple[list[int], int]], width: int
    ) -> None:
        """Notes a slot in the stretch that holds it.

        Across the end of a shorter length it moves in front of it: the question must follow
        whole sentences there.
        """
        for starts, end in segments:
            if target < end:
                starts.append(min(target, end - width))
                return
        raise AssertionError(f"a slot at {target} behind the last length")

    def _alone(self, outline: Outline) -> Job:
        (trial,) = outline.trials
        needle = self._needles(trial, 1)[0]
        ids = (*self.frame.before, *needle.ids)
        (cell,) = outline.cells
        question = Question(cell, needle, len(ids), self.sizes.before, None)
        return Job(outline.number, ids, (question,))

    def _distractor_starts(
        self, starts: Sequence[int], length: int, how_many: int, trial: int
    ) -> list[int]:
        """Places for other needles, away from the slots."""
        draw = random.Random(f"distractors {self.design.seed} {trial}")
        size, margin = self.sizes.needle, self.sizes.needle + self.sizes.gap
        taken, found = list(starts), []
        first, last = self.sizes.before, self.body_end(length) - size
        for _ in range(how_many):
            for _ in range(200):
                start = draw.randint(first, max(first, last))
                if all(abs(start - other) >= margin for other in taken):
                    taken.append(start)
                    found.append(start)
                    break
            else:
                raise UsageError(
                    f"{how_many} distractors do not fit into {format_tokens(length)} tokens",
                    hint="ask for fewer, for fewer depths, or for longer texts",
                )
        return found

    # Several needles in a prompt.

    def smallest_length(self) -> int:
        """The shortest prompt with all its needles in some text, at any of the depths."""
        sizes, needed = self.sizes, self._room_needed()
        if not needed:
            return sizes.smallest_length()
        length = (needed + 1) * (sizes.needle + sizes.gap + EASE)
        length = max(length + sizes.before + sizes.tail + sizes.budget, sizes.smallest_length())
        while not all(self._room(length, (depth,)) >= needed for depth in self.design.depths):
            length += 1
        return length

    def _with_room(
        self, length: int, groups: Iterable[tuple[float, ...]], chunk: int | None = None
    ) -> list[tuple[float, ...]]:
        """Groups of depths, parted until each leaves room for the further needles.

        Raises: UsageError if one needle alone does not.
        """
        found: list[tuple[float, ...]] = []
        for group in groups:
            if not self._room_needed() or self._room(length, group, chunk) >= self._room_needed():
                found.append(group)
            elif len(group) > 1:
                found += self._with_room(length, [group[::2], group[1::2]], chunk)
            else:
                raise UsageError(
                    f"{self.design.needles} needles do not fit into {format_tokens(length)} tokens"
                    + (f" between borders of chunks of {chunk}" if chunk else ""),
                    hint="ask for fewer of them, or for longer texts",
                )
        return found

    def _room_needed(self) -> int:
        """Needles that there must be room for beside slots and distractors.

        A distractor takes its own place and can spoil that of a neighbour on each side.
        """
        further = self.design.needles - 1
        return further + 3 * self.design.distractors if further else 0

    def _room(self, length: int, depths: Sequence[float], chunk: int | None = None) -> int:
        """Further needles that fit between the slots of these depths."""
        slots = [self.target(length, depth) for depth in depths]
        stretches = self._free(self._settled(slots, self.body_end(length)), length, chunk)
        return room(stretches, self.sizes.needle, self.sizes.gap + EASE)

    def _free(self, slots: Sequence[int], length: int, chunk: int | None) -> list[Stretch]:
        end = self.body_end(length)
        borders = range(chunk, end, chunk) if chunk is not None else ()
        return free_stretches(slots, self.sizes.before, end, self.sizes.needle, borders)

    def _settled(self, slots: Sequence[int], end: int) -> list[int]:
        """Where slots will stand that should begin at these places."""
        found, position = [], self.sizes.before
        gaps = _gaps(slots, position, end, self.sizes.needle, self.sizes.gap)
        for gap in gaps[:-1]:
            found.append(position + gap)
            position += gap + self.sizes.needle
        return found

    def _further_starts(
        self, slots: Sequence[int], length: int, how_many: int, trial: int, chunk: int | None
    ) -> list[int]:
        """Places of the needles that stay where they are, evenly between the slots.

        Args: chunk: keeps them from lying across its borders.
        """
        settled = self._settled(slots, self.body_end(length))
        phase = random.Random(f"further {self.design.seed} {trial}").randrange(PHASES)
        stretches = self._free(settled, length, chunk)
        return spread(stretches, how_many, phase, self.sizes.needle, self.sizes.gap + EASE)

    def _lay_out(
        self,
        trial: int,
        segments: Sequence[tuple[Sequence[int], int]],
        kind: str,
        group: int = 1,
    ) -> "_Layout":
        """Sentences around slots at the given starts, each segment ending exactly at its end."""
        filler = Filler(self.haystack, _text_seed(self.design.seed, trial, kind))
        width = group * self.sizes.needle
        ids: list[int] = list(self.frame.before)
        placed: list[int] = []
        for starts, end in segments:
            gaps = _gaps(starts, len(ids), end, width, self.sizes.gap)
            for number, gap in enumerate(gaps):
                ids += chain.from_iterable(unit.ids for unit in filler.exact(gap))
                if number < len(starts):
                    placed.append(len(ids))
                    for _ in range(group):
                        units = filler.exact(self.sizes.needle)
                        ids += chain.from_iterable(unit.ids for unit in units)
            assert len(ids) == end, (len(ids), end)
        return _Layout(tuple(ids), tuple(placed), filler.num_foreign)

    # Needles.

    def _needles(self, trial: int, how_many: int) -> list[Needle]:
        """Needles of a trial: other keys and values for each, but the same number of tokens."""
        design = self.design
        if not design.has_keys:
            fixed = self._needle("", self._fixed_value(trial))
            return [fixed] * how_many
        draw = random.Random(f"needles {design.seed} {trial}")
        keys, values = self._sources(draw)
        found: list[Needle] = []
        for _ in range(5_000):
            if len(found) == how_many:
                return found
            needle = self._needle(keys.next_key(), values.next_value())
            if self._size(needle) == self._signature_wanted and not self._in_haystack(needle):
                found.append(needle)
        raise UsageError(
            f"found only {len(found)} of {how_many} keys and values of equal numbers of tokens",
            hint="use --keys names or --value digits:6, or ask for fewer needles",
        )

    def _sources(self, draw: random.Random) -> tuple[KeySource, ValueSource]:
        design = self.design
        return KeySource(design.keys, design.language, draw), ValueSource(design.values, draw)

    def _fixed_value(self, trial: int) -> str:
        if "{value}" not in self.design.wording.needle:
            return self.design.wording.answer.strip()
        draw = random.Random(f"needles {self.design.seed} {trial}")
        values = ValueSource(self.design.values, draw)
        for _ in range(1_000):
            value = values.next_value()
            if self._size(self._needle("", value)) == self._signature_wanted:
                return value
        raise UsageError("no value with the usual number of tokens was found")

    def _needle(self, key: str, value: str) -> Needle:
        wording, encoder = self.design.wording, self.encoder
        text = _filled(wording.needle, key, value)
        question = _filled(wording.question, key, value)
        prefix = _filled(wording.answer_prefix, key, value) if self.design.use_prefix else ""
        answer = _filled(wording.answer, key, value)
        if self.frame.is_chat:
            prefix = prefix.lstrip()
            tail = (
                *encoder.ids(_BREAK + question),
                *self.frame.after,
                *(encoder.ids(prefix) if prefix else ()),
            )
            gold = encoder.continuation(prefix, answer if prefix else answer.lstrip())
        else:
            before = _BREAK + question + wording.cue + prefix
            tail = encoder.ids(before)
            gold = encoder.continuation(before, answer)
        ids = encoder.ids(spacing(self.design.language).format(text))
        return Needle(key, answer.strip(), text, ids, question, tail, gold)

    def _size(self, needle: Needle) -> tuple[int, int, int]:
        return len(needle.ids), len(needle.tail), len(needle.gold)

    def _in_haystack(self, needle: Needle) -> bool:
        haystack = self.haystack
        return haystack.contains(needle.value) or (
            bool(needle.key) and haystack.contains(needle.key)
        )

    def _signature(self) -> tuple[int, int, int]:
        """The most common token counts of needle, tail and answer."""
        if not self.design.has_keys and "{value}" not in self.design.wording.needle:
            return self._size(self._needle("", self.design.wording.answer.strip()))
        draw = random.Random("signature")
        values = ValueSource(self.design.values, draw)
        counts: Counter[tuple[int, int, int]] = Counter()
        for _ in range(SIGNATURE_SAMPLE):
            key = KeySource(self.design.keys, self.design.language, draw).next_key()
            counts[self._size(self._needle(key, values.next_value()))] += 1
            if len(counts) == 1 and counts.total() >= SIGNATURE_SAMPLE // 4:
                break
        # Among equals the smallest, so that the choice does not depend on an order.
        return min(counts, key=lambda size: (-counts[size], size))

    def _check_design(self) -> None:
        design, wording = self.design, self.design.wording
        if design.mode != "single" and not design.has_keys:
            raise UsageError(
                f"--mode {design.mode} asks for many needles, which needs {{key}} in --needle and"
                " --question",
                hint="use --mode single",
            )
        if design.distractors and not design.has_keys:
            raise UsageError("--distractors needs {key} in --needle and --question")
        if design.needles > 1:
            self._check_needles()
        if not design.has_keys and "{value}" not in wording.needle:
            answer = wording.answer.strip()
            if answer not in wording.needle:
                raise UsageError(f"the answer `{answer[:80]}` does not stand in the needle")
            if self.haystack.contains(answer) or self.haystack.contains(wording.needle):
                raise InputError(
                    f"the answer `{answer[:80]}` already stands in the haystack",
                    where=self.haystack.name,
                    hint="choose a needle whose answer is not in the documents",
                )

    def _check_needles(self) -> None:
        design, wording = self.design, self.design.wording
        if design.needles > MAX_NEEDLES:
            raise UsageError(f"at most {MAX_NEEDLES} needles in a prompt, not {design.needles}")
        if design.mode != "single":
            raise UsageError(
                f"--mode {design.mode} has a needle at every depth already, and asks for each",
                hint="--needles is for --mode single",
            )
        if not design.has_keys or "{value}" not in wording.needle:
            raise UsageError(
                "--needles needs {key} and {value} in --needle, and {key} in --question",
                hint="without them all the needles of a prompt would be the same",
            )
        if "{value}" not in wording.answer:
            raise UsageError("--needles needs {value} in --answer, or no --answer")

    def _check_lengths(self) -> None:
        if self.design.needles > 1:
            self._needles(0, 1 + self.design.needles + self.design.distractors)  # enough keys?
        smallest = max(self.smallest_length(), MIN_LENGTH)
        self._check_documents()
        short = [length for length in self.design.lengths if length < smallest]
        if short:
            sizes = self.sizes
            many = self.design.needles > 1
            needle = f"{self.design.needles} needles of" if many else "needle"
            raise UsageError(
                f"{short[0]} tokens do not hold {needle} ({sizes.needle}), question ({sizes.tail}),"
                f" answer ({sizes.budget}) and some text",
                hint=f"the smallest length that works is {smallest}",
            )

    def _check_documents(self) -> None:
        """Before anything runs: documents must reach for the longest text."""
        haystack = self.haystack
        if not isinstance(haystack, DocumentHaystack) or haystack.repeats:
            return
        needed = self.body_end(max(self.design.lengths)) - self.sizes.before
        if haystack.num_tokens < needed:
            raise InputError(
                f"the haystack of {haystack.num_tokens:,} tokens is"
                f" {needed - haystack.num_tokens:,} tokens too short for"
                f" {format_tokens(max(self.design.lengths))}",
                where=haystack.name,
                hint="name more documents, ask for shorter lengths, or allow --repeat",
            )


@record
class _Layout:
    ids: tuple[int, ...]
    starts: tuple[int, ...]
    num_foreign: int


def _gaps(starts: Sequence[int], first: int, end: int, width: int, smallest: int) -> list[int]:
    """Tokens before each slot and behind the last: each 0 or at least `smallest`.

    The slots come as close to `starts` as that allows.
    """
    gaps: list[int] = []
    position = first
    for number, start in enumerate(starts):
        latest = end - (len(starts) - number) * width
        gap = max(0, min(start, latest) - position)
        if 0 < gap < smallest:
            up = smallest if position + smallest <= latest else 0
            gap = up if 2 * gap >= smallest else 0
        gaps.append(gap)
        position += gap + width
    rest = end - position
    if 0 < rest < smallest:
        # Close the last gap by moving the latest slots that have room in front of them.
        for number in range(len(gaps) - 1, -1, -1):
            if gaps[number] + rest >= smallest:
                gaps[number] += rest
                rest = 0
                break
    if rest < 0 or 0 < rest < smallest:
        raise UsageError(
            f"{len(starts)} needles do not fit into {end - first} tokens of text",
            hint="ask for fewer depths or longer texts",
        )
    return [*gaps, rest]


def _filled(text: str, key: str, value: str) -> str:
    """`text` with its placeholders filled; other braces stay as they are."""
    return text.replace("{key}", key).replace("{value}", value)


def _text_seed(seed: int, trial: int, kind: str) -> int:
    """Of the sentences: other ones for each trial, the same for all lengths and models."""
    return random.Random(f"text {seed} {trial} {kind}").getrandbits(48)


def distinct_texts(outlines: Iterable[Outline]) -> dict[int, int]:
    """How many different texts stand behind the trials of each length."""
    texts: dict[int, set[int]] = {}
    for outline in outlines:
        if outline.kind == "grid":
            for length in outline.lengths:
                texts.setdefault(length, set()).add(outline.trials[0])
    return {length: len(found) for length, found in texts.items()}
