"""`llamatool tokens`: how many tokens a text is, with which tokenizer, and what follows from it."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import typer

from llamatool.cli.options import JsonOption
from llamatool.cli.progress import progress
from llamatool.errors import InputError, MissingError, ResourceError, UsageError, one_line

if TYPE_CHECKING:
    from llamatool.config.model import Note
    from llamatool.tokenizers.base import Tokenizer
    from llamatool.tokenizers.compare import Column, CorpusReport, Model, TextReport
    from llamatool.tokenizers.corpus import CorpusText
    from llamatool.tokenizers.export import Target
    from llamatool.tokenizers.find import Places
    from llamatool.tokenizers.texts import TextFacts

Specials = list[str] | Literal["all"]

_DEFAULT = "llama3"  # of --count, whose answer is one number
_WORTH_A_BAR = 4 * 2**20  # bytes of a file
_SPEC_HELP = (
    "tokenizer.model, tokenizer.json, .gguf, a model's folder, a hub id, or llama2, llama3, "
    "llama4, pocket."
)


def tokens(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT...]",
            help="Files, words, or - for standard input. If the first is `verify` or "
            "`convert`, see below.",
            show_default=False,
        ),
    ] = None,
    tokenizers: Annotated[
        list[str] | None,
        typer.Option("--tokenizer", "-t", metavar="SPEC", help=_SPEC_HELP, show_default=False),
    ] = None,
    configs: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            metavar="SOURCE",
            help="A model (any SOURCE): context, KV cache, and whether the tokenizer is its own.",
            show_default=False,
        ),
    ] = None,
    corpus: Annotated[
        str,
        typer.Option(
            "--corpus",
            metavar="builtin|DIR",
            help="Without TEXT: the texts to compare languages with; DIR has one .txt or .html "
            "file for each language.",
        ),
    ] = "builtin",
    lang: Annotated[
        str | None,
        typer.Option(
            "--lang",
            metavar="CODES",
            help="Of the corpus, only these: en,vi,ja.",
            show_default=False,
        ),
    ] = None,
    reference: Annotated[
        str, typer.Option("--reference", metavar="CODE", help="Language that premiums refer to.")
    ] = "en",
    count: Annotated[
        bool, typer.Option("--count", help="Print one number (with llama3, if -t is not said).")
    ] = False,
    per_line: Annotated[
        bool, typer.Option("--per-line", help="Count every line as a text of its own.")
    ] = False,
    show_tokens: Annotated[
        bool, typer.Option("--show", help="Print the text with its token borders.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print the ids.")] = False,
    specials: Annotated[
        str,
        typer.Option(
            "--special",
            metavar="none|all|NAMES",
            help="Control tokens that the text may hold, as in <|eot_id|>,<|image|>.",
        ),
    ] = "none",
    bos: Annotated[
        bool, typer.Option("--bos/--no-bos", help="Count the token at the beginning of a prompt.")
    ] = False,
    nfc: Annotated[
        bool, typer.Option("--nfc", help="Compose the text first (Unicode NFC).")
    ] = False,
    text_files: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="For verify: a text.", show_default=False),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="json|tiktoken|spm", help="For convert.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="Write bars as SVG.", show_default=False),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Count the tokens of texts, exactly, and compare tokenizers and languages.

    Text is plain text: no string in it becomes a control token unless --special says so, and no
    BOS is counted unless --bos says so. Without TEXT the built-in corpus shows what each language
    costs. Without -t the tokenizers of Llama 2, 3 and 4 that are on this machine are used
    (LLAMATOOL_TOKENIZERS names folders to search); one that is not found is estimated, marked
    with a sign, and kept apart.

    `tokens verify A B [--text FILE]` compares two tokenizers; exit code 1 if ids differ.
    `tokens convert FILE FOLDER --to json|tiktoken|spm` rewrites one, checked.

    Examples:

      llamatool tokens report.txt -t ./Llama-3.1-8B --config llama-3.1-8b

      llamatool tokens

      llamatool tokens --count report.txt

      llamatool tokens "Hello, world" --show -t llama3 -t llama4

      llamatool tokens verify ./a/tokenizer.json ./b/tokenizer.model --text report.txt
    """
    chosen = list(tokenizers or [])
    if texts and texts[0] == "verify" and len(texts) > 1:
        _verify(texts[1:] + chosen, text_files or [], as_json=as_json)
        return
    if texts and texts[0] == "convert" and len(texts) > 1:
        _convert(texts[1:], to, as_json=as_json)
        return
    if to is not None or text_files:
        raise UsageError("--to is for `tokens convert`, --text for `tokens verify`")
    if sum((as_json, as_csv, count, show_tokens, ids)) > 1:
        raise UsageError("--json, --csv, --count, --show and --ids exclude each other")
    wanted = _specials(specials)
    if count:
        _print_count(texts or ["-"], chosen or [_DEFAULT], wanted, bos=bos, nfc=nfc)
        return
    if show_tokens or ids:
        _print_tokens(texts or ["-"], chosen or [_DEFAULT], wanted, bos=bos, nfc=nfc, ids=ids)
        return
    if not texts:
        _corpus(chosen, corpus, lang, reference, plot, as_csv=as_csv, as_json=as_json)
        return
    _texts(
        texts,
        chosen,
        configs or [],
        wanted,
        plot,
        bos=bos,
        nfc=nfc,
        per_line=per_line,
        as_csv=as_csv,
        as_json=as_json,
    )


