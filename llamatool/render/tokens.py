"""The answers of `tokens` as tables, sentences, coloured text, JSON, CSV and bars."""

import csv
import io
import os
import sys
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from llamatool.config.model import Note
from llamatool.render.blocks import Block, Grid, Lines, is_rich
from llamatool.tokenizers.base import Identity
from llamatool.tokenizers.compare import (
    ContextUse,
    CorpusCell,
    CorpusReport,
    CorpusRow,
    Interval,
    Measurement,
    TextReport,
)
from llamatool.tokenizers.export import TokenizerFiles
from llamatool.tokenizers.verify import Difference, Verdict
from llamatool.units import format_bytes

_DASH = "-"
_WORSE = "\u2191"  # arrow up
_ABOUT = "\u2248"  # almost equal
_MOST_LINES = 40  # lines of --per-line that a terminal shows with their names


def text_blocks(reports: Sequence[TextReport], *, per_line: bool = False) -> list[Block]:
    """The answer in a sentence for each text, then the figures."""
    blocks: list[Block] = []
    if not per_line:
        blocks.append(Lines(tuple(headline(report) for report in reports)))
    exact = [(r, m) for r in reports for m in r.results if m.exact]
    estimates = [(r, m) for r in reports for m in r.results if not m.exact]
    if exact:
        blocks.append(_measured(exact, several=len(reports) > 1))
    if estimates:
        blocks.append(_estimated(estimates, several=len(reports) > 1))
    uses = [(r, m, use) for r, m in exact for use in m.uses]
    if uses:
        blocks.append(_models(uses, several=len(reports) > 1))
    identities = [m.identity for m in reports[0].results if m.identity] if reports else []
    if identities:
        blocks.append(_identities(identities))
    return blocks


def headline(report: TextReport) -> str:
    """The answer in one sentence.

    Example: `report.txt: 2,016 tokens with Meta Llama 3 (-15 % vs Meta Llama 2); ...`.
    """
    exact = [result for result in report.results if result.exact]
    if not exact:
        parts = [f"{_ABOUT} {r.num_tokens:,} with {r.tokenizer}" for r in report.results]
        return f"{report.name}: {', '.join(parts)} tokens (estimates, no tokenizer file found)"
    last = next((r for r in reversed(exact) if r.identity and r.identity.name), exact[-1])
    noun = "token" if last.num_tokens == 1 else "tokens"
    answer = f"{report.name}: {last.num_tokens:,} {noun} with {last.tokenizer}"
    if last is not exact[0]:
        answer += f" ({_change(report.ratio_to_first(last))} vs {exact[0].tokenizer})"
    parts = [answer]
    for result in exact:
        parts += [_use_sentence(result, use, result is last) for use in result.uses]
    return "; ".join(parts)


def _use_sentence(result: Measurement, use: ContextUse, is_last: bool) -> str:
    own = "" if is_last else f" (its own {result.num_tokens:,} tokens)"
    words = [f"{use.model}{own}:"]
    if use.share is not None and use.context is not None:
        words.append(f"{_percent(use.share)} of {use.context:,},")
        if use.share > 1:
            words.append("does not fit,")
    if use.characters_that_fit is not None:
        words.append(f"{_about_number(use.characters_that_fit)} characters of such text fit,")
    words.append(f"KV cache {format_bytes(use.kv_bytes)}")
    return " ".join(words)


def _measured(rows: Sequence[tuple[TextReport, Measurement]], *, several: bool) -> Grid:
    with_words = any(report.num_words for report, _ in rows)
    columns = ["tokenizer", "tokens", "chars/token", "bytes/token", "vs first", "fragments"]
    cells = []
    for report, result in rows:
        row = [
            result.tokenizer,
            f"{result.num_tokens:,}",
            _rate(report.characters_per_token(result)),
            _rate(report.bytes_per_token(result)),
            "first" if result is report.results[0] else _change(report.ratio_to_first(result)),
            _percent(result.fragment_share),
        ]
        if with_words:
            words = report.tokens_per_word(result)
            row.append("n/a" if report.num_words is None else _rate(words))
        cells.append((report.name, *row) if several else tuple(row))
    if with_words:
        columns.append("tokens/word")
    return Grid(
        rows=tuple(cells),
        columns=("text", *columns) if several else tuple(columns),
        align=("ll" if several else "l") + "r" * (len(columns) - 1),
    )


