"""Where images stand in a prompt, and the ids that the model reads there.

A chat format or template puts one `<|image|>` where an image belongs; what the model reads in its
place depends on how it sees. With cross-attention it is one id, beyond the vocabulary. Else it is
a run of `<|patch|>`, one for each feature, with marks between the tiles:

  one tile    <|image_start|> <|image|> patches <|image_end|>
  several     <|image_start|> (patches <|tile_x_separator|> patches ... <|tile_y_separator|>) for
              each row of tiles, then <|image|> patches of the global tile <|image_end|>

Source: transformers processing_llama4.py; llama-models llama4/chat_format.py and
llama3/chat_format.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llamatool.errors import UnsupportedError
from llamatool.generate.formats import IMAGE, control_id, find_control
from llamatool.generate.prompt import Prompt

if TYPE_CHECKING:
    from llamatool.config.model import ModelConfig
    from llamatool.model.images import Tiles
    from llamatool.tokenizers.base import Tokenizer


def with_images(
    prompt: Prompt, images: "Sequence[Tiles]", config: "ModelConfig", tokenizer: "Tokenizer"
) -> Prompt:
    """The prompt with the ids of `images` in their places, and the images themselves.

    Raises: UnsupportedError if the prompt has another number of places, because its chat template
    knows no images; TokenizerError if the tokenizer lacks a control token of images.
    """
    place = find_control(tokenizer, IMAGE)
    num_places = prompt.ids.count(place) if place is not None else 0
    if num_places != len(images):
        raise UnsupportedError(
            f"the chat format has places for {num_places} of {len(images)} images",
            hint="name another format with --template, such as llama-3 or llama-4",
        )
    ids: list[int] = []
    rest = iter(images)
    for token_id in prompt.ids:
        if token_id == place:
            ids += image_ids(next(rest), config, tokenizer)
        else:
            ids.append(token_id)
    return replace(prompt, ids=tuple(ids), images=tuple(images))


def image_ids(image: "Tiles", config: "ModelConfig", tokenizer: "Tokenizer") -> list[int]:
    """What the model reads for one image.

    Example: Llama 3.2 Vision -> [128256]; Llama 4, one tile -> 147 ids; 2 x 3 tiles -> 1017.
    """
    vision = config.vision
    assert vision is not None
    if config.cross_attention_layers:
        return [vision.image_token_id]
    patches = [vision.image_token_id] * vision.tokens_per_tile
    rows, columns = image.grid
    ids = [control_id(tokenizer, ("<|image_start|>",))]
    if rows * columns > 1:
        between = control_id(tokenizer, ("<|tile_x_separator|>",))
        after = control_id(tokenizer, ("<|tile_y_separator|>",))
        row = [*patches, *[between, *patches] * (columns - 1), after]
        ids += row * rows
    ids += [control_id(tokenizer, (IMAGE,)), *patches]
    return [*ids, control_id(tokenizer, ("<|image_end|>",))]
