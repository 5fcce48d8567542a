"""The control tokens of Llama 3 and Llama 4: names, ids, and which of them end a text.

Meta's `tokenizer.model` files hold only the ordinary tokens; the names of the control tokens live
in code, and they changed between releases while the ids stayed. One table for each release.
Sources: llama-models 0.3.0, llama3/tokenizer.py and llama4/tokenizer.py; the tokenizer.json files
of the first Llama 3 (April 2024) and of Llama 3.2 Vision.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from llamatool.config.model import Note

LLAMA3_FIRST_ID = 128_000
LLAMA3_NUM_SPECIAL = 256
LLAMA4_FIRST_ID = 200_000
LLAMA4_NUM_SPECIAL = 2_048


def llama3_specials() -> dict[str, int]:
    """The 256 control tokens of Meta's code for Llama 3.1 to 3.3, by name.

    Example: `<|eot_id|>` -> 128009; `<|reserved_special_token_245|>` -> 128255.
    """
    named = [
        "begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1",
        "finetune_right_pad_id", "step_id", "start_header_id", "end_header_id", "eom_id", "eot_id",
        "python_tag", "image",
    ]  # fmt: skip
    named += _numbered("reserved_special_token", 2, LLAMA3_NUM_SPECIAL - len(named))
    return _table(named, LLAMA3_FIRST_ID)


def llama3_first_release_specials() -> dict[str, int]:
    """The 256 control tokens as the first Llama 3 (April 2024) named them.

    Example: `<|reserved_special_token_2|>` -> 128004, later `<|finetune_right_pad_id|>`.
    """
    named = ["begin_of_text", "end_of_text", *_numbered("reserved_special_token", 0, 4)]
    named += ["start_header_id", "end_header_id", "reserved_special_token_4", "eot_id"]
    named += _numbered("reserved_special_token", 5, LLAMA3_NUM_SPECIAL - len(named))
    return _table(named, LLAMA3_FIRST_ID)


def llama4_specials() -> dict[str, int]:
    """The 2,048 control tokens of Llama 4, by name.

    Example: `<|image|>` -> 200090; `<|reserved_special_token_903|>` -> 202047.
    """
    post_train, vision = "text_post_train_reserved_special_token", "vision_reserved_special_token"
    named = ["begin_of_text", "end_of_text", "fim_prefix", "fim_middle", "fim_suffix"]
    named += ["header_start", "header_end", "eom", "eot", "step"]
    named += _numbered(post_train, 0, 6)
    named += ["python_start", "python_end", "finetune_right_pad"]
    named += _numbered(post_train, 8, 61)
    named += ["image_start", "image_end", *_numbered(vision, 0, 2)]
    named += ["tile_x_separator", "tile_y_separator", *_numbered(vision, 2, 4)]
    named += ["image", *_numbered(vision, 6, 1), "patch", *_numbered(vision, 7, 1041)]
    named += _numbered("reasoning_reserved_special_token", 0, 8)
    named += ["reasoning_thinking_start", "reasoning_thinking_end"]
    named += _numbered("reserved_special_token", 0, LLAMA4_NUM_SPECIAL - len(named))
    return _table(named, LLAMA4_FIRST_ID)


# End of a text, of a message, and of a turn: a reply may end with any of them.
STOP_NAMES = (
    "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>",
    "</s>", "<|im_end|>", "<|endoftext|>",
)  # fmt: skip
BOS_NAMES = ("<|begin_of_text|>", "<s>")


def bos_and_stops(specials: Mapping[str, int]) -> tuple[int | None, tuple[int, ...]]:
    """BOS and every id that ends a text, read from the well-known names.

    Example: Llama 3 -> 128000 and (128001, 128008, 128009).
    """
    bos = next((specials[name] for name in BOS_NAMES if name in specials), None)
    return bos, tuple(sorted({specials[name] for name in STOP_NAMES if name in specials}))


def llama3_release_note(specials: Mapping[str, int]) -> Note | None:
    """A note if a Llama 3 file names its control tokens otherwise than Meta's code does now."""
    ours = llama3_specials()
    odd = [name for name, token_id in specials.items() if ours.get(name) != token_id]
    if not odd:
        return None
    if dict(specials) == llama3_first_release_specials():
        return Note(
            "special_names_first_release",
            "control tokens have the names of the first Llama 3 (April 2024): 128004, 128005, "
            "128008 and 128010 are still reserved there; the ids are the same",
        )
    example = min(odd, key=lambda name: specials[name])
    return Note(
        "special_names_differ",
        f"{len(odd)} control tokens are named otherwise than in Meta's code for Llama 3.1 and "
        f"later, first `{example}` = {specials[example]}",
    )


_BRACKETED = re.compile(r"<[^<>\s]{1,80}>|\[[^\[\]\s]{1,40}\]")


class ControlStrings:
    """Counts the places of a text that a chat server would read as control tokens."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names: Collection[str] = frozenset(names)
        self._bracketed = frozenset(n for n in self._names if _BRACKETED.fullmatch(n))
        # A name of another shape is searched for as it is; there are few of them.
        self._others = tuple(self._names - self._bracketed)

    def find(self, text: str) -> list[str]:
        """Every occurrence, in order for the usual shapes `<...>` and `[...]`.

        Example: Llama 3, `hi <|eot_id|>` -> [`<|eot_id|>`].
        """
        found = []
        if "<" in text or "[" in text:
            found = [m for m in _BRACKETED.findall(text) if m in self._bracketed]
        for name in self._others:
            found += [name] * text.count(name)
        return found


def _numbered(stem: str, first: int, how_many: int) -> list[str]:
    return [f"{stem}_{i}" for i in range(first, first + how_many)]


def _table(names: list[str], first_id: int) -> dict[str, int]:
    return {f"<|{name}|>": first_id + i for i, name in enumerate(names)}
