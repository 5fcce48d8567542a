"""What every command shares: versions, exit codes, pipes, bugs and interruptions."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llamatool import __version__
from tests.cli.runner import ROOT, config, run


def test_version():
    assert run("--version").out == f"llamatool {__version__}\n"


def test_no_arguments_show_the_help():
    result = run()
    assert result.code == 2
    assert "Exit codes: 0 done" in result.out + result.err


def program(body: str, **env):
    """Python code after `import llamatool.cli.app as app`, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; import llamatool.cli.app as app\n{body}"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **env},
        check=False,
    )


BUG = """
def broken(*args, **kwargs):
    raise {error}
import llamatool.source
llamatool.source.load_source = broken
sys.argv = ["llamatool", "inspect", "llama-3.1-8b"]
app.main()
"""


def test_a_bug_is_70_and_not_the_answer_no():
    result = program(BUG.format(error="KeyError('x')"))
    assert result.returncode == 70
    assert result.stderr.startswith("error: a bug in llamatool: KeyError: 'x'\nhint: ")
    assert "Traceback" not in result.stderr
    shown = program(BUG.format(error="KeyError('x')"), LLAMATOOL_DEBUG="1")
    assert "Traceback" in shown.stderr


def test_no_memory_is_4():
    assert program(BUG.format(error="MemoryError()")).returncode == 4


def test_an_interruption_is_130():
    result = program(BUG.format(error="KeyboardInterrupt()"))
    assert result.returncode == 130
    assert "Traceback" not in result.stderr


def test_control_c_is_130():
    body = (
        "import time, llamatool.source\n"
        "def wait(*a, **k):\n    sys.stderr.write('ready\\n'); sys.stderr.flush(); time.sleep(30)\n"
        "llamatool.source.load_source = wait\n"
        "sys.argv = ['llamatool', 'inspect', 'llama-3.1-8b']\napp.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; import llamatool.cli.app as app\n{body}"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["models"], ["inspect", "llama-3.1-8b", "--json"]])
def test_a_closed_pipe_is_silent(arguments):
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "llamatool", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert process.returncode == 1
    assert process.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_4():
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "llamatool", "models"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=60,
            check=False,
        )
    assert process.returncode == 4
    assert process.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("redirection", "source", "code"),
    [(">&-", "llama-3.1-8b", 0), ("2>&-", "nothing.json", 3), ("<&-", "-", 2)],
)
def test_closed_streams(redirection, source, code):
    command = f"{sys.executable} -m llamatool inspect {source} {redirection}"
    process = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert process.returncode == code
    assert "Traceback" not in process.stderr


def test_a_locale_without_unicode_escapes_instead_of_failing(tmp_path):
    path = tmp_path / "modèle.json"
    path.write_bytes(config("llama-3.1-8b").read_bytes())
    result = run("inspect", path, "--json", env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert result.code == 0
    assert "mod\\xe8le.json" in result.out


def test_completion_files_are_printed():
    for shell, word in (("bash", "complete"), ("zsh", "#compdef"), ("fish", "complete -c")):
        result = run("completion", shell)
        assert result.code == 0
        assert word in result.out
    assert run("completion", "tcsh").code == 2
