"""Llama 3.2 Vision against transformers, with its two faults taken out, and against the formula.

transformers (5.24) takes the outputs of the intermediate layers where Meta takes their inputs, and
lets tokens before the first image see it. So here its indices are one lower, and the image comes
first; what comes before an image is compared with the formula, written plainly.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from llamatool.config.layers import plan_layers
from llamatool.errors import InputError, UnsupportedError
from llamatool.model.cache import SeenImage
from llamatool.model.cross import stretches
from llamatool.model.decoder import Decoder
from llamatool.model.images import Tiles
from llamatool.sizing.kv_cache import kv_cache
from tests.model.vision_models import (
    MLLAMA_IMAGE,
    MLLAMA_VOCABULARY,
    SIDE,
    build_mllama,
    random_tiles,
    same_weights,
)

TOLERANCE = 1e-4
GRIDS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]
MODELS = build_mllama()


def their_inputs(images: list[Tiles]) -> dict[str, Tensor]:
    ratios = MODELS[1].config.vision.supported_aspect_ratios
    pixels = torch.zeros(1, len(images), 4, 3, SIDE, SIDE)
    ids = torch.zeros(1, len(images), dtype=torch.long)
    mask = torch.zeros(1, len(images), 4, dtype=torch.long)
    for number, image in enumerate(images):
        count = len(image.pixels_NCHW)
        pixels[0, number, :count] = image.pixels_NCHW
        ids[0, number] = ratios.index(image.grid) + 1
        mask[0, number, :count] = 1
    return {"pixel_values": pixels, "aspect_ratio_ids": ids, "aspect_ratio_mask": mask}


def their_mask(ids: Tensor, images: list[Tiles]) -> Tensor:
    """The mask of transformers' processor."""
    from transformers.models.mllama import processing_mllama as processing

    places = processing.get_cross_attention_token_mask(ids[0].tolist(), MLLAMA_IMAGE)
    tiles = [len(image.pixels_NCHW) for image in images]
    dense = processing.convert_sparse_cross_attention_mask_to_dense(
        [places], [tiles], 4, ids.shape[1]
    )
    return torch.from_numpy(dense)


