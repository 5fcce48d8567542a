"""JSON from strangers: duplicate keys, NaN, huge numbers and deep nesting are refused.

The standard library accepts all four in silence, and each can make two tools read different
values from one file.
"""

import json
from typing import Any

from llamatool.errors import InputError

MAX_DIGITS = 40  # an int of more digits is no size of anything


def parse_object(text: str | bytes, *, where: str, what: str = "JSON") -> dict[str, Any]:
    """The JSON object in `text`.

    Args: what: names the expected content in the error, for example `a safetensors header`.
    Raises: InputError if it is no object, not UTF-8, or holds a duplicate key, NaN, an infinite
    or absurdly long number, or nests too deeply.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(
                f"expected {what}, found bytes that are not UTF-8 text (byte {error.start})",
                where=where,
            ) from None
    try:
        value = _DECODER.decode(text)
    except _RefusedError as error:
        raise InputError(f"{what}: {error}", where=where) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"expected {what}, {_looks_like(text, error)}",
            where=f"{where}, line {error.lineno}, column {error.colno}",
            hint=_hint(text, error),
        ) from None
    except RecursionError:
        raise InputError(f"{what} nests too deeply", where=where) from None
    if not isinstance(value, dict):
        raise InputError(
            f"expected {what}, found a JSON {_kind(value)} instead of an object", where=where
        )
    return value


class _RefusedError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedError(f"key `{key[:80]}` occurs twice")
            seen.add(key)
    return result


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _RefusedError(f"an integer of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise _RefusedError(f"number {digits[:40]} is out of range")
    return value


def _constant(name: str) -> float:
    raise _RefusedError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_int=_integer,
    parse_float=_finite,
    parse_constant=_constant,
)


def _ends_early(text: str, error: json.JSONDecodeError) -> bool:
    return error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")


def _looks_like(text: str, error: json.JSONDecodeError) -> str:
    start = text.lstrip()[:200]
    if not start:
        return "found an empty file"
    if start.startswith("version https://git-lfs"):
        return "found a git-lfs pointer"
    if start[:1] == "<":
        return "found HTML or XML"
    if _ends_early(text, error):
        return "found JSON that ends early"
    return f"found invalid JSON ({error.msg[:1].lower()}{error.msg[1:]})"


def _hint(text: str, error: json.JSONDecodeError) -> str | None:
    start = text.lstrip()[:200]
    if start.startswith("version https://git-lfs"):
        return "fetch the real file with `git lfs pull`"
    if start[:1] == "<":
        return "the download saved a web page, perhaps a login page; download the raw file"
    if text.strip() and _ends_early(text, error):
        return "the download or copy may be incomplete; fetch it again"
    return None


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return {list: "list", str: "string", int: "number", float: "number"}[type(value)]
