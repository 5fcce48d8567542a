"""The wheel: what it holds, and that it runs where only its own files are."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from importlib import import_module
from pathlib import Path

import pytest

import llamatool

ROOT = Path(__file__).resolve().parent.parent
SHARED = {
    "llamatool.bash": "share/bash-completion/completions/llamatool",
    "_llamatool": "share/zsh/site-functions/_llamatool",
    "llamatool.fish": "share/fish/vendor_completions.d/llamatool.fish",
}
pytestmark = pytest.mark.slow


def quiet(*command: str | Path, **options) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    quiet(*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    quiet(*pip, "install", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def tracked(folder: str) -> set[str]:
    """Files of the package as git knows them, and new ones it would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


def test_name_and_version(wheel: Path) -> None:
    assert wheel.name == f"llamatool-{llamatool.__version__}-py3-none-any.whl"


def test_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if ".dist-info/" not in name and ".data/" not in name}
    completions = {f"llamatool/completions/{name}" for name in SHARED}
    assert inside == tracked("llamatool") | completions
    assert {"llamatool/py.typed", "llamatool/config/catalog.json"} <= inside


@pytest.mark.parametrize("name", SHARED)
def test_holds_completions_twice(wheel: Path, name: str) -> None:
    """Where shells look in a prefix, and in the package for `llamatool completion`."""
    archive = zipfile.ZipFile(wheel)
    source = (ROOT / "completions" / name).read_bytes()
    data = f"llamatool-{llamatool.__version__}.data/data/{SHARED[name]}"
    assert archive.read(data) == source
    assert archive.read(f"llamatool/completions/{name}") == source


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    folder = f"llamatool-{llamatool.__version__}.dist-info"
    metadata = message_from_string(archive.read(f"{folder}/METADATA").decode())
    needs = metadata.get_all("Requires-Dist") or []
    assert "typer<0.29,>=0.26" in needs  # the start-up promise
    assert not [need for need in needs if need.startswith("torch") and "extra ==" not in need]
    assert set(metadata.get_all("Provides-Extra") or []) >= {"torch", "vision"}
    assert archive.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    scripts = archive.read(f"{folder}/entry_points.txt").decode().split()
    assert scripts == ["[console_scripts]", "llamatool", "=", "llamatool.__main__:main"]
    module, function = scripts[-1].split(":")
    assert callable(getattr(import_module(module), function))


def run_installed(installed: Path, *args: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed), "LLAMATOOL_DEBUG": "1"}
    done = subprocess.run(
        [sys.executable, *args],
        cwd=installed.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_installed_package_is_the_one_that_runs(installed: Path) -> None:
    path = run_installed(installed, "-c", "import llamatool; print(llamatool.__file__)")
    assert Path(path.strip()) == installed / "llamatool" / "__init__.py"


def test_runs_installed(installed: Path) -> None:
    printed = run_installed(installed, "-m", "llamatool", "--version")
    assert printed == f"llamatool {llamatool.__version__}\n"
    found = json.loads(
        run_installed(installed, "-m", "llamatool", "inspect", "llama-3.1-8b", "--json")
    )
    assert found["parameters"]["total"] == 8_030_261_248


@pytest.mark.parametrize(("shell", "name"), [("bash", "llamatool.bash"), ("zsh", "_llamatool")])
def test_installed_completions(installed: Path, shell: str, name: str) -> None:
    printed = run_installed(installed, "-m", "llamatool", "completion", shell)
    assert printed == (ROOT / "completions" / name).read_text()


def test_source_archive_can_be_built_from(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    quiet(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {f"completions/{name}" for name in SHARED} <= names
    assert {"README.md", "LICENSE", "pyproject.toml"} <= names
    assert tracked("llamatool") <= names
