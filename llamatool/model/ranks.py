"""The processes that share one model: tensor parallelism seen from one of them, its rank.

Every rank runs the same code on the same tokens and holds a part of each large matrix. Two kinds
of products follow: where a rank holds some of the outputs, nothing is exchanged; where it holds
some of the inputs, the products of all ranks are summed. Between two sums the ranks are on their
own. See model/parallel.py for which matrix is which.
"""

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llamatool.config.layers import share
from llamatool.errors import LostRankError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Cut(NamedTuple):
    """The part of a stored tensor that this rank holds: these ranges of one axis, in order."""

    axis: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Elements along the axis."""
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process and the others that share a model with it."""

    rank: int  # of this process, from 0
    size: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, mesh: "DeviceMesh") -> "Ranks":
        """The ranks of a device mesh of one dimension."""
        return cls(mesh.get_local_rank(), mesh.size(), mesh.get_group())

    def share(self, total: int) -> tuple[int, int]:
        """First of `total` things that this rank holds, and the one after its last.

        Where they do not divide, the last ranks hold fewer.
        Example: 10 rows over 4 ranks -> 0:3, 3:6, 6:9, 9:10.
        """
        return share(total, self.rank, self.size)

    def count_on_host(self) -> int:
        """How many of the ranks, this one included, run on this machine. All ranks must ask.

        Raises: LostRankError if another rank has ended.
        """
        names: list[str | None] = [None] * self.size
        try:
            dist.all_gather_object(names, platform.node(), group=self.group)
        except RuntimeError as error:
            raise _lost(error) from None
        return names.count(platform.node())

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, with the same bits on every rank.

        In the memory of `x`, unless its elements lie apart.

        Raises: LostRankError if another rank has ended.
        """
        x = x.contiguous()  # of a slice, gloo would sum other elements; NCCL refuses it
        try:
            dist.all_reduce(x, group=self.group)
        except RuntimeError as error:
            raise _lost(error) from None
        return x

    def join(self, x: Tensor, total: int) -> Tensor:
        """Every rank's `x` side by side along the last axis, which `share(total)` divided.

        Example: logits of 3, 3, 3 and 1 rows of the vocabulary -> logits of 10.
        Raises: LostRankError if another rank has ended.
        """
        most = -(-total // self.size)
        if x.shape[-1] < most:  # all ranks must bring the same shape
            x = torch.nn.functional.pad(x, (0, most - x.shape[-1]))
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        try:
            dist.all_gather(parts, x, group=self.group)
        except RuntimeError as error:
            raise _lost(error) from None
        return torch.cat(parts, dim=-1)[..., :total]

    def first(self, x: Tensor) -> Tensor:
        """`x` of rank 0, in the memory of `x`, unless its elements lie apart.

        Raises: LostRankError if another rank has ended.
        """
        x = x.contiguous()
        try:
            dist.broadcast(x, 0, group=self.group)
        except RuntimeError as error:
            raise _lost(error) from None
        return x


# What gloo and NCCL say when the other end is gone, or does not answer in time.
_LOST = ("connection", "broken pipe", "timed out", "timeout", "peer", "abort", "remote process")


def _lost(error: RuntimeError) -> Exception:
    if not any(word in str(error).lower() for word in _LOST):
        return error
    return LostRankError("the connection to another rank broke")
