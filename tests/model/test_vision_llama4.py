"""Llama 4's images against transformers: tower, projector, and features among the tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from llamatool.errors import InputError
from llamatool.model.decoder import Decoder
from llamatool.model.images import Tiles
from llamatool.model.vision_llama4 import patch_rotation, pixel_shuffle
from tests.model.tiny_models import their_cache
from tests.model.vision_models import LLAMA4_VISION, PATCH, build_llama4, random_tiles

TOLERANCE = 1e-4
SIDE = LLAMA4_VISION["image_size"]
KINDS = {
    "scout": {"use_qk_norm": True},
    "maverick": {"use_qk_norm": False, "interleave_moe_layer_step": 2, "num_local_experts": 8},
    # Llama Guard 4 is dense; its chunk size is null, which transformers itself cannot run, so a
    # chunk beyond the prompt stands for it.
    "guard": {"moe_layers": [], "attention_chunk_size": 4096},
}
SCOUT = build_llama4(**KINDS["scout"])


def image_of(grid: tuple[int, int], seed: int = 0) -> Tiles:
    """Tiles as Llama 4 has them: more than one are followed by the global one."""
    return random_tiles(grid, SIDE, seed, extra=int(grid != (1, 1)))


def prompt(length: int, images: dict[int, Tiles], seed: int = 1) -> Tensor:
    """Random ids, with a run of patch tokens in place of each image."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(90, (1, length), generator=generator)
    for place, image in images.items():
        ids[0, place : place + 4 * len(image.pixels_NCHW)] = PATCH
    return ids