def _print_count(
    texts: Sequence[str], specs: Sequence[str], specials: Specials, *, bos: bool, nfc: bool
) -> None:
    if len(specs) > 1:
        raise UsageError("--count prints one number, so it takes one -t")
    tokenizer = _tokenizer(specs[0])
    total = 0
    for name in texts:
        with _open(name, briefly=True) as (pieces, facts):
            pieces = _composed(pieces, nfc)
            if specials:
                total += len(tokenizer.encode("".join(pieces), specials=specials))
            else:
                total += tokenizer.count(pieces)
            total += bos and tokenizer.bos_id is not None
        _warn(name, facts.notes())
    sys.stdout.write(f"{total}\n")


def _print_tokens(
    texts: Sequence[str],
    specs: Sequence[str],
    specials: Specials,
    *,
    bos: bool,
    nfc: bool,
    ids: bool,
) -> None:
    from llamatool.render.tokens import show_ids, show_tokens

    loaded = [_tokenizer(spec) for spec in specs]
    for name in texts:
        with _open(name) as (pieces, facts):
            text = "".join(_composed(pieces, nfc))
        _warn(name, facts.notes())
        for tokenizer in loaded:
            found = tokenizer.encode(text, specials=specials)
            if bos and tokenizer.bos_id is not None:
                found.insert(0, tokenizer.bos_id)
            if ids:
                show_ids(found)
            else:
                named = tokenizer.identity.label if len(loaded) * len(texts) > 1 else None
                show_tokens(_pieces_of(tokenizer, found), title=named)


def _pieces_of(tokenizer: "Tokenizer", ids: Sequence[int]) -> list[tuple[bytes, str | None]]:
    """(bytes, name of a control token) of each id."""
    names = tokenizer.names_by_id
    return [(tokenizer.token_bytes(i), names.get(i)) for i in ids]


def _texts(
    texts: Sequence[str],
    specs: Sequence[str],
    configs: Sequence[str],
    specials: Specials,
    plot: Path | None,
    *,
    bos: bool,
    nfc: bool,
    per_line: bool,
    as_csv: bool,
    as_json: bool,
) -> None:
    from llamatool.render import tokens as render
    from llamatool.render.blocks import show, show_json
    from llamatool.tokenizers.compare import measure
    from llamatool.tokenizers.estimate import Estimator

    loaded, estimated = _resolved(specs)
    models = _models(specs, configs)
    reports: list[TextReport] = []
    for name in texts:
        if per_line:
            reports += _line_reports(name, loaded, estimated, specials, bos=bos, nfc=nfc)
            continue
        with _open(name) as (pieces, facts):
            report = measure(
                _short(name),
                _composed(pieces, nfc),
                loaded,
                facts,
                estimators=[Estimator(kind) for kind in estimated],
                specials=specials,
                with_bos=bos,
            )
        reports.append(_with_models(report, loaded, models))
    notes = [*_tokenizer_notes(loaded), *_pairing_notes(loaded, models)]
    if plot is not None:
        _write(plot, render.text_bars(reports))
    if as_json:
        show_json(render.texts_json(reports, notes))
    elif as_csv:
        sys.stdout.write(render.texts_csv(reports))
    else:
        show(render.text_blocks(reports, per_line=per_line))
    for report in reports:
        _say(report.name, report.notes)
    _say(None, notes)


