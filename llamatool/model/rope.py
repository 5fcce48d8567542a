"""Rotary position embedding on tensors: the frequencies of config/rope.py, turned into rotations.

Letters: T tokens, E head_dim; the pairs are E/2. A pair is (i, i + E/2) in the "half" layout of
Hugging Face's Llama files and (2i, 2i + 1) in the interleaved layout of Meta's files and of all
Llama 4 files.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llamatool.config.model import ModelConfig
from llamatool.config.rope import attention_factor, inverse_frequencies


class Rotation(NamedTuple):
    """The turns of consecutive positions: cosine and sine of every pair's angle."""

    cos_TP: Tensor  # P = E / 2
    sin_TP: Tensor
    interleaved: bool


class RotaryEmbedding:
    """Makes rotations for the positions asked for, never for the whole context.

    A table for the 10,485,760 positions of Llama 4 Scout would take 5.4 GB.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.rope = config.rope
        self.head_dim = config.head_dim
        self.context = config.max_position_embeddings
        self.scale = attention_factor(config.rope, max_position_embeddings=self.context)
        self.depends_on_length = config.rope.type in ("dynamic", "longrope")
        self._frequencies: dict[tuple[torch.device, int], Tensor] = {}

    def rotation(
        self, start: int, num_tokens: int, *, length: int, dtype: torch.dtype, device: torch.device
    ) -> Rotation:
        """The rotations of positions `start` to `start + num_tokens - 1`.

        Angles are computed in fp32: at position 131072 a bfloat16 frequency is off by whole
        turns. In the half layout cosine and sine are then rounded to the dtype of the model, in
        the interleaved layout q and k are rotated in fp32, each as its reference does.

        Args: length: tokens in sight, which `dynamic` and `longrope` scale by.
        """
        positions_T = torch.arange(start, start + num_tokens, device=device, dtype=torch.float32)
        angles_TP = positions_T[:, None] * self._inverse_frequencies(length, device)
        if self.rope.interleaved:
            cos_TP, sin_TP = _as_complex(angles_TP)
        else:
            cos_TP, sin_TP = angles_TP.cos(), angles_TP.sin()
        if self.scale != 1.0:
            cos_TP, sin_TP = cos_TP * self.scale, sin_TP * self.scale
        if not self.rope.interleaved:
            cos_TP, sin_TP = cos_TP.to(dtype), sin_TP.to(dtype)
        return Rotation(cos_TP, sin_TP, self.rope.interleaved)

    def _inverse_frequencies(self, length: int, device: torch.device) -> Tensor:
        key = (device, length if self.depends_on_length else 0)
        if key not in self._frequencies:
            if self.depends_on_length:
                # Decoding asks for a new length at each step, on every device in turn.
                for old in [old for old in self._frequencies if old[1] != key[1]]:
                    del self._frequencies[old]
            frequencies = inverse_frequencies(
                self.rope,
                self.head_dim,
                max_position_embeddings=self.context,
                length=key[1],
                powers=single_powers,
            )
            self._frequencies[key] = torch.tensor(frequencies, dtype=torch.float32, device=device)
        return self._frequencies[key]


def _as_complex(angles_TP: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine by way of complex numbers, as the reference takes them.

    On a CPU, torch computes those with another routine, and up to an ulp apart.
    """
    turns_TP = torch.polar(torch.ones_like(angles_TP), angles_TP)
    return turns_TP.real.contiguous(), turns_TP.imag.contiguous()


class Single(float):
    """A number of single precision: what it is added to or multiplied by, and the result, too.

    Frequencies are computed in it because both references do, and so did those who trained the
    weights. One unit in the last place is little, but position 100,000 multiplies it.
    """

    def __new__(cls, value: float) -> "Single":
        """The nearest number of single precision; OverflowError beyond the largest."""
        return super().__new__(cls, struct.unpack("f", struct.pack("f", value))[0])

    def __add__(self, other: float) -> "Single":
        return Single(float(self) + float(Single(other)))

    def __sub__(self, other: float) -> "Single":
        return Single(float(self) - float(Single(other)))

    def __rsub__(self, other: float) -> "Single":
        return Single(float(Single(other)) - float(self))

    def __mul__(self, other: float) -> "Single":
        return Single(float(self) * float(Single(other)))

    def __truediv__(self, other: float) -> "Single":
        return Single(float(self) / float(Single(other)))

    def __rtruediv__(self, other: float) -> "Single":
        return Single(1.0 / float(self)) * other  # as torch divides a number by a tensor

    __radd__ = __add__
    __rmul__ = __mul__


def single_powers(theta: float, head_dim: int) -> Sequence[float]:
    """theta^(2i / head_dim) for each of the head_dim / 2 pairs, by torch in single precision.

    By torch, since powers are what its kernels do not round correctly.
    """
    indices_P = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    return tuple(map(Single, (float(theta) ** (indices_P / head_dim)).tolist()))


def rotate(x_BHTE: Tensor, rotation: Rotation) -> Tensor:
    """`x_BHTE` with every pair turned by its token's angle.

    The score of a rotated query and a rotated key depends only on the distance of their
    positions: turning both by the same angle changes no angle between them.
    """
    cos_TP, sin_TP, interleaved = rotation
    if interleaved:
        a_BHTP, b_BHTP = x_BHTE.float().view(*x_BHTE.shape[:-1], -1, 2).unbind(-1)
        turned = (a_BHTP * cos_TP - b_BHTP * sin_TP, a_BHTP * sin_TP + b_BHTP * cos_TP)
        return torch.stack(turned, dim=-1).flatten(-2).to(x_BHTE.dtype)
    a_BHTP, b_BHTP = x_BHTE.chunk(2, dim=-1)
    turned = (a_BHTP * cos_TP - b_BHTP * sin_TP, b_BHTP * cos_TP + a_BHTP * sin_TP)
    return torch.cat(turned, dim=-1)
