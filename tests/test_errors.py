"""The error tree: exit codes, and three clear lines."""

import pytest

from llamatool import errors


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: errors.UsageError("x"), 2),
        (lambda: errors.InputError("x"), 3),
        (lambda: errors.ConfigError("x"), 3),
        (lambda: errors.CheckpointError("x"), 3),
        (lambda: errors.TokenizerError("x"), 3),
        (lambda: errors.UnsupportedError("x"), 3),
        (lambda: errors.MissingError("x"), 4),
        (lambda: errors.MissingExtraError("generate", "PyTorch", "torch"), 4),
        (lambda: errors.ResourceError("x"), 4),
        (lambda: errors.HubError("x"), 5),
    ],
)
def test_exit_codes(make, code):
    error = make()
    assert isinstance(error, errors.LlamatoolError)
    assert error.exit_code == code


def test_what_where_and_what_to_do():
    error = errors.ConfigError("`a` is 1", where="config.json", hint="make it 2")
    assert str(error) == "`a` is 1\n  at config.json\nhint: make it 2"


def test_a_missing_extra_names_the_command():
    error = errors.MissingExtraError("generate", "PyTorch", "torch")
    assert str(error) == "generate needs PyTorch\nhint: pip install 'llamatool[torch]'"


def test_a_hostile_name_cannot_move_the_cursor():
    error = errors.CheckpointError("tensor `\x1b[2J\r\n`", where="a\nb")
    assert "\x1b" not in str(error)
    assert str(error).count("\n") == 1


def test_the_first_place_wins():
    assert errors.ConfigError("x", where="a").at("b").where == "a"
    assert errors.ConfigError("x").at("b").where == "b"