def prompt(length: int, places: list[int], seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(MLLAMA_VOCABULARY, (1, length), generator=generator)
    ids[0, places] = MLLAMA_IMAGE
    return ids


def read(model: Decoder, ids: Tensor, images: list[Tiles], piece: int = 2048) -> Tensor:
    """Logits of all positions, read in one piece or several."""
    cache = model.new_cache(ids.shape[1], images=images)
    if piece >= ids.shape[1]:
        return model.prefill(ids, cache, images=images, logits_to_keep=ids.shape[1])
    parts = []
    for first in range(0, ids.shape[1], piece):
        part = ids[:, first : first + piece]
        here = int((ids[:, :first] == MLLAMA_IMAGE).sum())
        new = images[here : here + int((part == MLLAMA_IMAGE).sum())]
        parts.append(model.prefill(part, cache, images=new, logits_to_keep=part.shape[1]))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")
def test_tower_and_projector(grid: tuple[int, int]) -> None:
    theirs, ours = MODELS
    image = random_tiles(grid, SIDE)
    with torch.no_grad():
        features = theirs.model.vision_model(**their_inputs([image])).last_hidden_state
        projected = theirs.model.multi_modal_projector(features)
    count = grid[0] * grid[1]
    found = ours.vision_model(image)
    assert found.shape == (count * 5, 128)
    assert (found - features[0, 0, :count].flatten(0, 1)).abs().max() <= TOLERANCE
    assert (ours.features(image) - projected[0, 0, :count].flatten(0, 1)).abs().max() <= TOLERANCE


def test_intermediate_features_are_the_inputs_of_the_layers() -> None:
    """As in Meta's code; transformers, left as it is, gives others."""
    _, ours = MODELS
    theirs, _ = build_mllama(lowered=False)
    image = random_tiles((2, 2), SIDE)
    with torch.no_grad():
        features = theirs.model.vision_model(**their_inputs([image])).last_hidden_state
    wrong = features[0, 0].flatten(0, 1)
    found = ours.vision_model(image)
    width = ours.config.vision.hidden_size
    assert (found[:, :width] - wrong[:, :width]).abs().max() <= TOLERANCE
    assert (found[:, width:] - wrong[:, width:]).abs().max() > 100 * TOLERANCE
    kept = []
    hooks = [
        ours.vision_model.transformer.layers[index].register_forward_pre_hook(
            lambda _, inputs: kept.append(inputs[0])
        )
        for index in ours.config.vision.intermediate_layers_indices
    ]
    ours.vision_model(image)
    for hook in hooks:
        hook.remove()
    inputs = torch.stack(kept, dim=-1).flatten(2).view(4, 8, -1)[:, :5].flatten(0, 1)
    assert torch.equal(found[:, width:], inputs)


PROMPTS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "one": ([0], [(2, 2)]),
    "one-tile": ([0], [(1, 1)]),
    "two": ([0, 9], [(1, 3), (2, 1)]),
    "two-beside-each-other": ([0, 1], [(1, 2), (1, 1)]),
    "three": ([0, 6, 7], [(1, 1), (2, 2), (4, 1)]),
    "last": ([0, 19], [(1, 2), (1, 2)]),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_logits(name: str) -> None:
    places, grids = PROMPTS[name]
    theirs, ours = MODELS
    images = [random_tiles(grid, SIDE, seed) for seed, grid in enumerate(grids)]
    ids = prompt(20, places)
    with torch.no_grad():
        expected = theirs(
            ids, cross_attention_mask=their_mask(ids, images), **their_inputs(images)
        ).logits
    found = read(ours, ids, images)
    assert found.shape == expected.shape == (1, 20, MLLAMA_VOCABULARY)
    assert 0.5 < expected.abs().max() < 50
    assert (found - expected).abs().max() <= TOLERANCE


def test_logits_with_a_mask_of_ones() -> None:
    theirs, ours = MODELS
    image = random_tiles((2, 2), SIDE)
    ids = prompt(20, [0])
    with torch.no_grad():
        ones = torch.ones(1, 20, 1, 4, dtype=torch.long)
        expected = theirs(ids, cross_attention_mask=ones, **their_inputs([image])).logits
    assert (read(ours, ids, [image]) - expected).abs().max() <= TOLERANCE


def test_logits_in_bf16_err_no_more_than_theirs() -> None:
    """Each against its own fp32 run, of the same rounded weights."""
    (theirs, _), image, ids = build_mllama(), random_tiles((1, 2), SIDE), prompt(20, [0])
    inputs = {"cross_attention_mask": their_mask(ids, [image]), **their_inputs([image])}
    for parameter in theirs.parameters():
        parameter.data = parameter.data.bfloat16().float()
    exact = read(same_weights(theirs), ids, [image])
    for parameter in theirs.parameters():
        parameter.data = parameter.data.bfloat16()
    ours = same_weights(theirs)
    with torch.no_grad():
        their_error = (theirs(ids, **inputs).logits.float() - exact).abs().median()
    assert 0 < (read(ours, ids, [image]) - exact).abs().median() <= 1.2 * their_error


def plain_logits(theirs: Any, ids: Tensor, features: Tensor, mask: Tensor) -> Tensor:
    """The formula: cross layers by matrices and a mask of 0 and 1, [T, S]; others by their code.

    row_mask is 0 for a token that sees nothing, and makes both branches of the layer nothing.
    """
    text = theirs.model.language_model
    heads, kv_heads = text.config.num_attention_heads, text.config.num_key_value_heads
    length, num_keys = mask.shape
    x = text.embed_tokens(ids)[0]
    positions = torch.arange(length)[None]
    rotation = text.rotary_emb(x[None], position_ids=positions)
    causal = torch.full((length, length), -torch.inf).triu(1)[None, None]
    row_mask = mask.any(-1, keepdim=True).float()
    bias = torch.where(mask.bool() | (row_mask == 0), 0.0, -torch.inf)

    def rms(v: Tensor, weight: Tensor) -> Tensor:
        return v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    for index, layer in enumerate(text.layers):
        if index not in text.cross_attention_layers:
            x = layer(x[None], attention_mask=causal, position_embeddings=rotation)[0]
            continue
        cross, normed = layer.cross_attn, rms(x, layer.input_layernorm.weight)
        q = rms((normed @ cross.q_proj.weight.T).view(length, heads, 8), cross.q_norm.weight)
        k = rms((features @ cross.k_proj.weight.T).view(num_keys, kv_heads, 8), cross.k_norm.weight)
        v = (features @ cross.v_proj.weight.T).view(num_keys, kv_heads, 8)
        read = torch.zeros(length, heads, 8)
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, group].T / 8**0.5 + bias
            read[:, head] = scores.softmax(-1) @ v[:, group]
        read = row_mask * read.view(length, heads * 8)
        x = x + layer.cross_attn_attn_gate.tanh() * (read @ cross.o_proj.weight.T)
        normed = rms(x, layer.post_attention_layernorm.weight)
        gate, up = normed @ layer.mlp.gate_proj.weight.T, normed @ layer.mlp.up_proj.weight.T
        fed = (gate * gate.sigmoid() * up) @ layer.mlp.down_proj.weight.T
        x = x + layer.cross_attn_mlp_gate.tanh() * row_mask * fed
    return rms(x, text.norm.weight) @ theirs.lm_head.weight.T


