"""What a rank holds, against published files, Meta's table of tensors, and sums by hand.

tests/parallel/test_memory.py compares the same figures with what real ranks allocate.
"""

import math

import pytest

from llamatool.checkpoint.names import expected_meta_tensors
from llamatool.config.catalog import entries
from llamatool.config.huggingface import parse_huggingface
from llamatool.config.layers import plan_layers, possible_splits
from llamatool.errors import UsageError
from llamatool.sizing.parameters import (
    count_parameters,
    projector_parameters,
    vision_tower_parameters,
)
from llamatool.sizing.ranks import rank_memory, rank_parameters
from tests.config.helpers import GOLDEN, llama

CATALOG = {entry.id: entry.config for entry in entries()}


def test_70b_on_two_ranks() -> None:
    found = rank_memory(CATALOG["llama-3.1-70b"], 2, num_tokens=100_000)
    assert (found.num_ranks, found.num_tokens) == (2, 100_000)
    assert found.num_parameters == 35_277_512_704
    assert found.weight_bytes == 70_555_025_408
    assert found.kv_bytes == 16_384_000_000
    assert found.total_bytes == 86_939_025_408
    # 80 layers of q, o (64 heads of 128), k, v (8 heads), gate, up, down; two tables; norms.
    by_hand = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 2 * 128256 * 8192
    assert found.num_parameters == by_hand // 2 + 161 * 8192


def test_405b_on_as_many_ranks_as_meta_published_files() -> None:
    published = GOLDEN["llama3.1_405b_pth_sizes"]
    model = CATALOG["llama-3.1-405b"]
    eight, sixteen = (rank_memory(model, ranks, num_tokens=8192) for ranks in (8, 16))
    assert eight.weight_bytes == published["mp8_predicted_tensor_bytes_per_file"]
    assert sixteen.weight_bytes == published["mp16_predicted"]
    # 8 KV heads: 16 ranks hold one each, as 8 do.
    assert sixteen.kv_bytes == eight.kv_bytes == 8192 * 516_096 // 8


@pytest.mark.parametrize("model", sorted(CATALOG))
def test_one_rank_holds_the_whole_model(model: str) -> None:
    assert rank_parameters(CATALOG[model], 1) == count_parameters(CATALOG[model]).total


# Meta's files of tied models hold a copy of the table, which no rank has.
@pytest.mark.parametrize("model", [m for m in CATALOG if not CATALOG[m].tie_word_embeddings])
def test_ranks_hold_the_tensors_of_metas_files(model: str) -> None:
    config = CATALOG[model]
    for num_ranks in possible_splits(plan_layers(config)):
        if num_ranks > 8 or config.num_key_value_heads % num_ranks:
            continue
        if config.embedding_rows % num_ranks or config.vocab_size % num_ranks:
            continue
        # Without the image tower: Meta's files keep its tile tables in another shape.
        tensors = expected_meta_tensors(config, num_ranks)
        text = sum(
            math.prod(shape)
            for name, shape in tensors.items()
            if not name.startswith(("vision_embeddings.", "vision_model.", "vision_projection."))
        )
        held = rank_parameters(config, num_ranks)
        if config.vision is not None:
            held -= vision_tower_parameters(config.vision, num_ranks)
            held -= projector_parameters(config.vision, config.hidden_size)
        assert held == text, num_ranks


def test_the_last_ranks_have_fewer_rows_of_an_odd_vocabulary() -> None:
    config = parse_huggingface(llama(vocab_size=97), where="a test")
    held = [rank_parameters(config, 4, rank=rank) for rank in range(4)]
    assert [held[0] - each for each in held] == [0, 0, 0, 2 * 3 * 64]  # rows: 25, 25, 25, 22


def test_an_image_tower_is_divided_where_its_heads_are() -> None:
    vision = CATALOG["llama-4-scout-17b-16e"].vision
    assert vision is not None
    assert vision_tower_parameters(vision, 2) == 426_447_744
    assert vision_tower_parameters(vision, 3) == vision_tower_parameters(vision) == 850_960_896


def test_without_images_there_is_no_tower_and_no_cross_attention() -> None:
    config = CATALOG["llama-3.2-11b-vision-instruct"]
    text = rank_memory(config, 1, num_tokens=8192)
    seeing = rank_memory(config, 1, num_tokens=8192, num_images=1)
    assert text.num_parameters == 9_775_192_080 - 1_744_898_064
    assert seeing.num_parameters == 10_670_220_835
    assert seeing.kv_bytes - text.kv_bytes == 209_846_272


def test_90b_vision_on_four_ranks() -> None:
    config = CATALOG["llama-3.2-90b-vision"]
    held = [rank_memory(config, 4, num_tokens=8192, num_images=images) for images in (0, 1)]
    assert [each.weight_bytes for each in held] == [35_278_864_384, 44_508_935_286]


def test_a_split_that_cannot_be_names_those_that_can() -> None:
    with pytest.raises(UsageError, match="40 attention heads are not divisible by 16") as caught:
        rank_memory(CATALOG["llama-4-maverick-17b-128e"], 16, num_tokens=8192)
    assert "1, 2, 4 or 8" in str(caught.value.hint)
    with pytest.raises(UsageError, match="`bits` is no element type of weights"):
        rank_memory(CATALOG["llama-3.1-8b"], 2, dtype="bits", num_tokens=8192)
