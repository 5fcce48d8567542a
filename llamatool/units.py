"""Quantities with units: token counts, bytes and parameter counts, parsed and printed.

One meaning each, in every command: in a token count `k` is 1,024 and `M` is 1,048,576 (a context
of `64k` is 65,536 tokens) while a plain number is itself; in bytes `kB`, `MB`, `GB` are powers of
1,000 and `KiB`, `MiB`, `GiB` powers of 1,024.
"""

import re

from llamatool.errors import UsageError

TOKENS_HELP = "k is 1,024 and M is 1,048,576: 64k is 65,536; a plain number is itself"
BYTES_HELP = "GB is 10^9 and GiB is 2^30 bytes: 80GB, 80GiB"

_MAX = 2**62
_TOKEN_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_BYTE_UNITS = {"b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _BYTE_UNITS[f"{_letter}b"] = 1000**_power
    _BYTE_UNITS[f"{_letter}ib"] = 1024**_power

_NUMBER = re.compile(r"\s*([0-9][0-9,_]*)(?:\.([0-9]{1,12}))?\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_tokens(text: str) -> int:
    """Number of tokens in `text`, such as `100000`, `100,000`, `64k` or `1M`.

    Raises: UsageError if it is no whole number of tokens.
    Example: `64k` -> 65536; `1.5k` -> 1536.
    """
    value = _scaled(text, _TOKEN_UNITS)
    if value is None:
        raise UsageError(f"`{text}` is not a number of tokens", hint=f"{TOKENS_HELP}")
    return value


def parse_bytes(text: str) -> int:
    """Number of bytes in `text`, such as `80GiB`, `24 GB` or `1.5GiB`; the unit is required.

    Raises: UsageError if it is no whole number of bytes, or has no unit.
    Example: `80GiB` -> 85899345920; `80GB` -> 80000000000.
    """
    value = _scaled(text, _BYTE_UNITS)
    if value is None:
        raise UsageError(f"`{text}` is not an amount of memory", hint=f"{BYTES_HELP}")
    return value


def _scaled(text: str, units: dict[str, int]) -> int | None:
    match = _NUMBER.fullmatch(text)
    if match is None or len(text) > 40:
        return None
    whole, fraction, unit = match.groups()
    scale = units.get(unit.lower())
    if scale is None:
        return None
    digits = int(whole.replace(",", "").replace("_", ""))
    value = digits * scale
    if fraction:
        extra, rest = divmod(int(fraction) * scale, 10 ** len(fraction))
        if rest and scale == 1:
            return None
        value += extra
    return value if value <= _MAX else None


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` in the largest binary unit that is at least one: `14.96 GiB`, `131072 B`.

    Example: 16060522496 -> `14.96 GiB`; 98304 -> `96.00 KiB`.
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def format_gib(num_bytes: int) -> str:
    """`num_bytes` in GiB with two decimals, for columns that share one unit: `14.96`."""
    return f"{num_bytes / 2**30:.2f}"


def format_count(count: int) -> str:
    """A parameter count with three figures, as the field says it: `8.03B`, `135M`.

    Example: 8030261248 -> `8.03B`; 401583781376 -> `402B`.
    """
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            value = count / size
            decimals = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{decimals}f}{unit}"
    return str(count)


def format_tokens(num_tokens: int) -> str:
    """A token count in its shortest exact form: `128k` (131072), `10M`, `100,000`."""
    if num_tokens and num_tokens % 2**20 == 0:
        return f"{num_tokens // 2**20}M"
    if num_tokens and num_tokens % 2**10 == 0:
        return f"{num_tokens // 2**10}k"
    return f"{num_tokens:,}"
