"""Frozen dataclasses that cost next to nothing at import.

`dataclasses.dataclass` writes and compiles source for every class, about half a millisecond
each; the forty classes of a plain `inspect` would spend a third of its start-up there. `record`
lets dataclasses collect the fields and gives all classes the same ready-made methods, so that
`dataclasses.replace`, `fields` and `asdict` work as usual. benchmarks/startup.py shows the gain.
"""

from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field
from typing import Any, NoReturn, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """`cls` as a frozen dataclass: compared by value, hashable, and with a readable repr."""
    made = dataclass(init=False, repr=False, eq=False)(cls)
    for name, method in _METHODS.items():
        if name not in cls.__dict__:
            setattr(made, name, method)
    return made


def _init(self: Any, *args: Any, **values: Any) -> None:
    fields: dict[str, Field[Any]] = self.__dataclass_fields__
    if args:
        if len(args) > len(fields):
            raise TypeError(f"{type(self).__name__} takes {len(fields)} values, not {len(args)}")
        for name, value in zip(fields, args, strict=False):
            if name in values:
                raise TypeError(f"{type(self).__name__} got `{name}` twice")
            values[name] = value
    if len(values) < len(fields):
        for name, spec in fields.items():
            if name not in values:
                values[name] = _default(self, name, spec)
    if len(values) > len(fields):
        unknown = sorted(set(values) - set(fields))
        raise TypeError(f"{type(self).__name__} has no field {', '.join(unknown)}")
    self.__dict__.update(values)


def _default(self: Any, name: str, spec: "Field[Any]") -> Any:
    if spec.default is not MISSING:
        return spec.default
    if spec.default_factory is not MISSING:
        return spec.default_factory()
    raise TypeError(f"{type(self).__name__} needs `{name}`")


def _eq(self: Any, other: object) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self.__dict__ == other.__dict__


def _hash(self: Any) -> int:
    return hash(tuple(self.__dict__[name] for name in self.__dataclass_fields__))


def _repr(self: Any) -> str:
    values = ", ".join(f"{name}={self.__dict__[name]!r}" for name in self.__dataclass_fields__)
    return f"{type(self).__qualname__}({values})"


def _setattr(self: Any, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(self: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


_METHODS = {
    "__init__": _init,
    "__eq__": _eq,
    "__hash__": _hash,
    "__repr__": _repr,
    "__setattr__": _setattr,
    "__delattr__": _delattr,
}
