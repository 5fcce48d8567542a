"""Tiny random image models of transformers, and the same weights in llamatool's decoder."""

from typing import Any

import torch

from llamatool.config.huggingface import parse_huggingface
from llamatool.model.decoder import Decoder
from llamatool.model.images import Tiles
from llamatool.model.weights import parameter_name

SIDE = 28  # pixels: 2 x 2 patches of 14 and a class token, padded from 5 to 8 positions
MLLAMA_VOCABULARY = 96
MLLAMA_IMAGE = 96  # the first row beyond the vocabulary
PATCH = 90  # Llama 4's token of a piece of an image

MLLAMA_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "cross_attention_layers": [1, 4],
    "vocab_size": MLLAMA_VOCABULARY,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "pad_token_id": 4,
    "initializer_range": 0.12,
}
MLLAMA_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "attention_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_global_layers": 2,
    "intermediate_layers_indices": [1, 2, 3],
    "image_size": SIDE,
    "patch_size": 14,
    "vision_output_dim": 128,
    "initializer_range": 0.12,
}
LLAMA4_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 5,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 1,
    "vocab_size": 97,
    "attention_chunk_size": 16,  # an image of several tiles crosses a chunk border
    "floor_scale": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "initializer_range": 0.12,
}
LLAMA4_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,  # head_dim 16: 4 frequencies for columns and 4 for rows
    "num_hidden_layers": 3,
    "image_size": 56,  # 4 x 4 patches, 4 tokens of a tile
    "patch_size": 14,
    "vision_output_dim": 48,
    "projector_input_dim": 48,
    "projector_output_dim": 48,
    "pixel_shuffle_ratio": 0.5,
    "initializer_range": 0.12,
}


def build_mllama(seed: int = 0, *, lowered: bool = True, **text: Any) -> tuple[Any, Decoder]:
    """Both models. `lowered`: their indices less one, so that they too take inputs of layers."""
    import transformers

    vision = dict(MLLAMA_VISION)
    config = transformers.MllamaConfig(
        text_config=MLLAMA_TEXT | text,
        vision_config=vision,
        image_token_index=MLLAMA_IMAGE,
    )
    torch.manual_seed(seed)
    theirs = transformers.MllamaForConditionalGeneration(config).eval()
    _scatter(theirs)
    ours = same_weights(theirs)
    if lowered:
        theirs.model.vision_model.intermediate_layers_indices = [
            index - 1 for index in vision["intermediate_layers_indices"]
        ]
    return theirs, ours


def build_llama4(seed: int = 0, **text: Any) -> tuple[Any, Decoder]:
    import transformers

    config = transformers.Llama4Config(
        text_config=LLAMA4_TEXT | text, vision_config=LLAMA4_VISION, image_token_index=PATCH
    )
    torch.manual_seed(seed)
    theirs = transformers.Llama4ForConditionalGeneration(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.12)  # some are created without values
    _scatter(theirs)
    return theirs, same_weights(theirs)


def same_weights(theirs: Any, **changes: Any) -> Decoder:
    """Llamatool's decoder with its tower for a model of transformers, sharing its tensors."""
    config = parse_huggingface({**theirs.config.to_dict(), **changes}, where="a test")
    with torch.device("meta"):
        ours = Decoder(config, images=True)
    state = {our_name(name): tensor for name, tensor in theirs.state_dict().items()}
    ours.load_state_dict(state, assign=True)
    return ours.requires_grad_(False).eval()


def our_name(name: str) -> str:
    """From the names of transformers' modules, by way of those of the hub's files."""
    for old, new in (
        ("model.language_model.", "language_model.model."),
        ("model.vision_model.", "vision_model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ):
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return parameter_name(name)


def random_tiles(grid: tuple[int, int], side: int, seed: int = 0, extra: int = 0) -> Tiles:
    """Noise in the layout of an image, with `extra` global tiles."""
    rows, columns = grid
    generator = torch.Generator().manual_seed(seed + 100 * rows + columns)
    shape = (rows * columns + extra, 3, side, side)
    return Tiles(torch.randn(shape, generator=generator), grid)


def _scatter(theirs: Any) -> None:
    """Norms of one, gates of zero and biases of zero would hide where they are applied."""
    for name, parameter in theirs.named_parameters():
        if "norm" in name and name.endswith("weight"):
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        elif "gate" in name.rpartition(".")[2]:
            torch.nn.init.normal_(parameter, 0.6, 0.3)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.2)
        elif "embedding" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
