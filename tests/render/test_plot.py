"""Line plots as SVG and as characters."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from llamatool.render.plot import Axis, Mark, Plot, Series, letter, to_svg, to_text

LINEAR = Plot(
    title="Hits <by> length & depth",
    x=Axis("tokens"),
    y=Axis("share", "{:.1f}".format, limits=(0, 1)),
    series=(
        Series("rising", tuple((x, x / 10) for x in range(11))),
        Series("falling", tuple((x, 1 - x / 10) for x in range(11))),
    ),
    marks=(Mark(5, 0.5, "here"),),
)


def test_svg_is_well_formed_and_named() -> None:
    root = ElementTree.fromstring(to_svg(LINEAR))
    assert root.find("{*}title").text == "Hits <by> length & depth"
    assert root.get("role") == "img"
    lines = root.findall("{*}polyline")
    assert len(lines) == 2
    assert len({line.get("stroke") for line in lines}) == 2
    assert len({line.get("stroke-dasharray") for line in lines}) == 2
    words = [text.text for text in root.findall("{*}text")]
    assert {"rising", "falling", "here", "tokens", "share"} <= set(words)


def test_svg_points_lie_where_they_should() -> None:
    root = ElementTree.fromstring(to_svg(LINEAR, width=760, height=460))
    rising, falling = (
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in root.findall("{*}polyline")
    )
    left, right, top, bottom = 78, 742, 60, 408
    assert rising[0] == (left, bottom)
    assert rising[-1] == (right, top)
    assert rising[5] == falling[5] == ((left + right) / 2, (top + bottom) / 2)
    circle = root.find("{*}circle")
    assert (float(circle.get("cx")), float(circle.get("cy"))) == rising[5]


def test_log_axes_are_straight_for_powers() -> None:
    series = Series("double", tuple((2.0**n, 2.0**n) for n in range(5)))
    plot = Plot("t", Axis("x", log=True), Axis("y", log=True), (series,))
    points = ElementTree.fromstring(to_svg(plot)).find("{*}polyline").get("points").split()
    xs = [float(point.split(",")[0]) for point in points]
    assert all(b - a == pytest.approx(xs[1] - xs[0], abs=0.11) for a, b in pairwise(xs))


def test_text_shape() -> None:
    lines = to_text(LINEAR, width=40, height=9).split("\n")
    assert lines[0] == "Hits <by> length & depth  (share over tokens)"
    assert max(map(len, lines[1:10])) <= 40
    grid = [line[5:].ljust(35) for line in lines[1:10]]
    assert grid[0][0] == "B"
    assert grid[-1][0] == "A"
    assert grid[0][-1] == "A"
    assert grid[-1][-1] == "B"
    assert sum(row.count("#") for row in grid) == 1
    assert grid[4][17] == "#"
    # A column holds each line once at least: no gaps.
    for column in range(35):
        cells = {row[column] for row in grid}
        assert cells & {"A", "B", "#"}
    assert lines[-3:] == ["  A  rising", "  B  falling", "  #  here"]


def test_text_is_ascii() -> None:
    assert to_text(LINEAR).isascii()


def test_steep_lines_have_no_holes() -> None:
    step = Series("step", ((0, 0), (1, 0), (1.01, 10), (2, 10)))
    lines = to_text(Plot("t", Axis("x"), Axis("y"), (step,)), width=30, height=10).split("\n")
    rows_hit = [number for number, line in enumerate(lines[1:11]) if "A" in line[4:]]
    assert rows_hit == list(range(10))


def test_one_point_and_no_point() -> None:
    dot = Plot("t", Axis("x", log=True), Axis("y"), (Series("dot", ((4096, 1.0),)),))
    assert "A" in to_text(dot)
    ElementTree.fromstring(to_svg(dot))
    with pytest.raises(ValueError, match="at least one point"):
        to_svg(Plot("t", Axis("x"), Axis("y"), ()))
    with pytest.raises(ValueError, match="log axis"):
        to_svg(Plot("t", Axis("x", log=True), Axis("y"), (Series("zero", ((0, 1),)),)))


def test_letters() -> None:
    assert [letter(n) for n in (0, 1, 25, 26, 52)] == ["A", "B", "Z", "a", "A"]
