"""What the report says and how it is shown."""

import csv
import io
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from llamatool.errors import InputError
from llamatool.needle.experiment import Design
from llamatool.needle.report import Compute, Report, compare, make_report, summary
from llamatool.needle.store import Trial
from llamatool.render.blocks import plain
from llamatool.render.needle import (
    comparison_blocks,
    report_blocks,
    show_report,
    to_csv,
    to_text,
)
from llamatool.render.needle_html import colour, ink, to_html, to_svg

ELEVEN = tuple(i / 10 for i in range(11))


def trial(length: int, depth: float, number: int, hit: bool, kind: str = "needle", **more) -> Trial:
    values = {
        "verdict": "correct" if hit else "distractor",
        "length_actual": length,
        "depth_actual": depth,
        "start": 100,
        "border_crossed": False,
        "needle_border": 100,
        "question_border": 7,
        "key": "amber falcon",
        "gold": "482913",
        "generated": " 482913." if hit else " <b>551204</b>.",
        "logprob": -0.01 if hit else -7.5,
        "rank": 1,
        "seconds": 0.25,
    }
    return Trial(kind=kind, length=length, depth=depth, trial=number, hit=hit, **{**values, **more})


def report(lengths=(2048, 4096, 8192), depths=ELEVEN, trials=6, **options) -> Report:
    """Everything right up to 4096, every other trial right beyond."""
    found = [
        trial(length, depth, number, length <= 4096 or number % 2 == 0)
        for length in lengths
        for depth in depths
        for number in range(trials)
    ]
    found += [trial(1024, 0.5, n, True, "short") for n in range(trials)]
    found += [trial(lengths[0], 0.0, n, False, "no_needle") for n in range(trials)]
    found += [trial(lengths[0], 0.0, n, n == 0, "wrong_key") for n in range(trials)]
    return make_report(
        "model-x",
        Design(tuple(lengths), tuple(depths), trials),
        found,
        texts=dict.fromkeys(lengths, trials),
        compute=Compute(1_000, 20_000, 12.5),
        has_chunks=True,
        **options,
    )


def test_pooled_rows_and_effective_length():
    found = report()
    assert [(c.hits, c.trials) for c in found.by_length] == [(66, 66), (66, 66), (33, 66)]
    assert [(c.hits, c.trials) for c in found.by_depth] == [(15, 18)] * 11
    assert found.effective_length == 4096
    assert found.threshold == pytest.approx(0.85)
    assert report(threshold=0.4).effective_length == 8192
    assert report(threshold=0.4, lower_bound=True).effective_length == 4096
    assert report(threshold=1.0).effective_length == 4096
    assert len(report().misses) == 33 + 1  # and one number that was copied


def test_accuracy_is_told_beside_its_control():
    found = report()
    assert found.above_control == found.overall.share
    assert found.controls["wrong_key"].hits == 1
    assert summary(found)["controls"] == {
        "no_needle": {"trials": 6, "hits": 0},
        "wrong_key": {"trials": 6, "hits": 1},
        "short": {"trials": 6, "hits": 6},
    }


def test_without_controls_they_have_no_trials():
    found = make_report(
        "m", Design((512,), (0.5,), 1), [trial(512, 0.5, 0, True)],
        texts={512: 1}, compute=Compute(1, 1, 1.0),
    )  # fmt: skip
    assert summary(found)["controls"]["short"] == {"trials": 0, "hits": 0}
    assert found.effective_length == 512
    assert found.threshold == 0.85


def test_when_the_shortest_fails_there_is_no_effective_length():
    found = report(lengths=(8192, 16384))
    assert found.effective_length is None
    assert summary(found)["effective_length"] is None
    assert "none of the tested lengths" in to_text(found)


def test_every_share_in_the_text_has_its_interval():
    text = to_text(report())
    assert "94.5% to 100.0%" in text
    assert "38.3% to 61.7%" in text
    assert "controls: without the needle 0/6, with another key 1/6, in a short context 6/6" in text
    assert "6/6" in text
    assert "does not show reasoning" in " ".join(text.split())
    assert max(len(line) for line in text.split("\n\n")[0].splitlines()) <= 80


def test_characters_only(capsys):
    show_report(report(), palette="cividis", plain=True, out=None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:7] == ["      2 4 8", "      k k k", "   0% . . 5", "  10% . . 5", "  20% . . 5"]
    assert "\x1b" not in "".join(lines)


