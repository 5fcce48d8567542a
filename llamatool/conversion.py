"""A whole conversion: a checkpoint of any layout into a folder of Meta's or Hugging Face's.

`prepare` checks everything and gives a plan without writing a byte; `run` carries it out. This
module puts together what the rooms below offer: sources, the engine, configuration files and
tokenizers.
"""

import copy
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llamatool import __version__, dtypes
from llamatool.checkpoint import safetensors
from llamatool.checkpoint.convert import CHUNK_BYTES
from llamatool.checkpoint.folder import RECORD, Progress, VerifyMode, Written
from llamatool.checkpoint.layout import Checkpoint, Resolved, resolve
from llamatool.checkpoint.plan import TensorPlan
from llamatool.checkpoint.tensors import TensorInfo
from llamatool.config.catalog import CatalogEntry
from llamatool.config.generation import Identity
from llamatool.config.model import ModelConfig, Note
from llamatool.errors import CheckpointError, InputError, UnsupportedError, UsageError
from llamatool.source import LoadedSource

if TYPE_CHECKING:
    from llamatool.checkpoint.rawio import Sources
    from llamatool.checkpoint.verify import Comparison
    from llamatool.tokenizers.base import Tokenizer
    from llamatool.tokenizers.export import TokenizerFiles

To = Literal["hf", "meta"]

SHARD_BYTES = 5_000_000_000  # the limit of transformers 4
MAX_MEMORY_BYTES = 256 << 20
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
INDEX = safetensors.INDEX_NAME
# Files that go along unchanged from one Hugging Face folder to another, or out of Meta's.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json", "added_tokens.json"),
)
_HF_FILES = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
_LEGAL = ("LICENSE", "LICENSE.txt", "USE_POLICY.md", "NOTICE")


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What the user chose."""

    to: To | None = None  # None: the other layout
    num_shards: int | None = None  # of Meta's layout; None: as published, or as the source has
    shard_bytes: int = SHARD_BYTES
    dtype: str | None = None  # bf16, fp16 or fp32; None: as stored
    variant: Literal["base", "instruct"] | None = None
    model: str | None = None
    tokenizer: Path | None = None
    with_tokenizer: bool = True
    original_style: bool = False  # params.json with vocab_size -1
    keep_replicated_kv: bool = False
    strict_replicas: bool = False
    verify: VerifyMode = "hash"
    verify_input: bool = False
    resume: bool = False
    overwrite: bool = False
    num_threads: int = 2
    max_memory_bytes: int = MAX_MEMORY_BYTES


@dataclass(frozen=True, slots=True)
class Conversion:
    """A checked plan: what goes where, and what is written beside the tensors."""

    source: str
    target: To
    source_layout: str
    config: ModelConfig
    identity: Identity
    instruct: bool
    plan: TensorPlan
    small_files: Mapping[str, bytes]
    notes: tuple[Note, ...]
    lost: tuple[str, ...]  # sentences about what the output does not hold

    @property
    def dtype(self) -> str:
        """Type of most elements written."""
        return _main_dtype(self.plan)

    @property
    def num_bytes(self) -> int:
        """Bytes that the output takes on the disk."""
        files = sum(layout.num_bytes for layout in self.plan.files)
        return files + sum(len(content) for content in self.small_files.values())


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What has been done."""

    conversion: Conversion
    destination: Path
    written: Written
    verify: VerifyMode
    seconds: float