def _estimated(rows: Sequence[tuple[TextReport, Measurement]], *, several: bool) -> Grid:
    cells = []
    for report, result in rows:
        error = f"within {_percent(result.error)} on most texts"
        row = (result.tokenizer, f"{_ABOUT} {result.num_tokens:,}", error)
        cells.append((report.name, *row) if several else row)
    return Grid(
        rows=tuple(cells),
        align="llrl" if several else "lrl",
        title="Estimates, since no tokenizer file was found (give one with -t)",
    )


def _models(rows: Sequence[tuple[TextReport, Measurement, ContextUse]], *, several: bool) -> Grid:
    columns = ("model", "tokens", "context", "share", "characters that fit", "KV cache")
    cells = []
    for report, result, use in rows:
        row = (
            use.model,
            f"{result.num_tokens:,}",
            f"{use.context:,}" if use.context else _DASH,
            _percent(use.share),
            _about_number(use.characters_that_fit) if use.characters_that_fit else _DASH,
            format_bytes(use.kv_bytes),
        )
        cells.append((report.name, *row) if several else row)
    return Grid(
        rows=tuple(cells),
        columns=("text", *columns) if several else columns,
        align=("ll" if several else "l") + "rrrrr",
    )


def _identities(identities: Sequence[Identity]) -> Grid:
    rows = []
    for identity in identities:
        engine = "" if identity.engine == identity.kind else f", counted with {identity.engine}"
        rows.append(
            (
                identity.title or "not recognised",
                f"{identity.kind}{engine}",
                f"{identity.vocab_size:,} ids",
                f"sha256 {identity.sha256[:8]}" if identity.sha256 else "",
                _place(identity.source),
            )
        )
    return Grid(rows=tuple(rows), align="llrll", title="Tokenizers")


def _place(source: str) -> str:
    """A path that is long by its last parts."""
    parts = source.rstrip("/").split("/")
    return source if len(source) <= 30 else "/".join(("...", *parts[-2:]))


def texts_json(reports: Sequence[TextReport], notes: Sequence[Note]) -> dict[str, Any]:
    """One object; every count is an integer."""
    return {
        "schema": 1,
        "texts": [_text_object(report) for report in reports],
        "warnings": [_note_object(note) for note in notes],
    }


def _text_object(report: TextReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "characters": report.num_characters,
        "bytes": report.num_bytes,
        "words": report.num_words,
        "nfc": report.nfc,
        "results": [_result_object(report, result) for result in report.results],
        "warnings": [_note_object(note) for note in report.notes],
    }


def _result_object(report: TextReport, result: Measurement) -> dict[str, Any]:
    return {
        **_identity_object(result.tokenizer, result.identity),
        "exact": result.exact,
        "tokens": result.num_tokens,
        "characters_per_token": report.characters_per_token(result),
        "bytes_per_token": report.bytes_per_token(result),
        "tokens_per_word": report.tokens_per_word(result),
        "ratio_to_first": report.ratio_to_first(result),
        "byte_fragment_share": result.fragment_share,
        "nfc_tokens": result.num_nfc_tokens,
        "control_strings": result.num_control_strings,
        "error": result.error,
        "models": [
            {
                "model": use.model,
                "context": use.context,
                "context_share": use.share,
                "characters_that_fit": use.characters_that_fit,
                "kv_bytes": use.kv_bytes,
            }
            for use in result.uses
        ],
    }


def _identity_object(name: str, identity: Identity | None) -> dict[str, Any]:
    return {
        "tokenizer": identity.source if identity else name,
        "recognised": identity.name if identity else None,
        "kind": identity.kind if identity else None,
        "engine": identity.engine if identity else None,
        "sha256": identity.sha256 if identity else None,
    }


def _note_object(note: Note) -> dict[str, str]:
    return {"code": note.code, "message": note.message}


