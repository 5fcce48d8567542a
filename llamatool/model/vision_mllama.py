"""The image tower of Llama 3.2 Vision: up to four tiles, two stages, and a look back.

All tiles of an image go through together, padded to `max_num_tiles` tiles and each tile to a
multiple of eight positions: 32 plain blocks, then 8 gated ones. The result of a position is the
last output beside the inputs of five of the plain blocks, so 6 x 1280 numbers of it.

The inputs, not the outputs: so it is in Meta's code and in transformers up to 4.53; from 4.54
on, transformers takes the outputs of the same layers.

Letters: N tiles of the image, C channels, M = max_num_tiles, P positions of a tile with its class
token, S = M x (P rounded up to a multiple of 8), W hidden_size of the tower, O output_size,
D hidden_size of the decoder.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamatool.config.model import VisionConfig
from llamatool.errors import InputError
from llamatool.model.images import Tiles
from llamatool.model.linear import Embedding
from llamatool.model.tower import EDGE_EPS, TowerBlock

POSITIONS_MULTIPLE = 8


class MllamaTower(nn.Module):
    """Tiles to features."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.vision = vision
        width, tiles = vision.hidden_size, vision.max_num_tiles
        num_ids = len(vision.supported_aspect_ratios) + 1
        patch = (vision.num_channels, vision.patch_size, vision.patch_size)
        self.patch_embedding = _Weight(width, *patch)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.pre_tile_positional_embedding = _GatedTable(num_ids, tiles, 1, width)
        self.gated_positional_embedding = _GatedPositions(num_ids, tiles, vision.num_patches, width)
        self.layernorm_pre = nn.LayerNorm(width, EDGE_EPS)
        self.transformer = _Blocks(vision, vision.num_hidden_layers, gated=False)
        self.layernorm_post = nn.LayerNorm(width, EDGE_EPS)
        self.post_tile_positional_embedding = _GatedTable(num_ids, tiles, 1, width)
        self.global_transformer = _Blocks(vision, vision.num_global_layers, gated=True)

    def forward(self, image: Tiles) -> Tensor:
        """The features of the image's own tiles, one after the other: [N x P, O].

        Example: two tiles of 560 px -> [3202, 7680].
        Raises: InputError if the tiles are laid out in a way that the model has no id for.
        """
        ratio = self._aspect_ratio_id(image)
        width, tiles = self.vision.hidden_size, self.vision.max_num_tiles
        num_tiles = len(image.pixels_NCHW)
        weight = self.patch_embedding.weight
        pixels_MCHW = weight.new_zeros(tiles, *image.pixels_NCHW.shape[1:])
        pixels_MCHW[:num_tiles] = image.pixels_NCHW
        patches_MWhw = F.conv2d(pixels_MCHW, weight, stride=self.vision.patch_size)
        x_MPW = patches_MWhw.flatten(2).transpose(1, 2)
        x_MPW = x_MPW + self.pre_tile_positional_embedding(ratio)
        x_MPW = torch.cat((self.class_embedding.expand(tiles, 1, width), x_MPW), dim=1)
        x_MPW = self.layernorm_pre(x_MPW + self.gated_positional_embedding(ratio))
        x_1SW, padding_S = _padded(x_MPW, num_tiles)
        inner = self.vision.intermediate_layers_indices
        x_1SW, seen_1SWL = self.transformer(x_1SW, padding_S, keep_inputs_of=inner)
        x_1SW = self.layernorm_post(x_1SW)
        x_MQW = x_1SW.view(tiles, -1, width) + self.post_tile_positional_embedding(ratio)
        x_1SW, _ = self.global_transformer(x_MQW.view(1, -1, width), padding_S)
        # The kept inputs lie element by element beside each other, not one after the other.
        out_1SO = torch.cat((x_1SW, seen_1SWL.flatten(2)), dim=-1)
        out_MQO = out_1SO.view(tiles, -1, out_1SO.shape[-1])
        return out_MQO[:num_tiles, : self.vision.num_patches].flatten(0, 1)

    def num_tokens(self, image: Tiles) -> int:
        """Positions that the decoder's cross-attention sees of the image: N x P."""
        return len(image.pixels_NCHW) * self.vision.num_patches

    def _aspect_ratio_id(self, image: Tiles) -> int:
        ratios = self.vision.supported_aspect_ratios
        if image.grid not in ratios:
            rows, columns = image.grid
            raise InputError(f"the model knows no image of {rows} x {columns} tiles")
        return ratios.index(image.grid) + 1


