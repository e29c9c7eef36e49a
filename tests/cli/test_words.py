"""Errors and notes of mpkeras in the options of the command line; those of each command are in its own test file."""

import pytest

import mpkeras
from _mpkeras_cli.words import in_options
from mpkeras.tools.forecast.compiler import Compiler

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.parametrize(
    ("layer", "remedy"),
    [
        ("gru", "Write layers with `keras.ops`, and ask for a batch that it takes: `--batch`, `--open-size`."),
        (
            None,
            "Ask for a batch that the model takes (`--batch`, `--open-size`), and write model and loss with "
            "`keras.ops`.",
        ),
    ],
)
def test_a_batch_that_the_model_does_not_take(layer, remedy):
    answer = {"says_remedy": False, "is_made": True, "layer": layer, "error": "ValueError", "message": "of 6 rows"}
    text = f"{Compiler._failed(answer)}"
    assert in_options(text) == text.partition("of 6 rows. ")[0] + "of 6 rows. " + remedy


def test_what_names_no_argument_stays():
    text = "Layer 'x' asks for `mpkeras.Policy(name, remat='blocks')`, and device='t4' for float16."
    assert in_options(text) == text


def test_policies_are_not_made_at_the_command_line():
    with pytest.raises(ValueError) as error:
        mpkeras.get_policy("half")
    assert str(error.value).endswith(" For a new one pass `mpkeras.Policy` both `compute_dtype` and `variable_dtype`.")
    assert in_options(str(error.value)).endswith("mixed_float16, mixed_float8.")
