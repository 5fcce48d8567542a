"""The errors a user can meet, each with its exit code.

LlamatoolError
  UsageError            2   the command line does not make sense
  InputError            3   input not understood or unreadable
    ConfigError             ... in a configuration
    CheckpointError         ... in a checkpoint's files
    TokenizerError          ... in a tokenizer's files
    UnsupportedError        ... understood, but llamatool does not do this
  MissingError          4   something is missing here
    MissingExtraError       ... a package of an optional extra
    ResourceError           ... memory, disk space, hardware, permission to write
    LostRankError           ... another process of the same run has ended
  HubError              5   the hub or the network

Exit code 0 is done, 1 is the answer "no" (no error), 70 a bug of ours, 130 an interruption.
"""

from typing import ClassVar


class LlamatoolError(Exception):
    """A failure that is explained to the user in words: what, where and what to do."""

    exit_code: ClassVar[int] = 70

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def at(self, where: str) -> "LlamatoolError":
        """The same error with its place filled in, if it had none."""
        if self.where is None:
            self.where = where
        return self

    def __str__(self) -> str:
        lines = [one_line(self.what)]
        if self.where:
            lines.append(f"  at {one_line(self.where)}")
        if self.hint:
            lines.append(f"hint: {one_line(self.hint)}")
        return "\n".join(lines)


class UsageError(LlamatoolError):
    """The command line does not make sense."""

    exit_code = 2


class InputError(LlamatoolError):
    """Input that is not understood or cannot be read."""

    exit_code = 3


class ConfigError(InputError):
    """A configuration that is incomplete or contradicts itself."""


class CheckpointError(InputError):
    """A checkpoint file that is damaged, incomplete or dangerous."""


class TokenizerError(InputError):
    """A tokenizer file that is damaged or of an unknown kind."""


class UnsupportedError(InputError):
    """Input that is understood, but that llamatool does not handle."""


class MissingError(LlamatoolError):
    """Something that this machine lacks."""

    exit_code = 4


class MissingExtraError(MissingError):
    """A package of an optional extra is not installed."""

    def __init__(self, needed_by: str, package: str, extra: str) -> None:
        super().__init__(f"{needed_by} needs {package}", hint=f"pip install 'llamatool[{extra}]'")


class ResourceError(MissingError):
    """Not enough memory or disk space, no such hardware, or no permission to write."""


class LostRankError(MissingError):
    """Another process that shares the model has ended or cannot be reached."""


class HubError(LlamatoolError):
    """The hub or the network did not give what was asked for."""

    exit_code = 5


def one_line(text: str) -> str:
    """`text` with control characters escaped, so that a hostile name cannot move the cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
