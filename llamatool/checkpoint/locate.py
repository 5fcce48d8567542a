"""What a SOURCE argument is, found out by looking at its content and never at its name.

Every command takes the same kinds of sources. This module opens no tensor data, asks no network
and imports nothing heavy; `read_tensors` then gives the tables of what was found.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from llamatool.checkpoint import files
from llamatool.checkpoint.tensors import TensorTable
from llamatool.config.meta import is_meta
from llamatool.errors import CheckpointError, InputError, UnsupportedError, UsageError
from llamatool.records import record

if TYPE_CHECKING:
    from llamatool.checkpoint.hub import HubId

Kind = Literal[
    "hf_config",
    "meta_params",
    "hf_folder",
    "meta_folder",
    "safetensors",
    "index",
    "gguf",
    "catalog",
    "hub",
    "stdin",
]
ConfigFormat = Literal["huggingface", "meta"]

EXPECTED = (
    "expected a config.json, a params.json, a folder with one of them, a .safetensors file,"
    " a shard index or a .gguf file"
)
_FIRST_BYTES = 512
_SUFFIXES = (".json", ".safetensors", ".gguf", ".pth", ".bin", ".pt")


@record
class Source:
    """A recognised source and the configuration found with it.

    `config` is the raw object of a config.json or params.json: the file itself, the one in the
    folder, or the one beside a safetensors file or index. None where there is none, and for gguf,
    catalog and hub, whose configuration comes from elsewhere.
    """

    source: str  # as the user gave it
    kind: Kind
    path: Path | None = None  # the file, or the folder that holds configuration and tensors
    config: Mapping[str, Any] | None = None
    config_format: ConfigFormat | None = None
    config_path: Path | None = None
    catalog_name: str | None = None  # the id of the entry
    hub_id: "HubId | None" = None

    @property
    def where(self) -> str:
        """The place to name in errors about the configuration."""
        if self.kind == "stdin":
            return "standard input"
        return str(self.config_path or self.path or self.source)


def locate(source: str, *, stdin: BinaryIO | None = None) -> Source:
    """What `source` is: a path, `-` for a configuration on `stdin`, a model's name or a hub id.

    A path that exists is never taken for a name. Names of the built-in catalogue come before
    hub ids.
    Raises: CheckpointError or another InputError for a path that is not understood, saying what
    was found and what was expected; UsageError for text that names nothing.
    """
    if source == "-":
        return _standard_input(stdin)
    path = Path(source)
    mode = _mode(path) if source else None
    if mode is None:
        return _name(source, path)
    if stat.S_ISDIR(mode):
        return _folder(source, path)
    if stat.S_ISFIFO(mode) and _is_own_pipe(path):
        with path.open("rb") as stream:
            return _standard_input(stream, source)
    return _file(source, path)


def read_tensors(source: Source) -> tuple[TensorTable, ...]:
    """The tensor tables of a located source, from the headers; () where it has no tensors.

    A Meta folder gives one table per rank, everything else at most one. A hub source is not asked
    here: `hub.read_repository` gives its table together with its configuration.
    Raises: CheckpointError if a file is damaged or the files do not belong together.
    """
    if source.path is None:
        return ()
    if source.kind == "gguf":
        from llamatool.checkpoint import gguf

        return (gguf.read_file(source.path).table,)
    if source.kind == "meta_folder":
        from llamatool.checkpoint import pth

        return tuple(pth.read_file(path) for path in pth.shard_paths(source.path))
    if source.kind in ("hf_folder", "safetensors", "index"):
        from llamatool.checkpoint import safetensors

        if source.kind == "safetensors":
            return (safetensors.read_file(source.path),)
        if source.kind == "index":
            return (safetensors.read_indexed(safetensors.read_index(source.path)),)
        table = safetensors.read_folder(source.path)
        return (table,) if table else ()
    return ()


def classify_config(values: Mapping[str, Any], *, where: str) -> ConfigFormat:
    """Whether the object is a config.json or a params.json.

    Raises: InputError if it is neither, saying what it looks like.
    """
    if is_meta(values):
        return "meta"
    if "model_type" in values or "hidden_size" in values or "text_config" in values:
        return "huggingface"
    what, hint = _other_json(values)
    raise InputError(f"{EXPECTED}, found {what}", where=where, hint=hint)


def _is_own_pipe(path: Path) -> bool:
    """Whether a pipe is one that the shell made for us: `<(command)` or /dev/stdin.

    Any other may have nobody at its other end, and would be waited for without end.
    """
    return path.is_absolute() and path.parts[1] in ("dev", "proc")


def _standard_input(stdin: BinaryIO | None, source: str = "-") -> Source:
    if stdin is None:
        raise UsageError("`-` reads a configuration from standard input, which is closed")
    where = "standard input" if source == "-" else source
    data = stdin.read(files.MAX_JSON_BYTES + 1)
    values = files.parse_json(data, where=where, what="a config.json or params.json")
    if isinstance(values.get("weight_map"), dict):
        raise InputError(
            "a shard index in a pipe: its shards cannot be found from there",
            where=where,
            hint="give the path of the index",
        )
    config_format = classify_config(values, where=where)
    return Source(source, "stdin", None, values, config_format)


def _mode(path: Path) -> int | None:
    """The mode of what `path` leads to; None if there is nothing of that name."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise files.unreadable(path, FileNotFoundError(2, "")) from None
        return None
    except NotADirectoryError:
        return None
    except OSError as error:
        raise files.unreadable(path, error) from None
    except ValueError:  # a NUL in the name
        return None


