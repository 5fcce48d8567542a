"""Every test runs offline, in a home of its own, with the same terminal width."""

import io
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no fault of the program; where CI is set, every run tries the same examples.
settings.register_profile(
    "llamatool",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("llamatool")

_LOCAL = ("127.0.0.1", "::1", "localhost", "")
_environment = pytest.MonkeyPatch()
_home = TemporaryDirectory(prefix="llamatool-tests-")


def pytest_configure() -> None:
    """Set before anything is collected: huggingface_hub reads its variables when imported."""
    home = Path(_home.name)
    for name, value in {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "XDG_DATA_HOME": str(home / "data"),
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "COLUMNS": "100",
        "TERM": "xterm",
    }.items():
        _environment.setenv(name, value)
    for name in (
        *("NO_COLOR", "FORCE_COLOR", "LLAMATOOL_DEBUG", "HF_TOKEN", "HF_ENDPOINT"),
        *("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    ):
        _environment.delenv(name, raising=False)
    _environment.setattr(socket.socket, "connect", _local_only(socket.socket.connect))


def pytest_unconfigure() -> None:
    _environment.undo()
    _home.cleanup()


def _local_only(connect: Callable[..., Any]) -> Callable[..., Any]:
    """`connect` that refuses every address outside this machine; the tests' servers are local."""

    def checked(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in _LOCAL:
            raise OSError(f"the tests are offline: no connection to {address[0]}")
        return connect(self, address)

    return checked


@dataclass(frozen=True)
class Finished:
    """What one run of the program left."""

    exit_code: int
    stdout: str
    stderr: str


class _Stream(io.TextIOWrapper):
    def __init__(self, content: bytes = b"") -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8", write_through=True)

    @property
    def text(self) -> str:
        raw = self.buffer
        assert isinstance(raw, io.BytesIO)
        return raw.getvalue().decode()


@pytest.fixture
def run() -> Iterator[Callable[..., Finished]]:
    """Runs `llamatool ARGS...` in this process, through the same entry as the shell does."""
    from llamatool.cli.app import main

    with pytest.MonkeyPatch.context() as patch:

        def call(*args: str, stdin: bytes = b"") -> Finished:
            out, err = _Stream(), _Stream()
            patch.setattr(sys, "argv", ["llamatool", *args])
            patch.setattr(sys, "stdin", _Stream(stdin))
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            code: object = 0
            try:
                main()
            except SystemExit as stop:
                code = stop.code
            patch.undo()
            return Finished(code if isinstance(code, int) else 0, out.text, err.text)

        yield call