def their_output(theirs: Any, ids: Tensor, images: Sequence[Tiles] = (), **more: Any) -> Any:
    """What the parts of transformers' model give, put together as its own forward does.

    That one ends, in 5.24, with an AttributeError: it asks its text model for `image_outputs`.
    """
    with torch.no_grad():
        vectors = theirs.get_input_embeddings()(ids)
        if images:
            pixels = torch.cat([image.pixels_NCHW for image in images])
            features = theirs.get_image_features(pixel_values=pixels).last_hidden_state
            projected = theirs.multi_modal_projector(features.flatten(0, 1))
            mask = theirs.get_placeholder_mask(ids, vectors, projected)
            vectors = vectors.masked_scatter(mask, projected)
        return theirs.language_model(inputs_embeds=vectors, **more)


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (3, 2), (4, 4)], ids=str)
def test_tower_and_projector(grid: tuple[int, int]) -> None:
    theirs, ours = SCOUT
    image = image_of(grid)
    with torch.no_grad():
        features = theirs.vision_model(image.pixels_NCHW).last_hidden_state.flatten(0, 1)
        projected = theirs.multi_modal_projector(features)
    found = ours.vision_model(image)
    assert found.shape == (4 * len(image.pixels_NCHW), 48)
    assert features.abs().max() > 0.5
    assert (found - features).abs().max() <= TOLERANCE
    assert (ours.features(image) - projected).abs().max() <= TOLERANCE
    assert ours.vision_model.num_tokens(image) == len(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grids", [[(1, 1)], [(2, 2)], [(1, 2), (1, 1), (3, 1)]], ids=str)
def test_logits(kind: str, grids: list[tuple[int, int]]) -> None:
    """Images of more tokens than a chunk, and several of them."""
    theirs, ours = build_llama4(**KINDS[kind])
    images = {3 + 20 * n: image_of(grid, n) for n, grid in enumerate(grids)}
    ids = prompt(70, images)
    expected = their_output(theirs, ids, list(images.values())).logits
    cache = ours.new_cache(70)
    found = ours.prefill(ids, cache, images=list(images.values()), logits_to_keep=70)
    assert 0.5 < expected.abs().max() < 50
    assert (found - expected).abs().max() <= TOLERANCE


def test_null_chunk_size_reads_images() -> None:
    """Llama Guard 4 has `attention_chunk_size` null: all attention is full."""
    theirs, ours = build_llama4(**KINDS["guard"])
    from tests.model.vision_models import same_weights

    text = {**theirs.config.to_dict()["text_config"], "attention_chunk_size": None}
    guard = same_weights(theirs, text_config=text)
    assert {spec.attention for spec in guard.plan} == {"full"}
    images = {4: image_of((2, 2))}
    ids = prompt(50, images)
    found = [
        model.prefill(ids, model.new_cache(50), images=[images[4]], logits_to_keep=50)
        for model in (guard, ours)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("piece", [1, 7, 8, 9, 16])
def test_cached_is_uncached(piece: int) -> None:
    """Pieces that end within an image, and at its end; then one token at a time."""
    _, ours = SCOUT
    images = {5: image_of((2, 1)), 30: image_of((1, 1), 1)}
    ids, all_images = prompt(60, images), list(images.values())
    whole = ours.prefill(ids, ours.new_cache(60), images=all_images, logits_to_keep=60)
    cache = ours.new_cache(60)
    found = ours.prefill(ids[:, :48], cache, piece=piece, images=all_images)
    assert (found[:, -1] - whole[:, 47]).abs().max() <= TOLERANCE
    for position in range(48, 60):
        found = ours(ids[:, position : position + 1], cache=cache)
        assert (found[:, 0] - whole[:, position]).abs().max() <= TOLERANCE


def test_an_image_in_a_later_turn() -> None:
    _, ours = SCOUT
    images = {5: image_of((2, 1)), 30: image_of((1, 1), 1)}
    ids, all_images = prompt(60, images), list(images.values())
    whole = ours.prefill(ids, ours.new_cache(60), images=all_images, logits_to_keep=60)
    cache = ours.new_cache(60)
    ours.prefill(ids[:, :25], cache, images=all_images[:1])
    found = ours.prefill(ids[:, 25:], cache, images=all_images[1:], logits_to_keep=35)
    assert (found - whole[:, 25:]).abs().max() <= TOLERANCE


def test_decoding_as_theirs() -> None:
    theirs, ours = SCOUT
    images = {2: image_of((1, 2))}
    ids = prompt(20, images)
    cache = ours.new_cache(40)
    found = ours.prefill(ids, cache, images=[images[2]])
    output = their_output(theirs, ids, [images[2]], use_cache=True)
    for _ in range(15):
        assert (found[:, -1] - output.logits[:, -1]).abs().max() <= TOLERANCE
        token = output.logits[:, -1:].argmax(-1)
        found = ours(token, cache=cache)
        output = their_output(theirs, token, **their_cache(output))


def test_text_alone_is_the_text_model() -> None:
    theirs, ours = SCOUT
    with torch.device("meta"):
        text = Decoder(ours.config)
    state = ours.state_dict()
    text.load_state_dict({name: state[name] for name in text.state_dict()}, assign=True)
    ids = prompt(40, {})
    found = ours(ids, logits_to_keep=None)
    assert torch.equal(found, text(ids, logits_to_keep=None))
    assert (found - their_output(theirs, ids).logits).abs().max() <= TOLERANCE


def test_another_number_of_patches_is_refused() -> None:
    _, ours = SCOUT
    image = image_of((1, 2))
    with pytest.raises(InputError, match="1 images need 12 image tokens, and the prompt has 8"):
        ours.prefill(prompt(30, {3: image_of((2, 1))})[:, :11], ours.new_cache(30), images=[image])


def test_rotation_of_patches() -> None:
    """Angles by column, then by row, counted from one; none for the class token."""
    _, ours = SCOUT
    vision = ours.config.vision
    cos, sin, interleaved = patch_rotation(vision, torch.device("cpu"))
    assert interleaved
    assert cos.shape == (17, 8)
    for patch in range(16):
        row, column = divmod(patch, 4)
        angles = [
            (place + 1) * 10000.0 ** (-2 * j / 8) for place in (column, row) for j in range(4)
        ]
        assert torch.allclose(cos[patch], torch.tensor(angles).cos(), atol=1e-6)
        assert torch.allclose(sin[patch], torch.tensor(angles).sin(), atol=1e-6)
    assert torch.equal(cos[16], torch.ones(8))
    assert torch.equal(sin[16], torch.zeros(8))


def test_pixel_shuffle() -> None:
    """A position holds a square of 2 x 2 patches, its upper row first."""
    patches = torch.arange(16.0)[None, :, None]
    assert pixel_shuffle(patches, 0.5)[0].tolist() == [
        [0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]
    ]  # fmt: skip
    assert pixel_shuffle(torch.zeros(2, 576, 1408), 0.5).shape == (2, 144, 5632)


def test_tokens_per_tile() -> None:
    from llamatool.config.catalog import find

    entry = find("llama-4-scout-17b-16e-instruct")
    assert entry is not None
    assert entry.config.vision.tokens_per_tile == 144
