"""GPUs on a machine without any: tensors that claim one, hold their values on the CPU, and check.

Inside of `pretended_gpus()` a tensor made on, or moved to, `cuda:N` says so. Each operator on it
runs on the CPU, so that values are real, but all its tensors must claim the same device, as a GPU
would have it; tensors without dimensions may come from the CPU. (torch's FakeTensorMode checks
likewise, but has no values, and experts and images ask for some.)
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from llamatool.config.model import ModelConfig
from llamatool.sizing.fit import Load
from llamatool.sizing.placement import Device, Placement, place_layers


class MixedDevicesError(RuntimeError):
    """An operator met tensors of two devices."""


class Pretending(Tensor):
    """A tensor that claims to be on a GPU."""

    held: Tensor  # its values, on the CPU

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "Pretending":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=device
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Pretending({self.held!r}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = kwargs.get("device")
        device = _common_device(func, (args, kwargs))
        if target is not None:
            device = torch.device(target)
        given = {
            id(x.held): x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Pretending)
        }
        plain_args, plain_kwargs = tree_map(_held, (args, kwargs))
        if target is not None:
            plain_kwargs["device"] = "cpu"
        result = func(*plain_args, **plain_kwargs)
        if func is torch.ops.aten._to_copy.default and result is plain_args[0]:
            result = result.clone()

        def pretend(x: Any) -> Any:
            if not isinstance(x, Tensor) or device.type == "cpu":
                return x
            return given[id(x)] if id(x) in given else Pretending(x, device)

        return tree_map(pretend, result)


def _held(x: Any) -> Any:
    return x.held if isinstance(x, Pretending) else x


def _common_device(func: Any, arguments: Any) -> torch.device:
    tensors = [x for x in tree_flatten(arguments)[0] if isinstance(x, Tensor)]
    may_mix = func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
    devices = {x.device for x in tensors if x.dim() or x.device.type != "cpu"}
    if len(devices) > 1 and not may_mix:
        raise MixedDevicesError(f"{func} on {', '.join(map(str, devices))}")
    # What is copied into keeps its device.
    return tensors[0].device if may_mix or len(devices) != 1 else devices.pop()


# Python's own way into these asks for the device before it comes to an operator.
_BY_VALUE = (
    torch.nn.functional.scaled_dot_product_attention,  # by the CPU's kernel, and not by parts
    Tensor.__getitem__,
    Tensor.__setitem__,
    Tensor.contiguous,
    Tensor.tolist,
    Tensor.__int__,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.nonzero,
    Tensor.__invert__,
)


class _Pretence(TorchFunctionMode):
    """Catches what would ask for a real GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.to:
            return _moved(func, args, kwargs)
        if func in _BY_VALUE:
            device = _common_device(func, (args, kwargs))
            args, kwargs = tree_map(_held, (args, kwargs))
            return _claim(func(*args, **kwargs), device)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
            return _claim(func(*args, **kwargs), torch.device(device))
        return func(*args, **kwargs)


def _claim(x: Any, device: torch.device) -> Any:
    return Pretending(x, device) if isinstance(x, Tensor) and device.type == "cuda" else x


def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    x, rest = args[0], list(args[1:])
    target = kwargs.get("device")
    for number, argument in enumerate(rest):
        if isinstance(argument, str | torch.device):
            target = torch.device(argument)
            rest[number] = "cpu"
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    if target is None or torch.device(target) == x.device:
        if target is None:
            return func(*args, **kwargs)
        target = x.device
    moved = func(_held(x), *rest, **kwargs)
    if moved is _held(x):
        if target == x.device:
            return x
        moved = moved.clone()  # another device is other memory
    return _claim(moved, torch.device(target))


@contextmanager
def pretended_gpus() -> Iterator[None]:
    """A machine with as many GPUs as anyone names."""
    with _Pretence():
        yield


def values(x: Tensor) -> Tensor:
    """What a tensor holds, wherever it claims to be."""
    return _held(x)


def shared_out(
    names: Sequence[str], config: ModelConfig, here: object, wanted: Load, **how: Any
) -> Placement:
    """`place_layers` on devices that have so little room that each holds its share of layers."""
    whole = place_layers(config, [Device("cpu", None)], wanted, **how).shares[0]
    found: list[Device] = []
    rest = [Device(name, None) for name in names]
    while len(rest) > 1:
        device, *rest = rest
        for percent in range(1, 100):
            usable = whole.needed_bytes * percent // 100
            room = Device(device.name, math.ceil((usable + 2**29) / 0.9))
            made = place_layers(config, [*found, room, *rest], wanted, **how)
            held = {share.device.name: len(share.layers) for share in made.shares}
            if held.get(device.name, 0) >= len(whole.layers) // len(names):
                found.append(room)
                break
    return place_layers(config, [*found, *rest], wanted, **how)
