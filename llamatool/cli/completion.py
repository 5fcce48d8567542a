"""`llamatool completion`: prints the shell's completion file."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llamatool.errors import MissingError


class Shell(StrEnum):
    """Shells with a completion file."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


_FILES = {Shell.bash: "llamatool.bash", Shell.zsh: "_llamatool", Shell.fish: "llamatool.fish"}


def completion(
    shell: Annotated[
        Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)
    ],
) -> None:
    """Print the completion file of a shell; none of your own files is touched.

    Examples:

      llamatool completion bash > ~/.local/share/bash-completion/completions/llamatool

      llamatool completion zsh > ~/.zfunc/_llamatool

      llamatool completion fish > ~/.config/fish/completions/llamatool.fish
    """
    package = Path(__file__).resolve().parent.parent
    # Installed, the files lie in the package; in a source tree, beside it.
    for folder in (package / "completions", package.parent / "completions"):
        path = folder / _FILES[shell]
        if path.is_file():
            sys.stdout.write(path.read_text(encoding="utf-8"))
            return
    raise MissingError(
        f"the completion file for {shell.value} is not installed", hint="install llamatool again"
    )