def prepare(loaded: LoadedSource, options: ConvertOptions) -> Conversion:
    """The plan of a conversion, with every check done and nothing written.

    Raises: UnsupportedError for what cannot be converted, CheckpointError for a damaged or
    incomplete source, UsageError for options that do not fit.
    """
    config, identity = loaded.need_config()
    checkpoint = _checkpoint(loaded, config)
    notes = list(loaded.notes)
    if options.verify_input:
        _check_input(checkpoint)
    if options.model is not None:
        checkpoint = _as_model(checkpoint, options.model)
    checkpoint = _merged_heads(checkpoint, options, notes)
    resolved = _tied_as_stored(resolve(checkpoint), notes)
    lost = _lost(resolved, options)
    target = _target(resolved, options)
    plan = _plan(resolved, options, target, identity)
    instruct = _is_instruct(identity, loaded, options, notes)
    shaped = resolved.checkpoint.config
    small = _small_files(loaded, resolved, plan, options, target, identity, instruct, notes)
    if target == "meta":
        _check_tiles(resolved)
        lost += _lost_in_metas_code(shaped)
    return Conversion(
        loaded.source,
        target,
        checkpoint.layout,
        shaped,
        identity,
        instruct,
        plan,
        small,
        (*notes, *plan.notes),
        tuple(lost),
    )


def check_destination(source: LoadedSource, destination: Path, options: ConvertOptions) -> None:
    """Raises UsageError if the output may not be written there.

    It must not be the source or lie inside it, and a folder that holds anything is only used on
    request; what was not written by an earlier conversion is never removed.
    """
    from llamatool.checkpoint.journal import FOLDER

    home = _home(source).resolve()
    place = destination.resolve()
    whole_folder = source.located.path is not None and source.located.path.is_dir()
    if place == home or (whole_folder and home in place.parents):
        raise UsageError(
            "the output would lie inside the source",
            where=str(destination),
            hint="choose a folder outside of it",
        )
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise UsageError("the output is to be a folder", where=str(destination))
    names = {path.name for path in destination.iterdir()} if destination.exists() else set()
    if names - {FOLDER} and not (options.overwrite or (options.resume and FOLDER in names)):
        raise UsageError(
            "the folder is not empty",
            where=str(destination),
            hint="name a new one, or replace an earlier conversion with --overwrite",
        )
    if options.overwrite and not options.resume:
        _check_overwrite(destination, names)


def _check_overwrite(destination: Path, names: set[str]) -> None:
    """Refuses to mix new weights with weights that another program wrote."""
    ours = set(_earlier_files(destination))
    weights = {
        name
        for name in names
        if name.endswith((".safetensors", ".bin", ".pth", ".gguf", ".index.json"))
    }
    if weights - ours:
        raise UsageError(
            f"`{min(weights - ours)}` was not written by llamatool and would be mixed with the"
            " new files",
            where=str(destination),
            hint="name a new folder, or move that file away",
        )


def _earlier_files(destination: Path) -> list[str]:
    """Names of the files that an earlier conversion wrote there and nobody changed in size."""
    path = destination / RECORD
    if not path.is_file() or path.stat().st_size > 50_000_000:
        return []
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return []
    files = record.get("files") if isinstance(record, dict) else None
    found = []
    for entry in files if isinstance(files, list) else []:
        name = entry.get("name") if isinstance(entry, dict) else None
        # The name comes from a file that anybody may have written.
        if not isinstance(name, str) or Path(name).name != name:
            continue
        file = destination / name
        if file.is_file() and file.stat().st_size == entry.get("bytes"):
            found.append(name)
    return found


# ---- the source ----


def _home(loaded: LoadedSource) -> Path:
    path = loaded.located.path
    if path is None:
        raise UsageError(
            f"`{loaded.source}` has no weights here to convert",
            hint="name a folder, a .safetensors or a .gguf file",
        )
    return path if path.is_dir() else path.parent


def _checkpoint(loaded: LoadedSource, config: ModelConfig) -> Checkpoint:
    home = _home(loaded)
    if not loaded.tables:
        raise CheckpointError(
            "the folder holds a configuration, but no weights",
            where=str(home),
            hint="fetch the weights, or name the folder that holds them",
        )
    if loaded.kind == "gguf":
        from llamatool.checkpoint import gguf

        assert loaded.located.path is not None
        file = gguf.read_file(loaded.located.path)
        if file.num_parts > 1:
            raise UnsupportedError(
                f"the model was split into {file.num_parts} GGUF files",
                where=str(file.path),
                hint="join them with `llama-gguf-split --merge`",
            )
        return Checkpoint("gguf", home, config, (file.table,), file.byte_order)
    layout: Literal["meta", "huggingface"] = (
        "meta" if loaded.kind == "meta_folder" else "huggingface"
    )
    return Checkpoint(layout, home, config, loaded.tables)


