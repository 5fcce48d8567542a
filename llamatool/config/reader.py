"""Typed reading of one JSON object, remembering where each value came from."""

from collections.abc import Mapping
from typing import Any

from llamatool.config.model import MAX_SIZE, Origin
from llamatool.errors import ConfigError


class Reader:
    """Reads keys of one JSON object; every error names the key, the value and the file.

    A key that is absent or null falls back to the default; without a default it is an error,
    since a size is never invented.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str, path: str = "") -> None:
        self.values = values
        self.where = where
        self.path = path
        self.origins: dict[str, Origin] = {}

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def size(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number from `minimum` to 2^31 - 1; required unless there is a default."""
        value = self.optional_size(key, minimum=minimum)
        if value is not None:
            return value
        if default is None:
            raise self.missing(key)
        self.origins[key] = "default"
        return default

    def optional_size(self, key: str, *, minimum: int = 1) -> int | None:
        """As `size`, but None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        self.origins[key] = "file"
        return self.check_size(key, value, minimum=minimum)

    def check_size(self, key: str, value: object, *, minimum: int = 1) -> int:
        """`value` as a whole number in range."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, value, "a whole number")
        if not minimum <= value <= MAX_SIZE:
            raise self.wrong(key, value, f"a number from {minimum} to {MAX_SIZE}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite number, above zero unless told; required unless there is a default."""
        value = self.optional_number(key, positive=positive)
        if value is not None:
            return value
        if default is None:
            raise self.missing(key)
        self.origins[key] = "default"
        return default

    def optional_number(self, key: str, *, positive: bool = True) -> float | None:
        """As `number`, but None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, value, "a number")
        if (positive and value <= 0) or abs(value) > 1e30:
            raise self.wrong(key, value, "a positive number" if positive else "a number in range")
        self.origins[key] = "file"
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            self.origins[key] = "default"
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        self.origins[key] = "file"
        return value

    def text(self, key: str) -> str | None:
        """A string, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        self.origins[key] = "file"
        return value

    def block(self, key: str) -> "Reader | None":
        """A nested object, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return Reader(value, where=self.where, path=f"{self.path}{key}.")

    def items(self, key: str) -> list[Any] | None:
        """A list, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(key, value, "a list")
        self.origins[key] = "file"
        return value

    def sizes(self, key: str, *, minimum: int = 0) -> tuple[int, ...] | None:
        """A list of whole numbers, or None where the key is absent or null."""
        values = self.items(key)
        if values is None:
            return None
        return tuple(
            self.check_size(f"{key}[{i}]", v, minimum=minimum) for i, v in enumerate(values)
        )

    def numbers(self, key: str) -> tuple[float, ...] | None:
        """A list of numbers above zero, or None where the key is absent or null."""
        values = self.items(key)
        if values is None:
            return None
        for index, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise self.wrong(f"{key}[{index}]", value, "a positive number")
        return tuple(float(value) for value in values)

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty where the key is absent or null."""
        values = self.items(key) or []
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise self.wrong(f"{key}[{index}]", value, "a string")
        return tuple(values)

    def token_id(self, key: str) -> int | None:
        """A token id; negative ids occur in old conversions and mean "none"."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        self.origins[key] = "file"
        return self.check_size(key, value, minimum=-1)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.values.get(key)
        if value is None:
            return ()
        self.origins[key] = "file"
        values = value if isinstance(value, list) else [value]
        return tuple(self.check_size(key, item, minimum=-1) for item in values)

    def missing(self, key: str) -> ConfigError:
        """The error for a key that has no default."""
        state = "is null" if key in self.values else "is missing"
        return ConfigError(
            f"`{self.path}{key}` {state}",
            where=self.where,
            hint="llamatool never guesses a size; take the value from the model's own file",
        )

    def wrong(self, key: str, value: object, expected: str) -> ConfigError:
        """The error for a value of the wrong kind."""
        return ConfigError(
            f"`{self.path}{key}` is {_shown(value)}, expected {expected}", where=self.where
        )


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        return f'`"{value[:60]}"`'
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)[:60]