@pytest.mark.parametrize("places", [[5], [4, 11], [3, 4, 15], [19]], ids=str)
def test_masked_rows_against_the_formula(places: list[int]) -> None:
    """Text, then images: transformers would let the text before see them."""
    theirs, ours = MODELS
    grids = [(2, 2), (1, 2), (3, 1)][: len(places)]
    images = [random_tiles(grid, SIDE, seed) for seed, grid in enumerate(grids)]
    ids = prompt(20, places)
    features = torch.cat([ours.features(image) for image in images])
    counts = [5 * len(image.pixels_NCHW) for image in images]
    mask = torch.zeros(20, sum(counts))
    dense = their_mask(ids, images)[0]  # [T, images, tiles]
    for number, (start, stop) in enumerate(pairwise([0, *torch.tensor(counts).cumsum(0).tolist()])):
        mask[:, start:stop] = dense[:, number, :1]
    with torch.no_grad():
        expected = plain_logits(theirs, ids, features, mask)
    found = read(ours, ids, images)[0]
    assert (found - expected).abs().max() <= 1e-5
    with torch.no_grad():
        leaky = theirs(
            ids, cross_attention_mask=their_mask(ids, images), **their_inputs(images)
        ).logits[0]
    assert (found[0] - leaky[0]).abs().max() > 100 * TOLERANCE  # the reason for this test
    text_only = ours(ids[:, : places[0]], logits_to_keep=None)[0]
    assert (found[: places[0]] - text_only).abs().max() <= 1e-5