def _name(source: str, path: Path) -> Source:
    if "://" in source:
        raise UsageError(
            f"`{source[:200]}` is an address, not a model of the hub",
            hint="write org/name, or pipe it: curl -sL ADDRESS | llamatool inspect -",
        )
    looks_like_path = (
        source.startswith((".", "/", "~")) or path.is_absolute() or source.endswith(_SUFFIXES)
    )
    if not looks_like_path and source.strip():
        from llamatool.config import catalog

        entry = catalog.find(source)
        if entry is not None:
            return Source(source, "catalog", catalog_name=entry.id)
        from llamatool.checkpoint import hub

        hub_id = hub.parse_id(source)
        if hub_id is not None:
            return Source(source, "hub", hub_id=hub_id)
    if looks_like_path or "/" in source or os.sep in source:
        raise CheckpointError("no such file or folder", where=source, hint=EXPECTED)
    raise CheckpointError(
        f"`{source}` is no file or folder, and no model of the catalogue",
        hint=_near_names(source),
    )


def _near_names(source: str) -> str:
    from llamatool.config import catalog

    near = catalog.suggest(source)
    if near:
        return f"did you mean {' or '.join(f'`{name}`' for name in near)}?"
    return "`llamatool models` lists the names; a model of the hub is written org/name"


def _folder(source: str, path: Path) -> Source:
    try:
        names = {entry.name for entry in os.scandir(path)}
    except OSError as error:
        raise files.unreadable(path, error) from None
    for home, name in (
        (path, "config.json"),
        (path, "params.json"),
        (path / "original", "params.json"),
    ):
        config_path = home / name
        if not config_path.exists():
            continue
        values = files.read_json(config_path, f"a {name}")
        config_format = classify_config(values, where=str(config_path))
        kind: Kind = "hf_folder" if config_format == "huggingface" else "meta_folder"
        return Source(source, kind, home, values, config_format, config_path)
    return _bare_folder(source, path, names)