def texts_csv(reports: Sequence[TextReport]) -> str:
    """One row for each text and tokenizer, with a header."""
    rows: list[tuple[object, ...]] = [
        (
            "text", "tokenizer", "exact", "characters", "bytes", "tokens", "characters_per_token",
            "bytes_per_token", "ratio_to_first", "byte_fragment_share",
        )
    ]  # fmt: skip
    for report in reports:
        for result in report.results:
            rows.append(
                (
                    report.name, result.tokenizer, str(result.exact).lower(),
                    report.num_characters, report.num_bytes, result.num_tokens,
                    _number(report.characters_per_token(result)),
                    _number(report.bytes_per_token(result)),
                    _number(report.ratio_to_first(result)), _number(result.fragment_share),
                )
            )  # fmt: skip
    return _csv(rows)


def corpus_blocks(reports: Sequence[CorpusReport]) -> list[Block]:
    """Languages as rows: density, premium with its interval, tokens for each word."""
    blocks: list[Block] = []
    for report in reports:
        exact = report.identities[0] is not None
        if not exact:
            blocks.append(
                Lines(
                    (
                        "No tokenizer file was found for these; the figures are estimates by "
                        "measured rates (give a file with -t).",
                    ),
                    title=f"{_ABOUT} Estimates",
                )
            )
        elif answer := _corpus_headline(report):
            blocks.append(Lines((answer,)))
        blocks.append(_density(report))
        if report.reference is not None:
            blocks.append(_premiums(report))
        if exact:
            blocks.append(_fertility(report))
            blocks.append(_identities([i for i in report.identities if i is not None]))
    return blocks


def _corpus_headline(report: CorpusReport) -> str | None:
    """Which language pays most, with the last tokenizer and with the first."""
    if report.reference is None:
        return None
    reference = next(row.name for row in report.rows if row.code == report.reference)
    known = [i for i, identity in enumerate(report.identities) if identity and identity.name]
    columns = (known[-1], known[0]) if known else (len(report.identities) - 1, 0)
    worst = []
    for column in columns:
        value, name = max(
            (premium.value, row.name)
            for row in report.rows
            if (premium := row.cells[column].premium) is not None
        )
        worst.append(f"{name} needs {value:.1f} times the tokens of {reference}")
    last, first = (report.tokenizers[column] for column in columns)
    answer = f"With {last}, {worst[0]}"
    return f"{answer}; with {first}, {worst[1]}" if last != first else answer


def _density(report: CorpusReport) -> Grid:
    rows = []
    for row in report.rows:
        cells = [row.name, f"{row.num_characters:,}"]
        for cell, worse in zip(row.cells, row.worse, strict=True):
            cells.append(f"{_about(cell)}{cell.num_tokens:,}{_WORSE if worse else ' '}")
            cells.append(_rate(cell.characters_per_token))
        rows.append(tuple(cells))
    heads = [head for name in report.tokenizers for head in (_brief(name), "chars/token")]
    title = "Tokens and characters per token"
    if any(any(row.worse) for row in report.rows):
        title += f" ({_WORSE} more than one column before, with a larger vocabulary)"
    return Grid(tuple(rows), ("text", "characters", *heads), "lr" + "r" * len(heads), title=title)


def _premiums(report: CorpusReport) -> Grid:
    rows = [
        (row.name, *(_premium(cell) for cell in row.cells))
        for row in report.rows
        if any(cell.premium for cell in row.cells) and row.code != report.reference
    ]
    title = f"Premium: tokens of the same content / tokens of `{report.reference}`"
    if any(cell.premium and cell.premium.low for row in report.rows for cell in row.cells):
        title += ", with 95 % intervals over the sentences"
    columns = ("text", *(_brief(name) for name in report.tokenizers))
    return Grid(tuple(rows), columns, "l" + "r" * len(report.tokenizers), title=title)


def _premium(cell: CorpusCell) -> str:
    if cell.premium is None:
        return _DASH
    return f"{_about(cell)}{cell.premium.value:.2f}{_ends(cell.premium)}"


