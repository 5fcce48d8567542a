"""Checkpoints on the Hugging Face hub: configuration and headers by range requests, downloads.

The only module that imports huggingface_hub, and only inside functions. Every failure becomes a
HubError that says what to do; progress is told to a callback.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llamatool.checkpoint import files, safetensors
from llamatool.checkpoint.tensors import TensorTable
from llamatool.errors import HubError, InputError
from llamatool.records import record

if TYPE_CHECKING:
    from huggingface_hub.utils.tqdm import tqdm

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?:@[\w./-]{1,200})?", re.ASCII)
_FIRST_BYTES = 100_000  # holds the whole header of most files
_MAX_CONFIG_BYTES = 1_000_000
_TIMEOUT = 20.0  # seconds
_NUM_THREADS = 8
_CONFIGS: tuple[tuple[str, Literal["huggingface", "meta"]], ...] = (
    ("config.json", "huggingface"),
    ("params.json", "meta"),
    ("original/params.json", "meta"),
)

Progress = Callable[[int, int], None]  # done, total


@record
class HubId:
    """A repository of the hub, at a revision if one is named."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


@record
class HubRepository:
    """What the hub tells about a checkpoint without its weights being downloaded."""

    id: HubId
    config: dict[str, Any]  # the raw object of config.json or params.json
    config_format: Literal["huggingface", "meta"]
    config_name: str
    table: TensorTable | None  # None: the repository has no safetensors files


def parse_id(text: str) -> HubId | None:
    """The repository that `org/name` or `org/name@revision` names, or None for other text."""
    if not _ID.fullmatch(text) or ".." in text or "--" in text:
        return None
    repository, _, revision = text.partition("@")
    return HubId(repository, revision or None)


def read_repository(
    hub_id: HubId, *, endpoint: str | None = None, progress: Progress | None = None
) -> HubRepository:
    """Configuration and tensor table of `hub_id`, by requests for these bytes only.

    Args: endpoint: of the hub; HF_ENDPOINT decides where None. progress: told shards done and
    shards in all.
    Raises: HubError if the repository is gated, private or absent, a file is missing or the
    network fails; InputError if what the hub sends is damaged.
    """
    remote = _Remote(hub_id, endpoint)
    with _explained(hub_id):
        name, config_format, config = _config(remote)
        table = _table(remote, progress)
    return HubRepository(hub_id, config, config_format, name, table)


def cached_snapshot(hub_id: HubId) -> Path | None:
    """The folder of `hub_id` in the local hub cache, if its configuration is there."""
    from huggingface_hub import try_to_load_from_cache

    for name, _ in _CONFIGS:
        found = try_to_load_from_cache(hub_id.repository, name, revision=hub_id.revision)
        if isinstance(found, str):
            return Path(found).parents[name.count("/")]
    return None