def _line_reports(
    name: str,
    loaded: "Sequence[Tokenizer]",
    estimated: Sequence[str],
    specials: Specials,
    *,
    bos: bool,
    nfc: bool,
) -> "Iterator[TextReport]":
    from llamatool.tokenizers.compare import measure
    from llamatool.tokenizers.estimate import Estimator
    from llamatool.tokenizers.texts import TextFacts, pieces

    with _open(name, briefly=True) as (parts, facts):
        for number, line in enumerate(_lines(_composed(parts, nfc)), 1):
            own = TextFacts()
            yield measure(
                f"{_short(name)}:{number}",
                pieces([line], own),
                loaded,
                own,
                estimators=[Estimator(kind) for kind in estimated],
                specials=specials,
                with_bos=bos,
            )
    _warn(name, facts.notes())


def _lines(pieces: Iterable[str]) -> Iterator[str]:
    """The lines of a text without their line ends."""
    rest = ""
    for piece in pieces:
        *complete, rest = (rest + piece).split("\n")
        yield from (line.removesuffix("\r") for line in complete)
    if rest:
        yield rest


def _with_models(
    report: "TextReport", loaded: "Sequence[Tokenizer]", models: "Sequence[Model]"
) -> "TextReport":
    """The report with its warnings, and with what the text takes of each tokenizer's models."""
    from llamatool.tokenizers.compare import context_use, control_note, nfc_note

    results = list(report.results)
    for i, tokenizer in enumerate(loaded):
        uses = tuple(
            context_use(
                model, results[i].num_tokens, report.num_characters, add_bos=tokenizer.add_bos
            )
            for model in _paired(tokenizer, loaded, models)
        )
        results[i] = replace(results[i], uses=uses)
    report = replace(report, results=tuple(results))
    notes = (*report.notes, *filter(None, (nfc_note(report), control_note(report))))
    return replace(report, notes=notes)


def _paired(
    tokenizer: "Tokenizer", loaded: "Sequence[Tokenizer]", models: "Sequence[Model]"
) -> "list[Model]":
    """The models of a tokenizer: those of its vocabulary size, and those that fit none."""
    sizes = {t.vocab_size for t in loaded}
    return [m for m in models if m.vocab_size == tokenizer.vocab_size or m.vocab_size not in sizes]


def _corpus(
    specs: Sequence[str],
    corpus: str,
    lang: str | None,
    reference: str,
    plot: Path | None,
    *,
    as_csv: bool,
    as_json: bool,
) -> None:
    from llamatool.render import tokens as render
    from llamatool.render.blocks import show, show_json
    from llamatool.tokenizers.compare import estimated_column, exact_column, measure_corpus

    texts = _corpus_texts(corpus, lang, reference)
    loaded, estimated = _resolved(specs)
    exact: list[Column] = [exact_column(tokenizer) for tokenizer in loaded]
    groups = [exact, [estimated_column(name) for name in estimated]]
    reports: list[CorpusReport] = [
        measure_corpus(corpus, texts, group, reference=reference) for group in groups if group
    ]
    if plot is not None:
        _write(plot, render.corpus_bars(reports[0]))
    if as_json:
        show_json(render.corpus_json(reports))
    elif as_csv:
        sys.stdout.write(render.corpus_csv(reports))
    else:
        show(render.corpus_blocks(reports))
    _say(None, _tokenizer_notes(loaded))


def _corpus_texts(corpus: str, lang: str | None, reference: str) -> "tuple[CorpusText, ...]":
    from llamatool.tokenizers.corpus import builtin, from_folder

    codes = [code.strip() for code in lang.split(",") if code.strip()] if lang else []
    if codes and reference not in codes:
        codes.insert(0, reference)
    if corpus != "builtin":
        return from_folder(Path(corpus), codes)
    texts = {text.code: text for text in builtin()}
    unknown = [code for code in codes if code not in texts]
    if unknown:
        raise UsageError(
            f"the built-in corpus has no `{unknown[0]}`", hint=f"it has {', '.join(texts)}"
        )
    return tuple(texts[code] for code in codes) if codes else builtin()


def _verify(specs: Sequence[str], files: Sequence[Path], *, as_json: bool) -> None:
    from llamatool.render import tokens as render
    from llamatool.render.blocks import show, show_json
    from llamatool.tokenizers.corpus import builtin
    from llamatool.tokenizers.verify import HARD_STRINGS, compare_ids

    if len(specs) != 2:
        raise UsageError("`tokens verify` compares two tokenizers", hint="tokens verify A B")
    left, right = (_tokenizer(spec) for spec in specs)
    texts = [("a hard string", text) for text in HARD_STRINGS]
    texts += [(f"built-in {text.code}", text.text) for text in builtin()]
    for file in files:
        with _open(str(file), must_be_file=True) as (pieces, facts):
            texts.append((file.name, "".join(pieces)))
        _warn(str(file), facts.notes())
    verdict = compare_ids(left, right, texts)
    if as_json:
        show_json(render.verdict_json(verdict))
    else:
        show(render.verdict_blocks(verdict))
    if not verdict.same:
        raise typer.Exit(1)


