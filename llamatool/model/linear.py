"""Matrices that come from a checkpoint, and so are not filled at random when they are built.

Filling them costs time even on the meta device, where it loads half of torch for nothing
(0.7 s at the first model); a parameter that a loader forgot is no better for being random.

Any of them may hold a part of its matrix only, because other ranks hold the rest: `cuts` says
which part of a parameter is here, `ranks` that what comes out must be summed over all of them.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from llamatool.model.ranks import Cut, Ranks

WHOLE: Mapping[str, Cut] = {}


class Linear(nn.Linear):
    """x W^T + b."""

    cuts: Mapping[str, Cut] = WHOLE
    ranks: Ranks | None = None  # set where each rank has some columns of W

    def reset_parameters(self) -> None:
        """Does nothing: the weights are loaded."""

    def forward(self, x_ND: Tensor) -> Tensor:
        """The product with the whole matrix, or with the rows of it that this rank has."""
        if self.ranks is None:
            return F.linear(x_ND, self.weight, self.bias)
        return summed(F.linear(x_ND, self.weight), self.bias, self.ranks)


def summed(out_NF: Tensor, bias_F: Tensor | None, ranks: Ranks) -> Tensor:
    """The sum of every rank's product, and the bias, which counts once."""
    out_NF = ranks.sum(out_NF)
    return out_NF if bias_F is None else out_NF + bias_F


class Embedding(nn.Embedding):
    """A vector for each id."""

    cuts: Mapping[str, Cut] = WHOLE
    ranks: Ranks | None = None  # set where each rank has some rows, from `first_row` on
    first_row = 0

    def reset_parameters(self) -> None:
        """Does nothing: the table is loaded."""

    def forward(self, ids_N: Tensor) -> Tensor:
        """The vectors of `ids_N`: of each, one rank knows it and the others add zero."""
        if self.ranks is None:
            return F.embedding(ids_N, self.weight)
        if not len(self.weight):  # more ranks than rows
            return self.ranks.sum(self.weight.new_zeros(*ids_N.shape, self.embedding_dim))
        rows_N = ids_N - self.first_row
        is_here_N = (rows_N >= 0) & (rows_N < len(self.weight))
        vectors_ND = F.embedding(rows_N.clamp(0, len(self.weight) - 1), self.weight)
        return self.ranks.sum(vectors_ND * is_here_N[..., None])