def download(
    hub_id: HubId,
    *,
    patterns: tuple[str, ...] | None = None,
    endpoint: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder in the hub cache that holds the files of `hub_id`, fetched where they lack.

    Args: patterns: of the file names wanted, such as `*.safetensors`; None: all.
    progress: told files done and files in all.
    Raises: HubError.
    """
    from huggingface_hub import snapshot_download

    with _explained(hub_id):
        return Path(
            snapshot_download(
                hub_id.repository,
                revision=hub_id.revision,
                allow_patterns=list(patterns) if patterns else None,
                endpoint=endpoint,
                tqdm_class=_silent_bar(progress),
            )
        )


class _MissingError(Exception):
    """The repository has no such file."""


@record
class _Remote:
    hub_id: HubId
    endpoint: str | None

    def start(self, name: str, num_bytes: int) -> tuple[bytes, int]:
        """The first bytes of a file, at most `num_bytes`, and its size."""
        return self._range(name, 0, num_bytes)

    def whole(self, name: str, limit: int) -> bytes:
        data, size = self._range(name, 0, limit)
        if size > limit:
            raise HubError(f"`{name}` has {size:,} bytes", where=str(self.hub_id))
        return data

    def part(self, name: str, start: int, end: int) -> bytes:
        data, _ = self._range(name, start, end)
        if len(data) != end - start:
            raise HubError(f"the hub sent a short answer for `{name}`", where=str(self.hub_id))
        return data

    def _range(self, name: str, start: int, end: int) -> tuple[bytes, int]:
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
        )

        url = hf_hub_url(
            self.hub_id.repository,
            name,
            revision=self.hub_id.revision,
            endpoint=self.endpoint,
        )
        headers = build_hf_headers(library_name="llamatool")
        headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT) as response:
            try:
                hf_raise_for_status(response)
            except EntryNotFoundError as error:
                raise _MissingError(name) from error
            data = bytearray()
            for piece in response.iter_bytes():
                data += piece
                if len(data) >= end - start:  # a server that ignores ranges sends everything
                    break
            size = _file_size(response.headers, response.status_code)
        if response.status_code != 206 and start:
            raise HubError("the hub does not answer range requests", where=url)
        return bytes(data[: end - start]), len(data) if size is None else size


def _file_size(headers: Any, status: int) -> int | None:
    text = (
        headers.get("content-range", "").rpartition("/")[2]
        if status == 206
        else headers.get("content-length", "")
    )
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _config(remote: _Remote) -> tuple[str, Literal["huggingface", "meta"], dict[str, Any]]:
    for name, config_format in _CONFIGS:
        try:
            data = remote.whole(name, _MAX_CONFIG_BYTES)
        except _MissingError:
            continue
        where = f"{remote.hub_id}/{name}"
        return name, config_format, files.parse_json(data, where=where, what="a configuration")
    raise HubError(
        "the repository has neither config.json nor params.json",
        where=str(remote.hub_id),
        hint="a repository of a whole model is expected, not of an adapter or of GGUF files",
    )


def _table(remote: _Remote, progress: Progress | None) -> TensorTable | None:
    try:
        data = remote.whole(safetensors.INDEX_NAME, files.MAX_JSON_BYTES)
    except _MissingError:
        return _single(remote, progress)
    where = Path(f"{remote.hub_id}/{safetensors.INDEX_NAME}")
    content = files.parse_json(data, where=str(where), what="a shard index")
    index = safetensors.parse_index(content, where)
    tables = _headers(remote, index.file_names, progress)
    return safetensors.join_shards(index, tables)


def _single(remote: _Remote, progress: Progress | None) -> TensorTable | None:
    try:
        return _headers(remote, ("model.safetensors",), progress)[0]
    except _MissingError:
        return None


def _headers(
    remote: _Remote, names: tuple[str, ...], progress: Progress | None
) -> list[TensorTable]:
    from concurrent.futures import ThreadPoolExecutor

    tables = []
    with ThreadPoolExecutor(min(_NUM_THREADS, len(names))) as pool:
        for table in pool.map(lambda name: _header(remote, name), names):
            tables.append(table)
            if progress is not None:
                progress(len(tables), len(names))
    return tables


def _header(remote: _Remote, name: str) -> TensorTable:
    start, size = remote.start(name, _FIRST_BYTES)
    where = f"{remote.hub_id}/{name}"
    if len(start) < 8:
        raise HubError(f"`{name}` has only {len(start)} bytes", where=str(remote.hub_id))
    length = safetensors.header_length(start, size, where=where)
    data = start[8 : 8 + length]
    if len(data) < length:
        data += remote.part(name, len(start), 8 + length)
    return safetensors.parse_header(data, Path(where), size)


@contextmanager
def _explained(hub_id: HubId) -> Iterator[None]:
    """Turns what huggingface_hub and its HTTP client raise into a HubError."""
    from huggingface_hub import errors

    where = str(hub_id)
    client_error: Any = errors.HfHubHTTPError.__bases__[0]  # of requests or httpx
    try:
        yield
    except _MissingError as error:
        raise HubError(f"the repository has no `{error}`", where=where) from None
    except errors.GatedRepoError:
        raise HubError(
            "access to the repository is gated",
            where=where,
            hint=f"accept its terms at huggingface.co/{hub_id.repository} and log in with"
            " `hf auth login`",
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError("the repository has no such revision", where=where) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            "no such local path, and the hub knows no such repository",
            where=where,
            hint="check the spelling; a private repository needs `hf auth login`",
        ) from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError):
        raise HubError(
            "no such local path, and the hub cannot be asked: this machine is offline",
            where=where,
            hint="unset HF_HUB_OFFLINE, or give the path of a downloaded folder",
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        raise HubError(f"the hub answered {status}", where=where, hint="try again later") from None
    except (InputError, HubError):
        raise
    except (client_error, OSError) as error:
        name = type(error).__name__
        raise HubError(
            f"no such local path, and the connection to the hub failed ({name})",
            where=where,
            hint="check the network, or give the path of a downloaded folder",
        ) from None


def _silent_bar(progress: Progress | None) -> "type[tqdm]":
    """A progress bar for huggingface_hub that prints nothing and tells `progress`."""
    import io

    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            quiet = kwargs | {"file": io.StringIO(), "disable": False}
            super().__init__(*args, **quiet)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            result: bool | None = super().update(n)
            if progress is not None and self.unit != "B" and self.total:
                progress(int(self.n), int(self.total))
            return result

    return Bar