def _bare_folder(source: str, path: Path, names: set[str]) -> Source:
    """A folder without configuration: its one checkpoint, if there is one."""
    if "adapter_config.json" in names:
        raise UnsupportedError(
            "the folder holds an adapter (LoRA), not a model",
            where=str(path),
            hint="merge it into its base model first",
        )
    indexes = sorted(name for name in names if name.endswith(".index.json"))
    if len(indexes) == 1:
        return _file(source, path / indexes[0])
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if len(weights) == 1:
        return _file(source, path / weights[0])
    if weights:
        return Source(source, "hf_folder", path)
    if len(ggufs) == 1:
        return _file(source, path / ggufs[0])
    if ggufs:
        raise CheckpointError(
            f"the folder holds {len(ggufs)} .gguf files",
            where=str(path),
            hint=f"name one of them, such as `{ggufs[0]}`",
        )
    if any(name.endswith((".pth", ".bin")) for name in names):
        raise CheckpointError(
            "the folder holds weights, but neither config.json nor params.json",
            where=str(path),
            hint="fetch the configuration that belongs to the weights",
        )
    found = ", ".join(f"`{name[:40]}`" for name in sorted(names)[:5])
    raise CheckpointError(
        "the folder is empty" if not names else f"no checkpoint in the folder: it holds {found}",
        where=str(path),
        hint=EXPECTED,
    )


def _file(source: str, path: Path) -> Source:
    with files.open_regular(path) as stream:
        size = files.file_size(stream)
        start = files.read_exactly(stream, min(size, _FIRST_BYTES), path)
    if not size:
        raise CheckpointError(f"the file is empty; {EXPECTED}", where=str(path))
    if start[:4] == b"GGUF":
        return Source(source, "gguf", path)
    if _is_safetensors(start):
        return _with_config(source, "safetensors", path)
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in (b"{", b"["):
        return _json(source, path)
    raise _not_understood(start, text, path)


def _is_safetensors(start: bytes) -> bool:
    # The length before the brace is never eight bytes of text: that would be above 2^59.
    return start[8:9] == b"{" and any(byte < 9 or byte > 126 for byte in start[:8])


def _json(source: str, path: Path) -> Source:
    values = files.read_json(path, "a config.json, params.json or shard index")
    if isinstance(values.get("weight_map"), dict):
        return _with_config(source, "index", path)
    config_format = classify_config(values, where=str(path))
    kind: Kind = "hf_config" if config_format == "huggingface" else "meta_params"
    return Source(source, kind, path, values, config_format, path)


def _with_config(source: str, kind: Kind, path: Path) -> Source:
    """The source with the configuration that lies beside it, if there is one."""
    for name in ("config.json", "params.json"):
        config_path = path.parent / name
        if config_path.exists() and not config_path.samefile(path):
            values = files.read_json(config_path, f"a {name}")
            config_format = classify_config(values, where=str(config_path))
            return Source(source, kind, path, values, config_format, config_path)
    return Source(source, kind, path)


def _not_understood(start: bytes, text: bytes, path: Path) -> InputError:
    where = str(path)
    if text.startswith(b"version https://git-lfs"):
        return CheckpointError(
            f"found a git-lfs pointer; {EXPECTED}",
            where=where,
            hint="fetch the real file with `git lfs pull`",
        )
    if text[:1] == b"<":
        return CheckpointError(
            f"found HTML or XML; {EXPECTED}",
            where=where,
            hint="the download saved a web page, perhaps a login page; download the raw file",
        )
    if start[:4] == b"PK\3\4" or start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04"):
        return UnsupportedError(
            "found a file of torch.save, which is one part of a checkpoint",
            where=where,
            hint="name the folder that holds it together with its params.json or config.json",
        )
    if len(start) >= 8 and b"\0" in start[:8]:
        found = "binary data"
    else:
        found = f"text that begins `{text[:40].decode('utf-8', 'replace')}`"
    return CheckpointError(f"found {found}; {EXPECTED}", where=where)


def _other_json(values: Mapping[str, Any]) -> tuple[str, str | None]:
    """What a JSON object that is no configuration looks like, and what to do."""
    if "peft_type" in values:
        return "the settings of an adapter (LoRA)", "merge it into its base model first"
    if "added_tokens" in values or "tokenizer_class" in values:
        return "a tokenizer file", "name the config.json beside it"
    if "eos_token_id" in values or "_from_model_config" in values:
        return "a generation_config.json", "name the config.json beside it"
    keys = ", ".join(f"`{str(key)[:40]}`" for key in list(values)[:5])
    return (f"a JSON object with {keys}" if keys else "an empty JSON object"), None
