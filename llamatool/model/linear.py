"""Matrices that come from a checkpoint, and so are not filled at random when they are built.

Filling them costs time even on the meta device, where it loads half of torch for nothing
(0.7 s at the first model); a parameter that a loader forgot is no better for being random.
"""

from torch import nn


class Linear(nn.Linear):
    """x W^T + b."""

    def reset_parameters(self) -> None:
        """Does nothing: the weights are loaded."""


class Embedding(nn.Embedding):
    """A vector for each id."""

    def reset_parameters(self) -> None:
        """Does nothing: the table is loaded."""
