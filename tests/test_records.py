"""`record` behaves as a frozen dataclass does."""

import dataclasses
from dataclasses import dataclass, field

import pytest

from llamatool.records import record


@record
class Ours:
    """A point."""

    x: int
    y: int = 2
    names: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Theirs:
    """A point."""

    x: int
    y: int = 2
    names: dict[str, int] = field(default_factory=dict)


@pytest.mark.parametrize("make", [Ours, Theirs])
def test_values_defaults_and_equality(make):
    assert make(1) == make(1, 2) == make(x=1, y=2, names={})
    assert make(1) != make(2)
    assert make(1) != (1, 2, {})
    assert make(1).names is not make(1).names
    assert dataclasses.replace(make(1), y=5) == make(1, 5)
    assert dataclasses.asdict(make(1)) == {"x": 1, "y": 2, "names": {}}
    assert repr(make(1)) == f"{make.__name__}(x=1, y=2, names={{}})"


@pytest.mark.parametrize("make", [Ours, Theirs])
def test_it_is_frozen(make):
    value = make(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.x = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        del value.x


@pytest.mark.parametrize("make", [Ours, Theirs])
@pytest.mark.parametrize(
    ("args", "values"), [((), {}), ((1,), {"x": 2}), ((1,), {"z": 2}), ((1, 2, {}, 4), {})]
)
def test_wrong_arguments_are_type_errors(make, args, values):
    with pytest.raises(TypeError):
        make(*args, **values)


def test_hash_is_by_value():
    @record
    class Key:
        """A key."""

        a: int
        b: str

    assert len({Key(1, "x"), Key(1, "x"), Key(2, "x")}) == 2