class MllamaProjector(nn.Linear):
    """Features to vectors of the decoder's width."""

    def __init__(self, vision: VisionConfig, hidden_size: int) -> None:
        super().__init__(vision.output_size, hidden_size)

    def reset_parameters(self) -> None:
        """Does nothing: the weights are loaded."""


class _Weight(nn.Module):
    """A parameter of this shape called `weight`: a convolution that is not filled at random."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class _GatedTable(nn.Module):
    """A vector for each tile, by the id of the aspect ratio, times tanh(gate)."""

    def __init__(self, num_ids: int, tiles: int, positions: int, width: int) -> None:
        super().__init__()
        self.shape = (tiles, positions, width)
        self.embedding = Embedding(num_ids, tiles * positions * width)
        self.gate = nn.Parameter(torch.empty(1))

    def forward(self, ratio: int) -> Tensor:
        """What to add to the patches, [M, 1, W]."""
        return self.embedding.weight[ratio].view(self.shape) * self.gate.tanh()


class _GatedPositions(nn.Module):
    """(1 - tanh(gate)) x the table of a tile + tanh(gate) x the table of all tiles."""

    def __init__(self, num_ids: int, tiles: int, positions: int, width: int) -> None:
        super().__init__()
        self.shape = (tiles, positions, width)
        self.embedding = nn.Parameter(torch.empty(positions, width))
        self.tile_embedding = Embedding(num_ids, tiles * positions * width)
        self.gate = nn.Parameter(torch.empty(1))

    def forward(self, ratio: int) -> Tensor:
        """What to add to the patches, [M, P, W]."""
        gate = self.gate.tanh()
        tile_MPW = self.tile_embedding.weight[ratio].view(self.shape)
        return (1 - gate) * self.embedding + gate * tile_MPW


class _Blocks(nn.Module):
    """A stack of blocks."""

    def __init__(self, vision: VisionConfig, num_layers: int, *, gated: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            TowerBlock(vision, eps=vision.norm_eps, bias=False, gated=gated)
            for _ in range(num_layers)
        )

    def forward(
        self, x_1SW: Tensor, padding_S: Tensor, *, keep_inputs_of: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """The last block's output and the inputs of the blocks `keep_inputs_of`, [1, S, W, L]."""
        kept = []
        for index, block in enumerate(self.layers):
            if index in keep_inputs_of:
                kept.append(x_1SW)
            x_1SW = block(x_1SW, padding_S=padding_S)
        nothing = x_1SW.new_empty(*x_1SW.shape, 0)
        return x_1SW, torch.stack(kept, dim=-1) if kept else nothing


def _padded(x_MPW: Tensor, num_tiles: int) -> tuple[Tensor, Tensor]:
    """All tiles in one row, each padded to a multiple of 8, and where the padding is."""
    positions, width = x_MPW.shape[1:]
    x_MQW = F.pad(x_MPW, (0, 0, 0, -positions % POSITIONS_MULTIPLE))
    padding_MQ = torch.zeros(x_MQW.shape[:2], dtype=torch.bool, device=x_MPW.device)
    padding_MQ[num_tiles:] = True
    padding_MQ[:, positions:] = True
    return x_MQW.reshape(1, -1, width), padding_MQ.flatten()