def _ends(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return ""
    return f" ({interval.low:.2f}-{interval.high:.2f})"


def _fertility(report: CorpusReport) -> Grid:
    rows = [
        (row.name, *(_fertile(cell) for cell in row.cells))
        for row in report.rows
        if any(cell.premium for cell in row.cells) or report.reference is None
    ]
    columns = ("text", *(_brief(name) for name in report.tokenizers))
    title = "Tokens per word (n/a: the script puts no spaces between words)"
    return Grid(tuple(rows), columns, "l" + "r" * len(report.tokenizers), title=title)


def _fertile(cell: CorpusCell) -> str:
    return "n/a" if cell.tokens_per_word is None else _rate(cell.tokens_per_word)


def corpus_json(reports: Sequence[CorpusReport]) -> dict[str, Any]:
    """One object: texts, each with its results in the order of the tokenizers."""
    rows: dict[str, dict[str, Any]] = {}
    for report in reports:
        for row in report.rows:
            entry = rows.setdefault(
                row.code,
                {
                    "name": row.code,
                    "language": row.name,
                    "characters": row.num_characters,
                    "bytes": row.num_bytes,
                    "results": [],
                },
            )
            entry["results"] += _row_results(report, row)
    return {
        "schema": 1,
        "corpus": reports[0].corpus,
        "reference": reports[0].reference,
        "texts": list(rows.values()),
    }


def _row_results(report: CorpusReport, row: CorpusRow) -> list[dict[str, Any]]:
    results = []
    columns = zip(report.tokenizers, report.identities, row.cells, row.worse, strict=True)
    for name, identity, cell, worse in columns:
        premium = cell.premium
        results.append(
            {
                **_identity_object(name, identity),
                "exact": cell.exact,
                "tokens": cell.num_tokens,
                "characters_per_token": cell.characters_per_token,
                "tokens_per_word": cell.tokens_per_word,
                "premium": premium.value if premium else None,
                "premium_interval": (
                    [premium.low, premium.high] if premium and premium.low is not None else None
                ),
                "worse_than_previous": worse,
            }
        )
    return results


def corpus_csv(reports: Sequence[CorpusReport]) -> str:
    """One row for each text and tokenizer, with a header."""
    rows: list[tuple[object, ...]] = [
        (
            "text", "language", "tokenizer", "exact", "characters", "bytes", "tokens",
            "characters_per_token", "tokens_per_word", "premium", "premium_low", "premium_high",
        )
    ]  # fmt: skip
    for report in reports:
        for row in report.rows:
            for name, cell in zip(report.tokenizers, row.cells, strict=True):
                premium = cell.premium or Interval(0.0, None, None)
                rows.append(
                    (
                        row.code, row.name, name, str(cell.exact).lower(), row.num_characters,
                        row.num_bytes, cell.num_tokens, _number(cell.characters_per_token),
                        _number(cell.tokens_per_word),
                        _number(premium.value if cell.premium else None),
                        _number(premium.low), _number(premium.high),
                    )
                )  # fmt: skip
    return _csv(rows)


def verdict_blocks(verdict: Verdict) -> list[Block]:
    """Same or not in the first line; then the first difference and its likely cause."""
    what = f"{verdict.num_texts} texts, {verdict.num_characters:,} characters"
    if verdict.first is None:
        first = f"the same ids: {what}, {verdict.num_tokens[0]:,} tokens"
    else:
        first = f"different ids in {verdict.num_different} of {what}"
    blocks: list[Block] = [
        Lines((first,)),
        Grid((("A", verdict.left), ("B", verdict.right)), align="ll"),
    ]
    if verdict.first is not None:
        blocks.append(_difference(verdict.first))
    if verdict.remarks:
        blocks.append(Lines(verdict.remarks, title="Besides"))
    return blocks


def _difference(found: Difference) -> Grid:
    return Grid(
        rows=(
            ("in", f"{found.text}, token {found.index}, character {found.character}"),
            ("A", _tokens(found.left, found.left_tokens)),
            ("B", _tokens(found.right, found.right_tokens)),
            ("cause", found.cause),
        ),
        align="ll",
        title="First difference",
    )


def _tokens(ids: Sequence[int], tokens: Sequence[bytes]) -> str:
    if not ids:
        return "(end of the text)"
    return " ".join(f'{i}:"{_visible(t)}"' for i, t in zip(ids[:6], tokens, strict=False))


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """One object; the first difference is null if there is none."""
    first = verdict.first
    return {
        "schema": 1,
        "same": verdict.same,
        "left": verdict.left,
        "right": verdict.right,
        "texts": verdict.num_texts,
        "characters": verdict.num_characters,
        "tokens": list(verdict.num_tokens),
        "different_texts": verdict.num_different,
        "first_difference": None
        if first is None
        else {
            "text": first.text,
            "token": first.index,
            "character": first.character,
            "left_ids": list(first.left),
            "right_ids": list(first.right),
            "cause": first.cause,
        },
        "remarks": list(verdict.remarks),
    }


def files_blocks(folder: str, converted: TokenizerFiles) -> list[Block]:
    """What was written, and that it was checked."""
    rows = tuple((name, format_bytes(len(content))) for name, content in converted.files.items())
    lines = (f"written to {folder}, with the same ids on the built-in corpus and hard strings",)
    return [Lines((*lines, *(note.message for note in converted.notes))), Grid(rows, align="lr")]


def files_json(folder: str, converted: TokenizerFiles) -> dict[str, Any]:
    """One object with the files and their sizes."""
    return {
        "schema": 1,
        "folder": folder,
        "files": {name: len(content) for name, content in converted.files.items()},
        "warnings": [_note_object(note) for note in converted.notes],
    }


def show_ids(ids: Sequence[int]) -> None:
    """Writes the ids on one line."""
    sys.stdout.write(" ".join(map(str, ids)) + "\n")


def show_tokens(tokens: Sequence[tuple[bytes, str | None]], *, title: str | None = None) -> None:
    """Writes a text with its token borders: coloured on a terminal, with bars in a pipe.

    Bytes that are no character on their own are written in hexadecimal.
    """
    coloured = is_rich(sys.stdout) and not os.environ.get("NO_COLOR")
    if title:
        sys.stdout.write(f"{title}: {len(tokens):,} tokens\n")
    parts = []
    for number, (token, name) in enumerate(tokens):
        text = name if name is not None else _visible(token)
        end = "\n" if text.endswith("\u21b5") else ""
        if coloured:
            parts.append(f"\x1b[{_BACKGROUNDS[number % len(_BACKGROUNDS)]}m{text}\x1b[0m{end}")
        else:
            parts.append(f"{text}\u2502{end}")
    sys.stdout.write("".join(parts).rstrip("\n") + "\n")


# Black on light backgrounds that differ in brightness as well as in hue.
_BACKGROUNDS = ("30;48;5;153", "30;48;5;223", "30;48;5;157", "30;48;5;218", "30;48;5;229")


def _visible(token: bytes) -> str:
    """A token as one can read it: line ends as an arrow, what is no text as hexadecimal."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return "<" + token.hex(" ").upper() + ">"
    text = text.replace("\n", "\u21b5").replace("\t", "\u2192").replace("\r", "\u240d")
    return "".join(c if c.isprintable() else f"<{c.encode().hex(' ').upper()}>" for c in text)


class Bar(NamedTuple):
    """One bar: its value, and the ends of its interval where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


def corpus_bars(report: CorpusReport) -> str:
    """Premiums (or, without a reference, tokens) by language, as SVG."""
    if report.reference is None:
        rows = [(row.name, [Bar(cell.num_tokens) for cell in row.cells]) for row in report.rows]
        return bars_svg("Tokens", report.tokenizers, rows)
    rows = [
        (row.name, [Bar(*_triple(cell.premium)) for cell in row.cells])
        for row in report.rows
        if all(cell.premium for cell in row.cells)
    ]
    reference = next(row.name for row in report.rows if row.code == report.reference)
    title = f"Tokens of the same content, relative to {reference}"
    if report.identities[0] is None:
        title += " (estimates)"
    return bars_svg(title, report.tokenizers, rows, mark=1.0)


def _triple(interval: Interval | None) -> tuple[float, float | None, float | None]:
    assert interval is not None
    return interval.value, interval.low, interval.high


def text_bars(reports: Sequence[TextReport]) -> str:
    """Tokens of every text with every tokenizer, as SVG; estimates are left out."""
    exact = [[r for r in report.results if r.exact] for report in reports]
    names = [result.tokenizer for result in exact[0]] if exact else []
    rows = [
        (report.name, [Bar(r.num_tokens) for r in results])
        for report, results in zip(reports, exact, strict=True)
    ]
    return bars_svg("Tokens", names, rows)


_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
_HATCHES = ("", "4 3", "1 3", "7 2", "2 2", "5 1")  # outlines tell bars apart without colour


def bars_svg(
    title: str,
    series: Sequence[str],
    rows: Sequence[tuple[str, Sequence[Bar]]],
    *,
    mark: float | None = None,
) -> str:
    """Horizontal bars in groups, with intervals and numbers, as an SVG document.

    Args: mark: a value at which a vertical line stands.
    """
    left, width, bar, gap = 170, 760, 13, 8
    top = 48 + 18 * len(series)
    highest = max((b.high or b.value for _, bars in rows for b in bars), default=1.0) or 1.0
    scale = (width - left - 70) / highest
    group = bar * max(1, len(series)) + gap
    height = top + group * len(rows) + 20
    body = [f'<text x="16" y="26" font-size="16" font-weight="bold">{escape(title)}</text>']
    for i, name in enumerate(series):
        y = 40 + 18 * i
        body.append(_rectangle(16, y, 22, 11, i))
        body.append(f'<text x="46" y="{y + 10}" font-size="12">{escape(name)}</text>')
    if mark is not None:
        x = left + mark * scale
        body.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{height - 16}" stroke="#999"/>'
        )
    for row, (name, bars) in enumerate(rows):
        y = top + row * group
        middle = y + group / 2
        body.append(
            f'<text x="{left - 8}" y="{middle:.1f}" font-size="12" text-anchor="end">'
            f"{escape(name)}</text>"
        )
        for i, value in enumerate(bars):
            body += _bar(left, y + i * bar, bar - 2, value, scale, i)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif">'
        f'<rect width="{width}" height="{height}" fill="white"/>' + "".join(body) + "</svg>\n"
    )