def _convert(arguments: Sequence[str], to: str | None, *, as_json: bool) -> None:
    from llamatool.render import tokens as render
    from llamatool.render.blocks import show, show_json
    from llamatool.tokenizers.export import TARGETS, export

    target: Target | None = next((t for t in TARGETS if t == to), None)
    if target is None or len(arguments) != 2:
        raise UsageError(
            "`tokens convert` needs a tokenizer, a folder and a form",
            hint="tokens convert tokenizer.model FOLDER --to " + "|".join(TARGETS),
        )
    converted = export(_tokenizer(arguments[0]), target)
    folder = Path(arguments[1])
    taken = [name for name in converted.files if (folder / name).exists()]
    if taken:
        raise UsageError(f"`{taken[0]}` exists already", where=str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"cannot write: {error.strerror}", where=str(folder)) from None
    for name, content in converted.files.items():
        _write(folder / name, content)
    if as_json:
        show_json(render.files_json(str(folder), converted))
    else:
        show(render.files_blocks(str(folder), converted))


def _resolved(specs: Sequence[str]) -> "tuple[list[Tokenizer], list[str]]":
    """The tokenizers asked for; without any, those of this machine and the names to estimate."""
    if specs:
        return [_tokenizer(spec) for spec in specs], []
    from llamatool.tokenizers.find import GENERATIONS, find

    places = _places()
    found, estimated = [], []
    for name in GENERATIONS.values():
        tokenizer = find(name, places)
        if tokenizer is None:
            estimated.append(name)
        else:
            found.append(tokenizer)
    pocket = _pocket()
    return [*found, *([pocket] if pocket else [])], estimated


def _tokenizer(spec: str) -> "Tokenizer":
    """The tokenizer that `spec` names: a path, a generation, `pocket`, or a hub id."""
    from llamatool.tokenizers.find import GENERATIONS, find

    path = Path(spec)
    if path.exists():
        return _load(path)
    if spec == "pocket" and (pocket := _pocket()) is not None:
        return pocket
    if name := GENERATIONS.get(spec.lower().replace("-", "")):
        found = find(name, _places())
        if found is None:
            raise MissingError(f"no tokenizer of {spec} on this machine", hint=_how_to_get(name))
        return found
    return _load(_hub_folder(spec))


def _load(path: Path) -> "Tokenizer":
    from llamatool.tokenizers.load import load

    return load(path, read_gguf=_gguf_metadata)


def _gguf_metadata(path: Path) -> Mapping[str, object]:
    from llamatool.checkpoint.gguf import GgufArray, read_file

    return {
        key: value.read() if isinstance(value, GgufArray) else value
        for key, value in read_file(path).metadata.items()
        if key.startswith("tokenizer.")
    }


def _hub_folder(spec: str) -> Path:
    from llamatool.checkpoint.hub import download, parse_id

    hub_id = parse_id(spec)
    if hub_id is None:
        raise UsageError(
            f"`{spec}` is no tokenizer",
            hint="a file, a folder, a hub id, or llama2, llama3, llama4",
        )
    patterns = ("tokenizer*", "original/tokenizer.model", "special_tokens_map.json", "config.json")
    with progress("Fetching the tokenizer", unit="files") as update:
        return download(hub_id, patterns=patterns, progress=update)


def _places() -> "Places":
    from llamatool.tokenizers.find import Places

    named = os.environ.get("LLAMATOOL_TOKENIZERS", "")
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folders = tuple(Path(part) for part in named.split(os.pathsep) if part)
    for folder in folders:
        if not folder.exists():
            sys.stderr.write(
                f"warning: LLAMATOOL_TOKENIZERS names `{folder}`, which is not there\n"
            )
    return Places(folders, cache if cache.is_dir() else None)


def _pocket() -> "Tokenizer | None":
    """The tokenizer of the embedded model."""
    file = _pocket_folder() / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = _load(file)
    tokenizer.identity = replace(tokenizer.identity, title="pocket")
    return tokenizer


def _pocket_folder() -> Path:
    import llamatool

    return Path(llamatool.__file__).parent / "pocket" / "pocket"


def _how_to_get(name: str) -> str:
    if name == "llama-2":
        return "give -t a folder or GGUF of any Llama 2 model, or name it in LLAMATOOL_TOKENIZERS"
    return "pip install --no-deps llama-models, or name a folder in LLAMATOOL_TOKENIZERS"