def _check_input(checkpoint: Checkpoint) -> None:
    """Compares the files with the MD5 sums of Meta's checklist.chk, where it has them."""
    import hashlib

    path = checkpoint.path / "checklist.chk"
    if not path.is_file():
        raise CheckpointError("there is no checklist.chk to verify the input with", where=str(path))
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        digest, _, name = line.strip().partition(" ")
        file = checkpoint.path / name.strip().lstrip("*")
        if len(digest) != 32 or "/" in name.strip() or not file.is_file():
            continue  # lines of other files, edited or cut ones
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "md5").hexdigest() != digest.lower():
                raise CheckpointError(
                    "the file is not the one in checklist.chk",
                    where=str(file),
                    hint="fetch it again",
                )


def _as_model(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """The checkpoint taken as a published model, whose file then settles what Meta's leaves out."""
    entry = _entry(name)
    config, published = checkpoint.config, entry.config
    fields = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("intermediate_size", "vocab_size", "head_dim"),
    )
    differing = [
        f"{field} ({getattr(config, field)}, not {getattr(published, field)})"
        for field in fields
        if getattr(config, field) != getattr(published, field)
    ]
    if differing:
        raise UsageError(f"this is not {entry.name}: {', '.join(differing)}")
    changes = replace(
        config,
        rope=published.rope,
        tie_word_embeddings=published.tie_word_embeddings,
        max_position_embeddings=published.max_position_embeddings,
    )
    return replace(checkpoint, config=changes)


def _entry(name: str) -> CatalogEntry:
    from llamatool.config import catalog

    entry = catalog.find(name)
    if entry is None:
        raise UsageError(f"no model is called `{name}`", hint="`llamatool models` lists them")
    return entry


