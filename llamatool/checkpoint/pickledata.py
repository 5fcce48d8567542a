"""A pickle read as data: a small stack machine that can build values but call nothing.

Python's own unpickler runs whatever a file names, and even with its names restricted it recurses
and reserves memory as the file asks. This machine knows the operations that torch.save uses,
keeps every step and size bounded, and hands each call to a function that may only make inert
values of it.

Source: Lib/pickletools.py of CPython, which describes the operations.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llamatool.records import record

MAX_STEPS = 2_000_000  # about 30 for one tensor
MAX_TEXT = 4096  # bytes; longer strings are kept as a Blob


class PickleDataError(ValueError):
    """The pickle is damaged, or does something that data has no need of."""


@record
class Global:
    """A name that the pickle refers to, never looked up: `torch._utils._rebuild_tensor_v2`."""

    name: str


@record
class Blob:
    """A long string or byte string, of which only the length is kept."""

    num_bytes: int


class _Mark:
    pass


_MARK = _Mark()
_SCALARS = (str, int, float, bool, bytes, type(None))


@dataclass(slots=True)
class Machine:
    """Reads the pickle that begins at `position` in `data`.

    Args: find: turns a name into a value, or raises. reduce: the value of calling what `find`
    gave with arguments. persistent: the value of a persistent id.
    """

    data: bytes
    find: Callable[[str], object]
    reduce: Callable[[object, object], object]
    persistent: Callable[[object], object]
    position: int = 0

    def load(self) -> Any:
        """The value of the pickle; `position` then stands behind it.

        Raises: PickleDataError.
        """
        stack: list[Any] = []
        memo: dict[int, Any] = {}
        try:
            for _ in range(MAX_STEPS):
                code = self._take(1)[0]
                if code == 0x2E:  # STOP
                    return stack.pop()
                self._step(code, stack, memo)
        except PickleDataError:
            raise
        except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
            raise PickleDataError(f"damaged near byte {self.position} ({error})") from None
        raise PickleDataError(f"takes more than {MAX_STEPS:,} steps")

    def _step(self, code: int, stack: list[Any], memo: dict[int, Any]) -> None:
        char = chr(code)
        if char == "(":
            stack.append(_MARK)
        elif char in "hj":  # BINGET, LONG_BINGET
            stack.append(memo[self._int(1 if char == "h" else 4)])
        elif char in "qr":  # BINPUT, LONG_BINPUT
            memo[self._int(1 if char == "q" else 4)] = stack[-1]
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif char == "K":
            stack.append(self._int(1))
        elif char == "M":
            stack.append(self._int(2))
        elif char == "J":
            stack.append(struct.unpack("<i", self._take(4))[0])
        elif code == 0x8A:  # LONG1
            stack.append(int.from_bytes(self._take(self._int(1)), "little", signed=True))
        elif char == "G":
            stack.append(struct.unpack(">d", self._take(8))[0])
        elif code == 0x8C:  # SHORT_BINUNICODE
            stack.append(self._text(self._int(1)))
        elif char == "X":
            stack.append(self._text(self._int(4)))
        elif char in "UC":  # SHORT_BINSTRING, SHORT_BINBYTES
            stack.append(self._bytes(self._int(1), char == "U"))
        elif char in "TB":  # BINSTRING, BINBYTES
            stack.append(self._bytes(self._int(4), char == "T"))
        elif char == "N":
            stack.append(None)
        elif code in (0x88, 0x89):  # NEWTRUE, NEWFALSE
            stack.append(code == 0x88)
        elif char == "}":
            stack.append({})
        elif char == "]":
            stack.append([])
        elif char == ")":
            stack.append(())
        elif char == "t":
            items = _pop_mark(stack)
            stack.append(tuple(items))
        elif code in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
            count = code - 0x84
            if len(stack) < count:
                raise IndexError("stack")
            stack[-count:] = [tuple(stack[-count:])]
        elif char in "su":  # SETITEM, SETITEMS
            items = _pop_mark(stack) if char == "u" else [stack.pop(-2), stack.pop()]
            _set_items(stack[-1], items)
        elif char in "ae":  # APPEND, APPENDS
            items = _pop_mark(stack) if char == "e" else [stack.pop()]
            if type(stack[-1]) is not list:
                raise TypeError("append to what is no list")
            stack[-1].extend(items)
        elif char == "c":
            module, name = self._line(), self._line()
            stack.append(self.find(f"{module}.{name}"))
        elif code == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            if type(name) is not str or type(module) is not str:
                raise TypeError("a name that is no text")
            stack.append(self.find(f"{module}.{name}"))
        elif char == "R" or code == 0x81:  # REDUCE, NEWOBJ
            arguments, function = stack.pop(), stack.pop()
            stack.append(self.reduce(function, arguments))
        elif char == "Q":
            stack.append(self.persistent(stack.pop()))
        elif char == "b":  # BUILD: attributes, of which none is of use to us
            stack.pop()
            stack[-1]
        elif code == 0x80:  # PROTO
            if self._int(1) > 5:
                raise PickleDataError("of an unknown protocol")
        elif code == 0x95:  # FRAME
            self._take(8)
        elif char == "0":
            stack.pop()
        else:
            raise PickleDataError(f"uses operation {char!r}, which tensors do not need")

    def _take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise PickleDataError("ends early")
        part = self.data[self.position : end]
        self.position = end
        return part

    def _int(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _text(self, num_bytes: int) -> str | Blob:
        if num_bytes > MAX_TEXT:
            return self._skip(num_bytes)
        try:
            return self._take(num_bytes).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise PickleDataError("holds text that is not UTF-8") from None

    def _bytes(self, num_bytes: int, as_text: bool) -> str | bytes | Blob:
        if num_bytes > MAX_TEXT:
            return self._skip(num_bytes)
        value = self._take(num_bytes)
        return value.decode("latin-1") if as_text else value  # Python 2 wrote names as bytes

    def _skip(self, num_bytes: int) -> Blob:
        if self.position + num_bytes > len(self.data):
            raise PickleDataError("ends early")
        self.position += num_bytes
        return Blob(num_bytes)

    def _line(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + MAX_TEXT)
        if end < 0:
            raise PickleDataError("holds a name without end")
        line = self.data[self.position : end]
        self.position = end + 1
        return line.decode("utf-8", "backslashreplace")


def _pop_mark(stack: list[Any]) -> list[Any]:
    for at in range(len(stack) - 1, -1, -1):
        if stack[at] is _MARK:
            items = stack[at + 1 :]
            del stack[at:]
            return items
    raise IndexError("no mark")


def _set_items(target: Any, items: list[Any]) -> None:
    if type(target) is not dict:  # CVE-2026-24747: items set on what is no dictionary
        raise TypeError("items set on what is no dictionary")
    if len(items) % 2:
        raise IndexError("a key without value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Hashing a deeply nested tuple would overflow the stack of the C code.
        if not isinstance(key, _SCALARS):
            raise TypeError("a key that is no plain value")
        target[key] = value