def _bar(left: int, y: float, height: int, bar: Bar, scale: float, index: int) -> list[str]:
    end = left + bar.value * scale
    parts = [_rectangle(left, y, bar.value * scale, height, index)]
    if bar.low is not None and bar.high is not None:
        middle, end = y + height / 2, left + bar.high * scale
        parts.append(
            f'<line x1="{left + bar.low * scale:.1f}" x2="{end:.1f}" y1="{middle:.1f}" '
            f'y2="{middle:.1f}" stroke="black"/>'
        )
    label = f"{bar.value:.2f}" if bar.value < 100 else f"{bar.value:,.0f}"
    parts.append(f'<text x="{end + 5:.1f}" y="{y + height - 1:.1f}" font-size="10">{label}</text>')
    return parts


def _rectangle(x: float, y: float, width: float, height: float, index: int) -> str:
    colour, hatch = _COLOURS[index % len(_COLOURS)], _HATCHES[index % len(_HATCHES)]
    dashes = f' stroke-dasharray="{hatch}"' if hatch else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}" '
        f'stroke="black" stroke-width="0.7"{dashes}/>'
    )


def _about(cell: CorpusCell) -> str:
    return "" if cell.exact else f"{_ABOUT} "


def _about_number(value: int) -> str:
    """A figure that is an extrapolation, with three digits: 160,411 is `about 160,000`."""
    scale = 10 ** max(0, len(str(value)) - 3)
    return f"{_ABOUT} {round(value / scale) * scale:,}"


def _brief(name: str) -> str:
    """A column heading: the last part of a path, without `Meta`."""
    return name.rstrip("/").rsplit("/", 2)[-1].removeprefix("Meta ")


def _rate(value: float | None) -> str:
    return _DASH if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    if share is None:
        return _DASH
    decimals = 1 if share < 0.1 else 0
    return f"{share * 100:,.{decimals}f} %"


def _change(ratio: float | None) -> str:
    """A ratio as a change: 0.85 is `-15 %`."""
    return _DASH if ratio is None else f"{(ratio - 1) * 100:+.0f} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _csv(rows: Sequence[tuple[object, ...]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