def test_stretches_are_the_masks_of_the_processor() -> None:
    """Which images a token sees, for every way to place images among nine tokens."""
    from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

    for pattern in range(1, 2**9):
        tokens = [(pattern >> i) & 1 for i in range(9)]
        places = [i for i, token in enumerate(tokens) if token]
        spans = get_cross_attention_token_mask(tokens, 1)
        images = [SeenImage(place, 10 * n, 10 * n + 10) for n, place in enumerate(places)]
        for first, stop in ((0, 9), (4, 9), (3, 4)):
            seen = {}
            for begin, end, keys in stretches(images, first, stop):
                for position in range(begin, end):
                    seen[position] = (
                        set(range(keys.start // 10, keys.stop // 10)) if keys else set()
                    )
            assert seen == {
                position: {
                    number
                    for number, (start, end) in enumerate(spans)
                    if start <= position < (9 if end == -1 else end)
                }
                for position in range(first, stop)
            }


@pytest.mark.parametrize("piece", [1, 3, 7, 8])
@pytest.mark.parametrize("places", [[0], [3, 4, 15]], ids=str)
def test_cached_is_uncached(places: list[int], piece: int) -> None:
    """Whatever the pieces, the last of which decode one token at a time."""
    _, ours = MODELS
    images = [random_tiles(grid, SIDE, n) for n, grid in enumerate([(2, 2), (1, 1), (1, 3)])]
    images = images[: len(places)]
    ids = prompt(30, places)
    whole = read(ours, ids, images)
    assert (read(ours, ids, images, piece) - whole).abs().max() <= 1e-5
    cache = ours.new_cache(30, images=images)
    found = ours.prefill(ids[:, :22], cache, piece=piece, images=images, logits_to_keep=1)
    assert (found[:, 0] - whole[:, 21]).abs().max() <= 1e-5
    for position in range(22, 30):
        found = ours(ids[:, position : position + 1], cache=cache)
        assert (found[:, 0] - whole[:, position]).abs().max() <= 1e-5


def test_cross_layers_at_both_ends() -> None:
    """First and last layer; in all pieces but the last nobody asks the last layer anything."""
    theirs, ours = build_mllama(cross_attention_layers=[0, 5])
    image = random_tiles((1, 2), SIDE)
    ids = prompt(20, [0])
    mask = their_mask(ids, [image])
    with torch.no_grad():
        expected = theirs(ids, cross_attention_mask=mask, **their_inputs([image])).logits
    assert (read(ours, ids, [image]) - expected).abs().max() <= TOLERANCE
    cache = ours.new_cache(20, images=[image])
    found = ours.prefill(ids, cache, piece=3, images=[image], logits_to_keep=2)
    assert (found - expected[:, -2:]).abs().max() <= TOLERANCE


def test_decoding_as_theirs() -> None:
    """After an image, a step carries no image: keys and values come from the cache."""
    theirs, ours = MODELS
    image = random_tiles((1, 2), SIDE)
    ids = prompt(12, [0])
    mask = their_mask(ids, [image])
    cache = ours.new_cache(20, images=[image])
    found = ours.prefill(ids, cache, images=[image])
    with torch.no_grad():
        output = theirs(ids, cross_attention_mask=mask, use_cache=True, **their_inputs([image]))
        for _ in range(8):
            assert (found[:, -1] - output.logits[:, -1]).abs().max() <= TOLERANCE
            token = output.logits[:, -1:].argmax(-1)
            found = ours(token, cache=cache)
            output = theirs(token, cross_attention_mask=mask[:, -1:], cache=output.cache)


def test_the_fast_layers_are_the_plain_ones() -> None:
    """`speed_up` rearranges the text layers and leaves the others as they are."""
    from llamatool.model.fast import DecodeStep, speed_up
    from llamatool.model.static import StaticStep

    _, ours = build_mllama()
    image = random_tiles((1, 2), SIDE)
    ids = prompt(20, [2])
    whole = read(ours, ids, [image])
    speed_up(ours)
    assert (read(ours, ids, [image]) - whole).abs().max() <= 1e-5
    with pytest.raises(UnsupportedError, match="through the decoder itself"):
        DecodeStep(ours)
    with pytest.raises(UnsupportedError, match="is not compiled"):
        StaticStep(ours, ours.new_cache(20, images=[image]))


def test_keys_and_values_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = MODELS
    calls = []
    for block in (ours.layers["1"], ours.layers["4"]):
        made = block.cross_attn.keys_and_values

        def counted(features: Tensor, made: Any = made) -> tuple[Tensor, Tensor]:
            calls.append(features.shape)
            return made(features)

        monkeypatch.setattr(block.cross_attn, "keys_and_values", counted)
    image = random_tiles((2, 1), SIDE)
    cache = ours.new_cache(20, images=[image])
    ours.prefill(prompt(10, [2]), cache, piece=4, images=[image])
    for _ in range(5):
        ours(torch.tensor([[7]]), cache=cache)
    assert calls == [(1, 10, 64)] * 2


def test_text_alone_is_the_text_model() -> None:
    """With tower and cross layers in memory or without, and as transformers' text model."""
    theirs, ours = MODELS
    with torch.device("meta"):
        text = Decoder(ours.config)
    state = ours.state_dict()
    text.load_state_dict({name: state[name] for name in text.state_dict()}, assign=True)
    assert not any("cross_attn" in name or "vision" in name for name in text.state_dict())
    ids = prompt(20, [])
    with torch.no_grad():
        expected = theirs(ids).logits
    found = ours(ids, logits_to_keep=None)
    assert torch.equal(found, text(ids, logits_to_keep=None))
    assert (found - expected).abs().max() <= TOLERANCE


def test_cache_of_images_is_what_kv_budget_says() -> None:
    _, ours = MODELS
    images = [random_tiles((2, 2), SIDE), random_tiles((1, 4), SIDE)]
    cache = ours.new_cache(50, images=images)
    expected = kv_cache(plan_layers(ours.config), dtype="float32", vision=ours.config.vision)
    assert cache.num_bytes == expected.num_bytes(50, num_images=2)
    assert expected.bytes_per_image == 2 * (2 * 4 * 8 * 4) * 4 * 5  # layers, K and V, tiles
    small = ours.new_cache(50, images=[random_tiles((1, 1), SIDE)])
    assert small.num_bytes == expected.num_bytes(50) + expected.bytes_per_image // 4


def test_cache_forks_and_goes_back_with_images() -> None:
    _, ours = MODELS
    images = [random_tiles((1, 2), SIDE, seed) for seed in range(2)]
    ids = prompt(20, [2, 12])
    whole = read(ours, ids, images)
    cache = ours.new_cache(20, images=images)
    ours.prefill(ids[:, :10], cache, images=images[:1])
    mark, fork = cache.mark(), cache.fork()
    for copy in (cache, fork):
        found = ours.prefill(ids[:, 10:], copy, images=images[1:], logits_to_keep=10)
        assert (found - whole[:, 10:]).abs().max() <= 1e-5
    cache.rewind(mark)
    assert len(cache.images) == 1
    found = ours.prefill(ids[:, 10:], cache, images=images[1:], logits_to_keep=10)
    assert (found - whole[:, 10:]).abs().max() <= 1e-5
    fork.truncate(12)  # the second image stands at 12
    assert len(fork.images) == 1
    fork.truncate(0)
    assert not fork.images
    found = ours.prefill(ids, fork, images=images, logits_to_keep=20)
    assert (found - whole).abs().max() <= 1e-5


def test_what_cannot_be_read_is_said() -> None:
    _, ours = MODELS
    image = random_tiles((1, 1), SIDE)
    for ids, images in ((prompt(9, []), [image]), (prompt(9, [1]), [image, image])):
        with pytest.raises(InputError, match=r"images need \d image tokens, and the prompt has"):
            ours.prefill(ids, ours.new_cache(9, images=images), images=images)
    odd = Tiles(torch.zeros(6, 3, SIDE, SIDE), (2, 3))
    with pytest.raises(InputError, match="no image of 2 x 3 tiles"):
        ours.features(odd)
    with torch.device("meta"):
        text = Decoder(ours.config)
    with pytest.raises(UnsupportedError, match="without its image tower"):
        text.features(image)
    with pytest.raises(ValueError, match="image tokens after"):
        ours.prefill(prompt(9, [1]), ours.new_cache(9), images=[image])


def test_the_image_token_is_an_input_but_no_logit() -> None:
    """A row of the input table beyond the vocabulary, for which no logit exists."""
    _, ours = MODELS
    assert ours.embed_tokens.weight.shape[0] == MLLAMA_VOCABULARY + 8
    assert ours(torch.tensor([[MLLAMA_IMAGE]])).shape[-1] == MLLAMA_VOCABULARY
    assert ours.config.vision.image_token_id == MLLAMA_IMAGE


def test_weights_are_shared_with_a_model_of_other_names() -> None:
    """The tests' own helper: the decoder holds transformers' tensors, all of them."""
    theirs, _ = MODELS
    names = set(same_weights(theirs).state_dict())
    assert len(names) == len(theirs.state_dict())