def _models(specs: Sequence[str], configs: Sequence[str]) -> "list[Model]":
    """The models of --config, and of every -t that is a folder with a config.json."""
    sources = [*configs, *(spec for spec in specs if (Path(spec) / "config.json").is_file())]
    return [_model(source) for source in dict.fromkeys(sources)]


def _model(source: str) -> "Model":
    from llamatool.config.layers import plan_layers
    from llamatool.sizing.kv_cache import kv_cache
    from llamatool.source import load_source
    from llamatool.tokenizers.compare import Model

    config, identity = load_source(source, stdin=sys.stdin.buffer).need_config()
    return Model(
        name=identity.model or source,
        context=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        kv_bytes=kv_cache(plan_layers(config)).num_bytes,
    )


def _tokenizer_notes(loaded: "Sequence[Tokenizer]") -> "list[Note]":
    from llamatool.config.model import Note

    return [
        Note(note.code, f"{tokenizer.identity.source}: {note.message}")
        for tokenizer in loaded
        for note in tokenizer.identity.notes
    ]


def _pairing_notes(loaded: "Sequence[Tokenizer]", models: "Sequence[Model]") -> "list[Note]":
    from llamatool.tokenizers.compare import model_notes

    return [
        note
        for tokenizer in loaded
        for model in _paired(tokenizer, loaded, models)
        for note in model_notes(tokenizer, model)
    ]


@contextmanager
def _open(
    name: str, *, briefly: bool = False, must_be_file: bool = False
) -> "Iterator[tuple[Iterator[str], TextFacts]]":
    """The text that an argument names, in pieces, and the facts that fill while it is read."""
    from llamatool.tokenizers.texts import TextFacts, decoded, pieces

    facts = TextFacts()
    if name == "-":
        yield decoded(sys.stdin.buffer, facts, briefly=briefly), facts
        return
    path = Path(name)
    if not must_be_file and not _is_path(name, path):
        yield pieces([name], facts), facts
        return
    try:
        with path.open("rb") as file, _bar(path) as update:
            yield decoded(_Told(file, update), facts, briefly=briefly), facts
    except IsADirectoryError:
        raise InputError(
            "this is a folder, not a text", where=name, hint="name the files, or use --corpus"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read the text: {error.strerror}", where=name) from None


def _is_path(name: str, path: Path) -> bool:
    """Whether an argument means a file. A word that looks like a file name must be one."""
    try:
        if path.exists():
            return True
    except OSError:  # a text too long for a name
        return False
    except ValueError:  # a NUL character
        return False
    if re.fullmatch(r"\S*[/\\]\S*|\S+\.(?:txt|md|json|jsonl|csv|py|html|tex|rst|log)", name):
        raise InputError("no such file", where=name, hint="a text goes in by standard input: -")
    return False


@contextmanager
def _bar(path: Path) -> "Iterator[Callable[[int], None]]":
    size = path.stat().st_size
    with progress(f"Counting {path.name}", unit="bytes", quiet=size < _WORTH_A_BAR) as update:
        yield lambda done: update(done, size)


class _Told:
    """A binary stream that tells how far it has been read."""

    def __init__(self, file: BinaryIO, update: Callable[[int], None]) -> None:
        self._file, self._update, self._done = file, update, 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._done += len(data)
        self._update(self._done)
        return data


def _composed(pieces: Iterator[str], nfc: bool) -> Iterator[str]:
    if not nfc:
        return pieces
    from llamatool.tokenizers.texts import composed

    return composed(pieces)


def _specials(text: str) -> Specials:
    if text == "none":
        return []
    return "all" if text == "all" else [name for name in text.split(",") if name]


def _short(name: str) -> str:
    """The name of a text in tables: a file's name, or the beginning of the words themselves."""
    if name == "-":
        return "standard input"
    try:
        if Path(name).exists():
            return Path(name).name
    except (OSError, ValueError):
        pass
    return f'"{name[:24]}..."' if len(name) > 28 else f'"{name}"'


def _warn(name: str, notes: "Iterable[Note]") -> None:
    _say(_short(name), notes)


def _say(where: str | None, notes: "Iterable[Note]") -> None:
    where = f"{one_line(where)}: " if where else ""
    for note in notes:
        sys.stderr.write(f"warning: {where}{one_line(note.message)}\n")


def _write(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all."""
    data = content.encode() if isinstance(content, str) else content
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    except OSError as error:
        raise ResourceError(f"cannot write the file: {error.strerror}", where=str(path)) from None
