"""The image tower of Llama 4: each tile on its own, rotations in two dimensions, a pixel shuffle.

A tile of 24 x 24 patches and a class token goes through 34 blocks; then the class token is
dropped, each square of 2 x 2 patches becomes one position of four times the width, and two layers
bring that to the width that the projector reads: 144 positions of a tile.

Letters: N tiles of the image with the global one, C channels, P patches of a tile with its class
token, G patches along a side, W hidden_size of the tower, H heads, E = W / H, O output width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamatool.config.model import VisionConfig
from llamatool.model.images import Tiles
from llamatool.model.linear import Linear
from llamatool.model.rope import Rotation, rotate
from llamatool.model.tower import EDGE_EPS, TowerBlock


class Llama4Tower(nn.Module):
    """Tiles to features."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.vision = vision
        width = vision.hidden_size
        self.patch_embedding = _PatchEmbedding(vision)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding_vlm = nn.Parameter(torch.empty(vision.num_patches, width))
        self.layernorm_pre = nn.LayerNorm(width, EDGE_EPS)
        self.model = _Blocks(vision)
        self.layernorm_post = nn.LayerNorm(width, EDGE_EPS)
        self.vision_adapter = _Adapter(vision)

    def forward(self, image: Tiles) -> Tensor:
        """The features of the tiles in their order, the global one last: [N x G^2 / 4, O].

        Example: two tiles of 336 px and the global one -> [432, 4096].
        """
        pixels_NCHW = image.pixels_NCHW
        x_NPW = self.patch_embedding(pixels_NCHW)
        class_N1W = self.class_embedding.expand(len(x_NPW), 1, -1)
        # The class token comes last here; in Llama 3.2 Vision it comes first.
        x_NPW = torch.cat((x_NPW, class_N1W), dim=1) + self.positional_embedding_vlm
        rotation = patch_rotation(self.vision, x_NPW.device)
        x_NPW = self.layernorm_pre(x_NPW)
        for block in self.model.layers:
            x_NPW = block(x_NPW, turn=lambda x_NHPE: rotate(x_NHPE, rotation))
        x_NPW = self.layernorm_post(x_NPW)[:, :-1]
        out_NQO: Tensor = self.vision_adapter(x_NPW)
        return out_NQO.flatten(0, 1)

    def num_tokens(self, image: Tiles) -> int:
        """Tokens that the image takes in the text: N x 144 at 336 px."""
        return len(image.pixels_NCHW) * self.vision.tokens_per_tile


class Llama4Projector(nn.Module):
    """Features to vectors of the decoder's width."""

    def __init__(self, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        self.linear_1 = Linear(vision.output_size, hidden_size, bias=False)

    def forward(self, features_SO: Tensor) -> Tensor:
        """The vectors, [S, D]."""
        out_SD: Tensor = self.linear_1(features_SO)
        return out_SD


def patch_rotation(vision: VisionConfig, device: torch.device) -> Rotation:
    """The turns of a tile's patches: a quarter of E by the column, a quarter by the row.

    Pair j of the first half turns by (column + 1) theta^(-2j / (E/2)), pair j of the second by
    the same of the row; the class token, which is last, does not turn.

    Example: E 88 -> 22 frequencies, used twice; patch 25 of 24 x 24 is at column 1, row 1.
    Source: Llama4VisionRotaryEmbedding in transformers.
    """
    side = vision.image_size // vision.patch_size
    half = vision.hidden_size // vision.num_attention_heads // 2
    exponents_F = torch.arange(0, half, 2, device=device).float()[: half // 2] / half
    frequencies_F = 1.0 / vision.rope_theta**exponents_F
    patch_P = torch.arange(side * side, device=device)
    x_PF = (patch_P % side + 1)[:, None] * frequencies_F
    y_PF = (patch_P // side + 1)[:, None] * frequencies_F
    angles_PF = F.pad(torch.cat((x_PF, y_PF), dim=-1), (0, 0, 0, 1))
    return Rotation(angles_PF.cos(), angles_PF.sin(), interleaved=True)


def pixel_shuffle(x_NPW: Tensor, ratio: float) -> Tensor:
    """Squares of 1/ratio x 1/ratio patches as one position each: [N, P ratio^2, W / ratio^2].

    Within a position the patches of a row come first, then the next row.
    Example: ratio 1/2, [N, 576, 1408] -> [N, 144, 5632].
    Source: pixel_shuffle in transformers modeling_llama4.py.
    """
    N, P, W = x_NPW.shape
    side, step = round(P**0.5), round(1 / ratio)
    squares = x_NPW.view(N, side // step, step, side // step, step, W)
    return squares.transpose(2, 3).reshape(N, -1, W * step * step)


class _PatchEmbedding(nn.Module):
    """Patches as rows of pixels, times a matrix."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.patch_size = vision.patch_size
        pixels = vision.num_channels * vision.patch_size**2
        self.linear = Linear(pixels, vision.hidden_size, bias=False)

    def forward(self, pixels_NCHW: Tensor) -> Tensor:
        """One vector for each patch, [N, G^2, W]."""
        rows_NXP = F.unfold(pixels_NCHW, self.patch_size, stride=self.patch_size)
        out_NPW: Tensor = self.linear(rows_NXP.transpose(1, 2))
        return out_NPW


class _Blocks(nn.Module):
    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            TowerBlock(vision, eps=EDGE_EPS, bias=True, gated=False)
            for _ in range(vision.num_hidden_layers)
        )


class _Adapter(nn.Module):
    """The two layers after the pixel shuffle."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.ratio = vision.pixel_shuffle_ratio
        self.mlp = AdapterMLP(vision)

    def forward(self, x_NPW: Tensor) -> Tensor:
        """The features, [N, P / 4, O]."""
        out_NQO: Tensor = self.mlp(pixel_shuffle(x_NPW, self.ratio))
        return out_NQO


class AdapterMLP(nn.Module):
    """gelu(fc2(gelu(fc1(x))))."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        width = int(vision.hidden_size / vision.pixel_shuffle_ratio**2)
        inner = vision.projector_input_size
        self.fc1 = Linear(width, inner, bias=False)
        self.fc2 = Linear(inner, vision.projector_output_size, bias=False)

    def forward(self, x_NQW: Tensor) -> Tensor:
        """Both layers, each followed by GELU."""
        return F.gelu(self.fc2(F.gelu(self.fc1(x_NQW))))
