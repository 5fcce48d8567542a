"""The hub reader against a small server on this machine."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from llamatool.checkpoint import hub
from llamatool.errors import HubError, InputError

COMMIT = "0" * 39 + "1"
CONFIG = json.dumps({"model_type": "llama", "hidden_size": 8}).encode()


class Hub(http.server.ThreadingHTTPServer):
    """Files by `org/name/file`; a file's content may also be the name of a fault."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes | str] = {}
        self.sent = 0
        self.ranges: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that hangs up early is part of the tests


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[0] == "api":
            self.listing("/".join(parts[2:4]), tree="tree" in parts)
            return
        repository, name = "/".join(parts[:2]), "/".join(parts[4:])
        if parts[3] not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound")
            return
        known = [key for key in self.server.files if key.startswith(repository + "/")]
        content = self.server.files.get(f"{repository}/{name}")
        if not known:
            self.refuse(401, "RepoNotFound")
        elif content is None:
            self.refuse(404, "EntryNotFound")
        elif content == "gated":
            self.refuse(403, "GatedRepo")
        elif content == "broken":
            self.refuse(500, None)
        elif content == "cut":
            self.send_response(206)
            self.send_header("Content-Length", "1000")
            self.send_header("Content-Range", "bytes 0-999/1000")
            self.end_headers()
            self.wfile.write(b"{")
            self.wfile.flush()
            self.connection.close()
        else:
            assert isinstance(content, bytes)
            self.send(content, body)

    def listing(self, repository: str, tree: bool) -> None:
        names = [k.split("/", 2)[2] for k in self.server.files if k.startswith(repository + "/")]
        siblings = [{"rfilename": name} for name in names]
        if tree:
            entries = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in names]
            self.send(json.dumps(entries).encode(), True)
            return
        self.send(
            json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode(), True
        )

    def send(self, content: bytes, body: bool) -> None:
        asked = self.headers.get("Range")
        start, end = 0, len(content)
        if asked:
            self.server.ranges.append(asked)
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or end) + 1, end)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hash(content)}"')
        self.end_headers()
        if body:
            self.server.sent += end - start
            self.wfile.write(content[start:end])

    def refuse(self, status: int, code: str | None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with Hub() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()
    huggingface_hub.close_session()


def test_ids() -> None:
    assert hub.parse_id("org/name") == hub.HubId("org/name")
    assert str(hub.parse_id("org/name@v1.0")) == "org/name@v1.0"
    for text in ("name", "a/b/c", "org/", "/name", "org/na me", "org/..", "../x", "a/b@", "a/--b"):
        assert hub.parse_id(text) is None, text


def test_single_file_costs_only_its_header(server: Hub) -> None:
    server.files["org/name/config.json"] = CONFIG
    weights = save({f"t{i}": torch.zeros(500, 500) for i in range(8)})
    server.files["org/name/model.safetensors"] = weights
    found = hub.read_repository(hub.HubId("org/name"), endpoint=server.url)
    assert found.config["hidden_size"] == 8
    assert (found.config_format, found.config_name) == ("huggingface", "config.json")
    assert found.table is not None
    assert found.table.tensors["t7"].shape == (500, 500)
    assert len(weights) > 8_000_000
    assert server.sent < 200_000


def test_header_longer_than_the_first_request(server: Hub) -> None:
    server.files["org/name/config.json"] = CONFIG
    tensors = {f"{'x' * 100}.{i}": torch.zeros(1) for i in range(2000)}
    server.files["org/name/model.safetensors"] = save(tensors)
    found = hub.read_repository(hub.HubId("org/name"), endpoint=server.url)
    assert found.table is not None
    assert found.table.tensors.keys() == tensors.keys()
    assert len([r for r in server.ranges if not r.startswith("bytes=0-")]) == 1


def test_shards(server: Hub) -> None:
    weight_map = {}
    for number in range(1, 6):
        name = f"model-{number:05d}-of-00005.safetensors"
        server.files[f"org/name/{name}"] = save({f"t{number}": torch.zeros(number)})
        weight_map[f"t{number}"] = name
    server.files["org/name/config.json"] = CONFIG
    index = json.dumps({"weight_map": weight_map}).encode()
    server.files["org/name/model.safetensors.index.json"] = index
    seen: list[tuple[int, int]] = []
    found = hub.read_repository(
        hub.HubId("org/name", COMMIT),
        endpoint=server.url,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert found.table is not None
    assert {name: t.shape for name, t in found.table.tensors.items()} == {
        f"t{n}": (n,) for n in range(1, 6)
    }
    assert seen == [(n, 5) for n in range(1, 6)]
    del server.files["org/name/model-00003-of-00005.safetensors"]
    with pytest.raises(HubError, match="has no `model-00003-of-00005"):
        hub.read_repository(hub.HubId("org/name"), endpoint=server.url)


def test_meta_repository(server: Hub) -> None:
    server.files["org/name/original/params.json"] = b'{"dim": 8, "n_layers": 1}'
    found = hub.read_repository(hub.HubId("org/name"), endpoint=server.url)
    assert found.config_format == "meta"
    assert found.table is None


def one(content: bytes | str) -> dict[str, bytes | str]:
    return {"org/name/config.json": content}


FAULTS = {
    "gated": (one("gated"), None, "gated"),
    "server error": (one("broken"), None, "the hub answered 500"),
    "cut connection": (one("cut"), None, "connection to the hub failed"),
    "no repository": ({}, None, "knows no such repository"),
    "no revision": (one(CONFIG), "v9", "no such revision"),
    "no configuration": ({"org/name/README.md": b"x"}, None, "neither config.json nor"),
    "huge configuration": (one(b"{" + b" " * 2_000_000), None, "2,000,001 bytes"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults(server: Hub, case: str) -> None:
    content, revision, expected = FAULTS[case]
    server.files = content
    with pytest.raises(HubError, match=expected) as error:
        hub.read_repository(hub.HubId("org/name", revision), endpoint=server.url)
    assert error.value.exit_code == 5
    assert "org/name" in str(error.value)


def test_damaged_configuration(server: Hub) -> None:
    server.files = one(b"<html>")
    with pytest.raises(InputError, match="found HTML or XML"):
        hub.read_repository(hub.HubId("org/name"), endpoint=server.url)


def test_index_may_not_lead_elsewhere(server: Hub) -> None:
    server.files = one(CONFIG)
    index = json.dumps({"weight_map": {"a": "../../other/x/main/model.safetensors"}}).encode()
    server.files["org/name/model.safetensors.index.json"] = index
    with pytest.raises(InputError, match="no plain name"):
        hub.read_repository(hub.HubId("org/name"), endpoint=server.url)


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(HubError, match="connection to the hub failed"):
        hub.read_repository(hub.HubId("org/name"), endpoint="http://127.0.0.1:9")


def test_download_and_cache(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    server.files["org/name/config.json"] = CONFIG
    server.files["org/name/notes.txt"] = b"x"
    seen: list[tuple[int, int]] = []
    folder = hub.download(
        hub.HubId("org/name"),
        patterns=("*.json",),
        endpoint=server.url,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (folder / "config.json").read_bytes() == CONFIG
    assert not (folder / "notes.txt").exists()
    assert seen[-1] == (1, 1)
    assert hub.cached_snapshot(hub.HubId("org/name")) == folder
    assert hub.cached_snapshot(hub.HubId("org/other")) is None


@pytest.mark.parametrize("offline", [False, True])
def test_environment(server: Hub, tmp_path: Path, offline: bool) -> None:
    """HF_ENDPOINT and HF_HUB_OFFLINE are read when a process starts."""
    server.files["org/name/config.json"] = CONFIG
    code = (
        "from llamatool.checkpoint import hub\n"
        "from llamatool.errors import HubError\n"
        "try: print(hub.read_repository(hub.HubId('org/name')).config['hidden_size'])\n"
        "except HubError as error: print(error)"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1" if offline else "0",
    }
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert ("this machine is offline" in result.stdout) if offline else result.stdout == "8\n"
