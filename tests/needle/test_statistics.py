import math

import pytest

from llamatool.needle.statistics import Share, effective_length, paired, trials_needed, wilson


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [
        (1, 1, 0.21, 1.00), (0, 1, 0.00, 0.79), (6, 6, 0.61, 1.00), (10, 10, 0.72, 1.00),
        (15, 15, 0.80, 1.00), (20, 20, 0.84, 1.00), (60, 60, 0.94, 1.00),
    ],
)  # fmt: skip
def test_wilson(hits, trials, low, high):
    found = wilson(hits, trials)
    assert [round(end, 2) for end in found] == [low, high]


def test_wilson_of_the_default_run():
    assert round(wilson(66, 66)[0], 3) == 0.945
    assert wilson(0, 0) == (0.0, 1.0)


def test_wilson_solves_its_equation():
    # The ends are the shares p0 with |p - p0| = z sqrt(p0 (1 - p0) / n).
    for hits, trials in ((3, 10), (17, 40), (199, 200)):
        for end in wilson(hits, trials):
            distance = abs(hits / trials - end)
            assert math.isclose(distance, 1.96 * math.sqrt(end * (1 - end) / trials), rel_tol=1e-9)


def test_wilson_refuses_nonsense():
    with pytest.raises(ValueError, match="7 hits of 6"):
        wilson(7, 6)


def test_trials_needed():
    assert [trials_needed(share) for share in (0.90, 0.95, 0.99)] == [29, 59, 299]


def test_effective_length_needs_all_shorter_ones():
    shares = [Share(2048, 20, 20), Share(4096, 19, 20), Share(8192, 8, 20), Share(16384, 20, 20)]
    assert effective_length(shares, 0.85) == 4096
    assert effective_length(shares, 0.85, lower_bound=True) is None
    assert effective_length(shares[2:], 0.85) is None
    assert effective_length([], 0.85) is None


def test_mcnemar():
    found = paired([True] * 5 + [True], [False] * 5 + [True])
    assert (found.both, found.only_first, found.only_second, found.neither) == (1, 5, 0, 0)
    assert found.p_value == 0.0625
    assert paired([True], [True]).p_value == 1.0
    # b = 8, c = 2: 2 (1 + 10 + 45) / 1024
    found = paired([True] * 8 + [False] * 2, [False] * 8 + [True] * 2)
    assert math.isclose(found.p_value, 112 / 1024)