def test_a_narrow_terminal_drops_lengths_and_never_wraps(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("COLUMNS", "60")
    stream = io.StringIO()
    many = tuple(1024 * i for i in range(1, 31))
    show_report(report(many), palette="classic", plain=False, out=None, file=stream)
    grid = stream.getvalue().split("All depths")[0]
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in grid.splitlines()]
    assert "lengths are not shown" in grid
    assert lines[1].split()[1] == "1k"
    assert lines[1].split()[-1] == "30k"
    assert all(len(line.rstrip()) <= 60 for line in lines)
    assert "48;2;12;215;159" in grid  # the green of the classic palette


def test_no_color(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    show_report(report(), palette="cividis", plain=False, out=None, file=stream)
    assert "48;2" not in stream.getvalue()
    assert "6/6" in stream.getvalue()


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("src", "href") or (value or "").startswith("http"):
                self.links.append(f"{name}={value}")
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)


def test_html_is_one_small_file_that_asks_for_nothing():
    found = report(tuple(1024 << i for i in range(10)))
    text = to_html(found, "cividis")
    assert len(text.encode()) <= 300_000
    parser = Tags()
    parser.feed(text)
    assert parser.problems == []
    assert parser.open == []
    assert [link for link in parser.links if "www.w3.org/2000/svg" not in link] == []
    assert "<b>551204" not in text  # a model's answer is no markup
    assert "&lt;b&gt;551204" in text
    assert "log p -7.500" in text
    assert "does not show reasoning" in text


@pytest.mark.parametrize("palette", ["cividis", "classic"])
def test_svg_has_a_number_in_every_cell(palette):
    found = report()
    root = ElementTree.fromstring(to_svg(found, palette))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("6/6") == 22
    assert texts.count("3/6") == 11
    assert {"2k", "4k", "8k", "0 %", "100 %"} <= set(texts)
    assert int(root.get("width")) <= 640  # readable beside 80 columns


def test_colours():
    assert colour(0, "classic") == "#f0496e"
    assert colour(0.5, "classic") == "#ebb839"
    assert colour(1, "classic") == "#0cd79f"
    assert colour(1, "cividis") == "#fee838"
    assert ink(1, "cividis") == "#000000"
    assert ink(0, "cividis") == "#ffffff"


def luminance(text: str) -> float:
    channels = (int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_default_palette_is_read_by_its_brightness_alone():
    """So it does not need an eye for colours; and the numbers can be read on every shade."""
    shades = [luminance(colour(step / 20, "cividis")) for step in range(21)]
    assert shades == sorted(shades)
    for palette in ("cividis", "classic"):
        for step in range(21):
            back = luminance(colour(step / 20, palette))
            front = luminance(ink(step / 20, palette))
            assert (max(back, front) + 0.05) / (min(back, front) + 0.05) >= 4.5


def test_csv_has_one_row_per_cell():
    rows = list(csv.DictReader(io.StringIO(to_csv(report()))))
    assert len(rows) == 33
    assert rows[0] == {
        "length": "2048", "depth": "0.0", "trials": "6", "hits": "6", "share": "1.0000",
        "low": "0.6097", "high": "1.0000", "mean_logprob": "-0.0100",
    }  # fmt: skip


def test_needles_across_borders_are_told_apart():
    crossed = [trial(2048, 0.5, 0, False, border_crossed=True), trial(2048, 0.5, 1, True)]
    found = make_report(
        "m", Design((2048,), (0.5,), 2), crossed,
        texts={2048: 2}, compute=Compute(1, 1, 1.0), has_chunks=True,
    )  # fmt: skip
    assert (found.away_from_borders.hits, found.away_from_borders.trials) == (1, 1)
    text = plain(report_blocks(found, None))
    assert "away from chunk borders: 1/1" in text
    assert "across" in text


def test_comparison_pairs_trials():
    first = [trial(1024, 0.5, n, n != 9) for n in range(10)]
    second = [trial(1024, 0.5, n, n >= 6) for n in range(10)]
    found = compare(first, second)
    assert (found.pooled.both, found.pooled.only_first, found.pooled.only_second) == (3, 6, 1)
    assert found.pooled.p_value == pytest.approx(0.125)
    assert found.num_unpaired == 0
    assert "0.1250" in plain(comparison_blocks(found, ("a", "b")))
    more = compare(first, second[:8])
    assert more.num_unpaired == 2
    with pytest.raises(InputError, match="no trial in common"):
        compare(first, [trial(2048, 0.5, 0, True)])
