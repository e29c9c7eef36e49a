"""Errors and notes of mpkeras, which name arguments of Python, in the options of the command line."""

import re

# `(what mpkeras says, what a command says)`: an option in the place of an argument, and nothing, or where else it is
# done, in the place of what no option does.
_IN_OPTIONS = [
    (re.compile(said), in_options)
    for said, in_options in (
        (r" For a new one pass `mpkeras\.Policy` both `compute_dtype` and `variable_dtype`\.", ""),
        (
            r", with `float32_variables=True` if the model has float16 variables: they become float32 ones of the same "
            "values",
            ". A model that has float16 variables is converted in Python: `mpkeras.apply_policy(model, policy, "
            "float32_variables=True)`",
        ),
        (r"Pass each once, or give it a name of its own: `policy\.renamed\('mine'\)`", "Pass each once"),
        (
            r"Name the layers whose outputs are kept: remat=\['path:REGEX', layer, \.\.\.\]",
            "Name the layers whose outputs are kept in a policy that a module registers: `--import MODULE`, "
            "`--policy NAME`",
        ),
        (r"Expected `device` to", "Expected `--device` to"),
        (r"rows\. Pass (\d+)", r"rows. Pass `--batch \1`"),
        (r"Ask for its own batch alone", "Leave out `--largest-batch`"),
        (r"s, which were not enough\. Give more", "s, which were not enough. Give more: `--budget`"),
        (r"numbers in `x`", "numbers in the inputs"),
        (r"pass `x` as the model takes it", "ask for a batch that it takes: `--batch`, `--open-size`"),
        (
            r"Pass `x` and `y` as the model and its loss take them",
            "Ask for a batch that the model takes (`--batch`, `--open-size`)",
        ),
        (r"Pass for example `x\[:128\]`, or the first batch of a dataset", "Write such a batch into `--data FILE.npz`"),
        (
            r"Pass classes and functions of your own in `custom_objects`, or the model as `model`",
            "Name the module that defines them: `--import MODULE`",
        ),
        (r"pass `safe_mode=False`", "pass `--unsafe`"),
    )
]


def in_options(text: str) -> str:
    """Returns `text` with the options of the command line in the place of arguments of Python."""
    for said, replacement in _IN_OPTIONS:
        text = said.sub(replacement, text)
    return text
