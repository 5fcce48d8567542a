"""Images among the tokens: the layout of transformers' processor and of Meta's chat formats."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from llamatool.config.catalog import find  # noqa: E402
from llamatool.config.model import ModelConfig  # noqa: E402
from llamatool.errors import TokenizerError, UnsupportedError  # noqa: E402
from llamatool.generate.formats import FORMATS, Message  # noqa: E402
from llamatool.generate.images import image_ids, with_images  # noqa: E402
from llamatool.generate.prompt import Writing, encode_chat, encode_raw  # noqa: E402
from llamatool.generate.template import ChatTemplate  # noqa: E402
from llamatool.model.images import Tiles  # noqa: E402
from llamatool.sizing.kv_cache import image_tokens  # noqa: E402
from llamatool.tokenizers.base import Tokenizer  # noqa: E402

GRIDS = [(1, 1), (1, 2), (2, 1), (3, 2), (1, 16), (4, 4)]


def config(name: str) -> ModelConfig:
    entry = find(name)
    assert entry is not None
    return entry.config


LLAMA4 = config("llama-4-scout-17b-16e-instruct")
LLAMA32 = config("llama-3.2-11b-vision-instruct")


def tiles(grid: tuple[int, int]) -> Tiles:
    return Tiles(torch.zeros(grid[0] * grid[1] + (grid != (1, 1)), 3, 1, 1), grid)


def their_layout(grid: tuple[int, int]) -> str:
    from transformers.models.llama4.processing_llama4 import Llama4Processor

    return Llama4Processor._prompt_split_image(None, grid, 144)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_layout_of_llama_4(grid: tuple[int, int], llama4: Tokenizer) -> None:
    ids = image_ids(tiles(grid), LLAMA4, llama4)
    assert ids == llama4.encode(their_layout(grid), specials="all")
    assert (ids[0], ids[-1]) == (200080, 200081)
    assert ids.count(200092) == 144 * len(tiles(grid).pixels_NCHW)
    fewest, most = image_tokens(LLAMA4.vision)
    assert fewest <= len(ids) <= most == 2467
    if grid in ((1, 1), (4, 4), (1, 16)):
        assert len(ids) == (fewest if grid == (1, 1) else most)


def test_worked_numbers(llama4: Tokenizer, llama3: Tokenizer) -> None:
    assert len(image_ids(tiles((1, 1)), LLAMA4, llama4)) == 147
    assert len(image_ids(tiles((2, 3)), LLAMA4, llama4)) == 1017
    assert image_ids(tiles((2, 2)), LLAMA32, llama3) == [128256]
    assert image_tokens(LLAMA32.vision) == (1, 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_prompt_of_llama_4(count: int, llama4: Tokenizer) -> None:
    """The built-in format and the template of transformers' processor give the same ids."""
    from transformers.models.llama4 import processing_llama4

    images = [tiles(grid) for grid in ((1, 2), (1, 1), (2, 2))[:count]]
    messages = [Message("user", "What is <|image|> this?", count)]
    built_in = encode_chat(Writing("chat", "", FORMATS["llama-4"]), messages, llama4)
    template = ChatTemplate(
        processing_llama4.chat_template, "a test", {"bos_token": "<|begin_of_text|>"}
    )
    theirs = encode_chat(Writing("chat", "", template=template), messages, llama4)
    layouts = "".join(their_layout(image.grid) for image in images)
    before = "<|begin_of_text|><|header_start|>user<|header_end|>\n\n"
    after = "<|eot|><|header_start|>assistant<|header_end|>\n\n"
    expected = llama4.encode(before + layouts, specials="all")
    # The user's own `<|image|>` is text.
    expected += llama4.encode("What is <|image|> this?")
    expected += llama4.encode(after, specials="all")
    for prompt in (built_in, theirs):
        placed = with_images(prompt, images, LLAMA4, llama4)
        assert list(placed.ids) == expected
        assert placed.images == tuple(images)


@pytest.mark.parametrize("count", [1, 2])
def test_prompt_of_llama_3_2(count: int, llama3: Tokenizer) -> None:
    """Meta's tokenizer calls 128011 `<|image|>`; the model reads 128256."""
    messages = [Message("user", "What is this?", count)]
    prompt = encode_chat(Writing("chat", "", FORMATS["llama-3"]), messages, llama3)
    assert prompt.ids.count(128011) == count
    placed = with_images(prompt, [tiles((1, 1))] * count, LLAMA32, llama3)
    text = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
    ids = llama3.encode(text, specials="all")
    assert list(placed.ids[: len(ids) + count]) == ids + [128256] * count
    assert placed.ids[len(ids) + count :] == prompt.ids[len(ids) + count :]


def test_raw_prompt(llama3: Tokenizer) -> None:
    """BOS, the image, the text: as Meta's encode_content does."""
    prompt = encode_raw("A haiku:", llama3, num_images=1)
    placed = with_images(prompt, [tiles((1, 1))], LLAMA32, llama3)
    assert list(placed.ids) == [128000, 128256, *llama3.encode("A haiku:")]
    assert not placed.warnings


def test_a_template_with_no_place_is_refused(llama3: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}", "a test", {})
    messages = [Message("user", "hi", 1)]
    prompt = encode_chat(Writing("chat", "", template=template), messages, llama3)
    with pytest.raises(UnsupportedError, match="places for 0 of 1 images"):
        with_images(prompt, [tiles((1, 1))], LLAMA32, llama3)


def test_tokenizers_without_images_are_refused(small: Any) -> None:
    with pytest.raises(TokenizerError, match="no control token"):
        encode_raw("hi", small, num_images=1)


def test_the_processors_template_counts(tmp_path: Path) -> None:
    """Llama 3.2 Vision has one for its tokenizer and one, that knows images, for its processor."""
    from llamatool.generate.settings import read_folder

    config = {"chat_template": "text", "bos_token": "<|begin_of_text|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "images"}))
    template = read_folder(tmp_path).template
    assert template is not None
    assert (template.source, template.where) == ("images", "chat_template.json")
    assert template.variables == {"bos_token": "<|begin_of_text|>"}
    (tmp_path / "chat_template.jinja").write_text("both")
    template = read_folder(tmp_path).template
    assert template is not None
    assert template.where == "chat_template.jinja"


def test_text_alone_is_as_before(llama4: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}", "a test", {})
    prompt = encode_chat(Writing("chat", "", template=template), [Message("user", "hi")], llama4)
    assert list(prompt.ids) == llama4.encode("hi")
    assert prompt.images == ()