def _merged_heads(checkpoint: Checkpoint, options: ConvertOptions, notes: list[Note]) -> Checkpoint:
    """The checkpoint with key/value heads counted once that several ranks hold alike.

    Meta's 405B for 16 GPUs stores each of its 8 heads twice and says `n_kv_heads` 16.
    """
    config, heads = checkpoint.config, checkpoint.config.num_key_value_heads
    applies = checkpoint.layout == "meta" and heads == checkpoint.num_shards
    if options.keep_replicated_kv or not applies or config.model_type.startswith("llama4"):
        return checkpoint
    repeat = _repeated_heads(checkpoint)
    if repeat == 1:
        return checkpoint
    notes.append(
        Note(
            "kv-heads-merged",
            f"the {heads} key/value heads are {heads // repeat}, each stored {repeat} times; they"
            " are merged (--keep-replicated-kv keeps them)",
        )
    )
    return replace(checkpoint, config=replace(config, num_key_value_heads=heads // repeat))


def _repeated_heads(checkpoint: Checkpoint) -> int:
    """How many ranks in a row hold the same key/value head, in every layer."""
    from llamatool.checkpoint.rawio import Sources

    heads, config = checkpoint.num_shards, checkpoint.config
    candidates = [n for n in range(heads, 1, -1) if heads % n == 0]
    num_layers = config.num_hidden_layers - len(config.cross_attention_layers)
    prefix = "text_model." if config.vision is not None else ""
    with Sources() as sources:
        for layer in range(num_layers):
            for matrix in ("wk", "wv"):
                name = f"{prefix}layers.{layer}.attention.{matrix}.weight"
                stored = [table.tensors.get(name) for table in checkpoint.tables]
                while candidates and not _alike(stored, candidates[0], sources):
                    candidates.pop(0)
                if not candidates:
                    return 1
    return candidates[0] if candidates else 1


def _alike(stored: Sequence[TensorInfo | None], repeat: int, sources: "Sources") -> bool:
    """Whether each `repeat` ranks in a row hold the same tensor."""
    from llamatool.checkpoint.verify import same_values

    for rank in range(1, len(stored)):
        one, other = stored[rank - 1], stored[rank]
        if rank % repeat == 0:
            continue
        if one is None or other is None or one.shape != other.shape:
            return False
        if not same_values(sources, one, other):
            return False
    return True


def _tied_as_stored(resolved: Resolved, notes: list[Note]) -> Resolved:
    """The source with its tie settled by the tables themselves, as far as both are stored.

    Meta's layout has no key for it and stores both tables; there the bytes decide.
    """
    from llamatool.checkpoint.verify import same_tensor

    checkpoint = resolved.checkpoint
    config = checkpoint.config
    output = next((n for n in (*resolved.holdings, *resolved.repeats) if "lm_head" in n), None)
    if output is None or (checkpoint.layout != "meta" and not config.tie_word_embeddings):
        return resolved
    if config.embedding_rows != config.vocab_size:
        return resolved  # the image models' input table has more rows: it cannot be tied
    source = output.replace("lm_head", "model.embed_tokens")
    equal = same_tensor(resolved, output, source)
    if equal == config.tie_word_embeddings:
        return resolved
    if checkpoint.layout == "huggingface":
        raise CheckpointError(
            "config.json says `tie_word_embeddings`, but `lm_head.weight` is stored and differs",
            where=str(checkpoint.path),
            hint="correct the one that is wrong",
        )
    if equal:
        text = "the output table is a copy of the input table: the model is tied"
    else:
        text = "the output table differs from the input table: the model is not tied"
    notes.append(Note("tie-by-bytes", text))
    return resolve(replace(checkpoint, config=replace(config, tie_word_embeddings=equal)))


def _lost(resolved: Resolved, options: ConvertOptions) -> list[str]:
    """What of the source will not be in the output."""
    from llamatool.checkpoint.verify import replica_differences

    reasons: dict[str, list[str]] = {}
    for name, reason in resolved.dropped:
        reasons.setdefault(reason, []).append(name)
    lost = [f"{_names(found)}: {reason}" for reason, found in sorted(reasons.items())]
    differences = replica_differences(resolved)
    if differences:
        largest = max(difference.max_difference for difference in differences)
        sentence = (
            f"{_names([d.name for d in differences])}: the shards disagree (by {largest:.3g} at"
            " most); the first shard's values are taken"
        )
        if options.strict_replicas:
            raise CheckpointError(sentence.split(";")[0], where=str(resolved.checkpoint.path))
        lost.append(sentence)
    return lost


def _names(found: list[str]) -> str:
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"`{found[0]}`{more}"


def _check_tiles(resolved: Resolved) -> None:
    from llamatool.checkpoint.verify import unequal_tile_copies

    if resolved.checkpoint.layout == "meta":
        return
    name = unequal_tile_copies(resolved)
    if name is not None:
        raise UnsupportedError(
            f"`{name}` has a value per tile for several aspect ratios, and they disagree",
            where=str(resolved.checkpoint.path),
            hint="Meta's layout has one place per tile; a model tuned in this way stays as it is",
        )


def _lost_in_metas_code(config: ModelConfig) -> list[str]:
    lost = []
    if config.rope.type == "llama3" and config.rope.factor == 32.0:
        lost.append(
            "the RoPE factor 32: params.json cannot say it, and Meta's own code then takes 8"
        )
    if config.vision is not None and config.vision.kind == "mllama":
        lost.append(
            "tile positions that no aspect ratio uses: Hugging Face's layout has none; zeros are"
            " written"
        )
    return lost


# ---- the output ----


def _target(resolved: Resolved, options: ConvertOptions) -> To:
    layout = resolved.checkpoint.layout
    target = options.to or ("meta" if layout == "huggingface" else "hf")
    if target == "hf" and options.num_shards is not None:
        raise UsageError("--mp is for Meta's layout", hint="--shard-size sets the size of files")
    return target


def _plan(
    resolved: Resolved, options: ConvertOptions, target: To, identity: Identity
) -> TensorPlan:
    from llamatool.checkpoint import plan

    dtype = dtypes.by_name(DTYPES[options.dtype]) if options.dtype is not None else None
    if target == "hf":
        return plan.plan_huggingface(resolved, dtype=dtype, shard_bytes=options.shard_bytes)
    num_shards = options.num_shards
    if num_shards is None and resolved.checkpoint.layout == "meta":
        num_shards = resolved.checkpoint.num_shards
    if num_shards is None and identity.entry is not None:
        num_shards = identity.entry.meta_shards
    return plan.plan_meta(resolved, dtype=dtype, num_shards=num_shards or 1)


def _is_instruct(
    identity: Identity, loaded: LoadedSource, options: ConvertOptions, notes: list[Note]
) -> bool:
    """Whether the model is one for conversations, which params.json does not say."""
    if options.variant is not None:
        return options.variant == "instruct"
    if identity.variant is not None and loaded.kind != "meta_folder":
        return identity.variant == "instruct"
    if loaded.kind == "gguf":
        return _chat_template(loaded, identity, instruct=False) is not None
    name = _home(loaded).resolve().name.lower()
    instruct = "instruct" in name or "chat" in name
    if loaded.kind == "meta_folder":
        notes.append(
            Note(
                "variant-guessed",
                f"taken as {'an instruct' if instruct else 'a base'} model by the folder's name;"
                " --instruct or --base says which",
            )
        )
    return instruct


def _small_files(
    loaded: LoadedSource,
    resolved: Resolved,
    plan: TensorPlan,
    options: ConvertOptions,
    target: To,
    identity: Identity,
    instruct: bool,
    notes: list[Note],
) -> dict[str, bytes]:
    from llamatool.config import write

    home, config = _home(loaded), resolved.checkpoint.config
    layout = resolved.checkpoint.layout
    found = {name: (home / name).read_bytes() for name in _LEGAL if (home / name).is_file()}
    if target == "meta":
        found["params.json"] = _json(_params(loaded, config, plan, options))
    elif layout == "huggingface":
        found |= {n: (home / n).read_bytes() for n in _HF_FILES if (home / n).is_file()}
        found["config.json"] = _json(_with_dtype(loaded, _main_dtype(plan)))
    else:
        config = _completed(config, identity, notes)
        dtype = _main_dtype(plan)
        found["config.json"] = _json(write.config_json(config, dtype=dtype, instruct=instruct))
        meta_model = identity.family == "llama" or layout == "meta"
        sampling = meta_model and (instruct or not config.model_type.startswith("llama4"))
        generation = write.generation_json(config, instruct=instruct, sampling=sampling)
        found["generation_config.json"] = _json(generation)
        if config.vision is not None:
            found |= _processor_files(config)
    if target == "hf" and len(plan.files) > 1:
        found[INDEX] = _json(_index(plan))
    if options.with_tokenizer:
        found |= _tokenizer_files(loaded, config, options, target, identity, instruct, notes)
    return found


def _params(
    loaded: LoadedSource, config: ModelConfig, plan: TensorPlan, options: ConvertOptions
) -> dict[str, Any]:
    """params.json: the source's own where there is one, else written anew."""
    from llamatool.config import write

    num_shards = len(plan.files)
    heads = config.num_key_value_heads
    if loaded.kind == "meta_folder" and loaded.located.config is not None:
        params: dict[str, Any] = copy.deepcopy(dict(loaded.located.config))
        inner = params.get("model")
        block = inner if isinstance(inner, dict) else params
        if block.get("n_kv_heads") not in (None, max(heads, num_shards)):
            block["n_kv_heads"] = max(heads, num_shards)
        return params
    params = write.params_json(config, original_style=options.original_style)
    # With more ranks than heads each rank's code expects one head of its own.
    return params | {"n_kv_heads": max(heads, num_shards)}


def _with_dtype(loaded: LoadedSource, dtype: str) -> dict[str, Any]:
    """The source's config.json, with the type of the weights that are written."""
    assert loaded.located.config is not None
    content = copy.deepcopy(dict(loaded.located.config))
    for block in (content, content.get("text_config"), content.get("vision_config")):
        for key in ("torch_dtype", "dtype"):
            if isinstance(block, dict) and key in block:
                block[key] = dtype
    return content


def _completed(config: ModelConfig, identity: Identity, notes: list[Note]) -> ModelConfig:
    """The configuration with a context length, which params.json does not say."""
    if config.max_position_embeddings is not None:
        return config
    if config.rope.type == "llama3":
        length = 131072
    elif config.rope.theta == 500000.0:
        length = 8192
    elif config.rope.theta > 10000.0:
        length = 16384
    else:
        length = 2048 if config.rms_norm_eps < 1e-5 else 4096
    notes.append(
        Note(
            "context-derived",
            f"max_position_embeddings {length} follows from the RoPE settings; params.json does"
            " not say it",
        )
    )
    return replace(config, max_position_embeddings=length)


def _processor_files(config: ModelConfig) -> dict[str, bytes]:
    """preprocessor_config.json of the image models.

    Source: preprocessor_config.json of Llama-3.2-11B-Vision and Llama-4-Scout-17B-16E.
    """
    assert config.vision is not None
    size = {"height": config.vision.image_size, "width": config.vision.image_size}
    common = {"do_normalize": True, "do_rescale": True, "do_resize": True, "size": size}
    if config.vision.kind == "mllama":
        content = common | {
            "do_convert_rgb": True,
            "do_pad": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_processor_type": "MllamaImageProcessor",
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "max_image_tiles": config.vision.max_num_tiles,
            "resample": 2,
            "rescale_factor": 1 / 255,
        }
        return {"preprocessor_config.json": _json(content)}
    content = common | {
        "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Llama4ImageProcessorFast",
        "image_std": [0.5, 0.5, 0.5],
        "max_patches": config.vision.max_num_tiles,
        "processor_class": "Llama4Processor",
        "resample": 2,
        "rescale_factor": 1 / 255,
        "resize_to_max_canvas": False,
    }
    return {"preprocessor_config.json": _json(content)}


def _index(plan: TensorPlan) -> dict[str, Any]:
    weight_map = {t.name: layout.name for layout in plan.files for t in layout.targets}
    return {"metadata": {"total_size": plan.num_bytes}, "weight_map": weight_map}


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=2, sort_keys=True).encode() + b"\n"


def _main_dtype(plan: TensorPlan) -> str:
    sizes: dict[str, int] = {}
    for layout in plan.files:
        for target in layout.targets:
            sizes[target.dtype.name] = sizes.get(target.dtype.name, 0) + target.num_bytes
    return max(sizes, key=lambda name: sizes[name])


# ---- tokenizers ----


def _tokenizer_files(
    loaded: LoadedSource,
    config: ModelConfig,
    options: ConvertOptions,
    target: To,
    identity: Identity,
    instruct: bool,
    notes: list[Note],
) -> dict[str, bytes]:
    """The tokenizer in the form of the target's layout, with the same ids."""
    home = _home(loaded)
    copied = {
        name: (home / name).read_bytes() for name in _TOKENIZER_FILES if (home / name).is_file()
    }
    if target == "hf" and options.tokenizer is None and "tokenizer.json" in copied:
        return copied
    path = options.tokenizer or _tokenizer_path(loaded, target)
    from llamatool.checkpoint import gguf
    from llamatool.tokenizers import load

    tokenizer = load.load(path, read_gguf=gguf.read_metadata)
    _check_vocabulary(tokenizer.vocab_size, config, str(path), notes)
    if target == "meta":
        if tokenizer.identity.kind in ("tiktoken", "sentencepiece") and path.is_file():
            return {"tokenizer.model": path.read_bytes()}
        exported = _exported(tokenizer, _meta_form(tokenizer))
        notes += exported.notes
        return dict(exported.files)
    exported = _exported(tokenizer, "json", eos=_end_of_turn(tokenizer) if instruct else None)
    notes += exported.notes
    found = dict(exported.files)
    content = json.loads(found["tokenizer_config.json"])
    template = _chat_template(loaded, identity, instruct)
    if template is not None:
        content["chat_template"] = template
    found["tokenizer_config.json"] = _json(content)
    special = {key: content[key] for key in ("bos_token", "eos_token") if content.get(key)}
    found["special_tokens_map.json"] = _json(special)
    if tokenizer.identity.kind == "sentencepiece" and path.is_file():
        found["tokenizer.model"] = path.read_bytes()
    return found


def _end_of_turn(tokenizer: "Tokenizer") -> str | None:
    """The token that ends an answer, where it is not the one that ends a text."""
    known = (name for name in ("<|eot_id|>", "<|eot|>") if name in tokenizer.special_ids)
    return next(known, None)


def _exported(
    tokenizer: "Tokenizer", form: Literal["json", "tiktoken", "spm"], *, eos: str | None = None
) -> "TokenizerFiles":
    from llamatool.tokenizers.export import export

    try:
        return export(tokenizer, form, eos=eos)
    except InputError as error:
        error.hint = error.hint or "leave the tokenizer out with --no-tokenizer"
        raise


def _meta_form(tokenizer: "Tokenizer") -> Literal["tiktoken", "spm"]:
    """The kind of tokenizer.model that can hold this vocabulary."""
    from llamatool.tokenizers.huggingface import HuggingFaceTokenizer, is_byte_level
    from llamatool.tokenizers.tiktoken import TiktokenTokenizer

    if isinstance(tokenizer, HuggingFaceTokenizer):
        return "tiktoken" if is_byte_level(tokenizer.content) else "spm"
    return "tiktoken" if isinstance(tokenizer, TiktokenTokenizer) else "spm"


def _chat_template(loaded: LoadedSource, identity: Identity, instruct: bool) -> str | None:
    from llamatool.checkpoint.templates import chat_template

    if loaded.kind == "gguf":
        from llamatool.checkpoint import gguf

        assert loaded.located.path is not None
        own = gguf.read_file(loaded.located.path).metadata.get("tokenizer.chat_template")
        return own if isinstance(own, str) else None
    if not instruct or loaded.config is None:
        return None
    # A model of its own with Meta's vocabulary is taken to be tuned on that format.
    by_vocabulary = {128256: "3", 202048: "4"}.get(loaded.config.vocab_size)
    return chat_template(identity.generation or by_vocabulary, identity.model)


def _tokenizer_path(loaded: LoadedSource, target: To) -> Path:
    home = _home(loaded)
    if loaded.kind == "gguf":
        assert loaded.located.path is not None
        return loaded.located.path
    names = ("tokenizer.model", "original/tokenizer.model", "tokenizer.json")
    for name in names:
        if (home / name).is_file():
            return home / name
    if (home.parent / "tokenizer.model").is_file() and loaded.kind == "meta_folder":
        return home.parent / "tokenizer.model"  # Meta's first downloads keep it one folder up
    raise CheckpointError(
        "there is no tokenizer with the weights",
        where=str(home),
        hint="name one with --tokenizer, or leave it out with --no-tokenizer",
    )


def _check_vocabulary(size: int, config: ModelConfig, where: str, notes: list[Note]) -> None:
    rows = config.embedding_rows
    if size > rows:
        raise CheckpointError(
            f"the tokenizer has {size} tokens, the input table only {rows} rows",
            where=where,
            hint="it belongs to another model",
        )
    if size < config.vocab_size:
        notes.append(
            Note(
                "rows-without-token",
                f"the input table has {config.vocab_size} rows, the tokenizer {size} tokens; all"
                " rows are kept",
            )
        )


# ---- carrying it out ----


def run(
    conversion: Conversion,
    destination: Path,
    options: ConvertOptions,
    *,
    progress: Progress | None = None,
) -> ConversionReport:
    """Writes the output and verifies it; only then do the files get their names.

    Raises: ResourceError if there is no room or permission; KeyboardInterrupt, after which
    `resume` goes on where it stopped.
    """
    from llamatool.checkpoint.folder import WriteOptions, write_folder

    started = time.monotonic()
    written = write_folder(
        conversion.plan,
        conversion.small_files,
        _record(conversion, options),
        destination,
        WriteOptions(
            verify=options.verify,
            resume=options.resume,
            num_threads=options.num_threads,
            chunk_bytes=_chunk_bytes(conversion.plan, options),
            replaced=tuple(_earlier_files(destination)) if options.overwrite else (),
        ),
        progress=progress,
    )
    return ConversionReport(
        conversion, destination, written, options.verify, time.monotonic() - started
    )


def _chunk_bytes(plan: TensorPlan, options: ConvertOptions) -> int:
    """Bytes of one task: more for a large model, so that there are not too many tasks."""
    # A worker holds up to four buffers of this size; half of the memory is left for the rest.
    share = options.max_memory_bytes // (8 * max(1, options.num_threads))
    wanted = min(4 * CHUNK_BYTES, max(CHUNK_BYTES, plan.num_bytes // 100_000))
    return max(1 << 16, min(wanted, share))


def _record(conversion: Conversion, options: ConvertOptions) -> dict[str, Any]:
    """What conversion.json says, but for the digests of the output."""
    checkpoint = conversion.plan.resolved.checkpoint
    paths = sorted({path for table in checkpoint.tables for path in table.files})
    return {
        "schema": 1,
        "llamatool": __version__,
        "from": conversion.source_layout,
        "to": conversion.target,
        "model": conversion.identity.model,
        "dtype": conversion.dtype,
        "cast": options.dtype,
        "source_files": [{"name": p.name, "bytes": p.stat().st_size} for p in paths],
        "verify": options.verify,
        "lost": list(conversion.lost),
        "dropped": [{"name": n, "reason": r} for n, r in conversion.plan.resolved.dropped],
        "notes": [{"code": note.code, "message": note.message} for note in conversion.notes],
    }


# ---- comparing ----


def compare_sources(
    first: LoadedSource,
    second: LoadedSource,
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> "Comparison":
    """Two checkpoints of any layouts, tensor by tensor in Hugging Face's names.

    Raises: CheckpointError or UnsupportedError if one of them is not a whole checkpoint.
    """
    from llamatool.checkpoint.verify import compare

    resolved = []
    for loaded in (first, second):
        config, _ = loaded.need_config()
        found = _merged_heads(_checkpoint(loaded, config), ConvertOptions(), [])
        resolved.append(_tied_as_stored(resolve(found), []))
    return compare(resolved[0], resolved[1], progress)


def load_weights(source: str) -> LoadedSource:
    """The checkpoint that `source` names, with its headers; a hub repository is fetched first.

    Raises: LlamatoolError of the kind that fits.
    """
    from llamatool.checkpoint import hub
    from llamatool.source import load_source

    loaded = load_source(source, with_tensors=True)
    if loaded.kind != "hub" or loaded.located.hub_id is None:
        return loaded
    folder = hub.download(loaded.located.hub_id)
    return load_source(str(folder), with_tensors=True)
