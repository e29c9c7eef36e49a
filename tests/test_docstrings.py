"""Every public name has a docstring that is complete, and whose examples run on every backend."""

import doctest
import importlib.util
import inspect
import io
import warnings

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.policies.policy import REGISTERED
from tests import public_names

PUBLIC = public_names.public_objects()
CLASSES = {path: thing for path, thing in PUBLIC.items() if inspect.isclass(thing)}
MEMBERS = {name: (member, cls) for cls in CLASSES.values() for name, member in public_names.public_members(cls).items()}
METHODS = {name: found for name, found in MEMBERS.items() if not isinstance(found[0], property)}
EXAMPLES = {name: doc for name, doc in public_names.all_docstrings().items() if ">>>" in doc}
# Examples of what is there on some backends only; all others run on all.
BACKENDS = {
    "LossScaleOptimizer.scale_loss": ("tensorflow",),  # `tf.GradientTape`
    "LossScaleOptimizer.stateless_apply": ("jax",),  # `jax.grad`
    "mpkeras.sharded": ("jax",),  # `keras.distribution` lays weights out on JAX alone
    "TrainStep.compiler_ir": ("tensorflow", "jax"),  # no compiler of the whole program on torch
}
# Examples of a step that is skipped: mpkeras warns of it, as it should.
WARNS = (
    "mpkeras.callbacks.Float32Fallback",
    "mpkeras.callbacks.NumericsMonitor",
)


@pytest.fixture(autouse=True)
def same_registry():
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, backend, tmp_path, monkeypatch):
    if backend not in BACKENDS.get(name, (backend,)):
        pytest.skip(f"for {', '.join(BACKENDS[name])}")
    if "forecast" in name.lower() and importlib.util.find_spec("jax") is None:
        pytest.skip("JAX compiles, which is not installed")
    monkeypatch.chdir(tmp_path)
    # What an example may take as imported.
    names = {"__name__": "__main__", "keras": keras, "mpkeras": mpkeras, "np": np}
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name], names, name, None, None)
    if name in WARNS:
        warnings.simplefilter("ignore", UserWarning)
    output = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(example, out=output.write).failed == 0, output.getvalue()


def test_the_list_of_backends_names_examples():
    assert set(BACKENDS) <= set(EXAMPLES)


@pytest.mark.parametrize("path", PUBLIC)
def test_public_name_has_an_example(path):
    assert ">>>" in (PUBLIC[path].__doc__ or "")


@pytest.mark.parametrize("name", [name for name in METHODS if name not in public_names.INTERNAL])
def test_method_has_an_example(name):
    """Its own, or in that of a class that has it."""
    member, cls = METHODS[name]
    docs = [base.__doc__ or "" for base in public_names.own_classes(cls)]
    called = f".{name.rpartition('.')[2]}("
    defined = f"def {called[1:]}"
    assert any(called in doc or defined in doc for doc in [member.__doc__ or "", *docs])


@pytest.mark.parametrize("name", MEMBERS)
def test_member_has_a_docstring(name):
    assert (MEMBERS[name][0].__doc__ or "").strip()


# What users call; the classes of `RETURNED` are made by mpkeras alone.
CALLED = {path: thing for path, thing in PUBLIC.items() if path not in public_names.RETURNED}
CALLED.update((name, public_names.function_of(member)) for name, (member, _) in METHODS.items())


@pytest.mark.parametrize("name", CALLED)
def test_parameters_are_documented(name):
    thing = CALLED[name]
    documented = public_names.documented_parameters(thing.__doc__)
    assert documented == public_names.parameters(thing)


def functions_with_docs():
    """Returns `(function, docstring)` of what is called: of a class, its constructor and the class's own."""
    for name, thing in CALLED.items():
        if inspect.isclass(thing):
            for base in public_names.own_classes(thing):
                for constructor in ("__init__", "__post_init__"):
                    if constructor in vars(base) and hasattr(vars(base)[constructor], "__code__"):
                        if vars(base)[constructor].__code__.co_filename != "<string>":
                            yield pytest.param(vars(base)[constructor], thing.__doc__, id=f"{name}: {base.__name__}")
        else:
            yield pytest.param(inspect.unwrap(thing), thing.__doc__, id=name)
    for name, (member, _) in MEMBERS.items():
        if isinstance(member, property):
            yield pytest.param(member.fget, member.__doc__, id=name)


FUNCTIONS = list(functions_with_docs())
PROPERTIES = [member.fget for member, _ in MEMBERS.values() if isinstance(member, property)]


@pytest.mark.parametrize(("function", "doc"), FUNCTIONS)
def test_exceptions_are_documented(function, doc):
    written = public_names.documented_parameters(doc, "Raises")
    assert public_names.raised(function) <= written


@pytest.mark.parametrize(("function", "doc"), FUNCTIONS)
def test_results_are_documented(function, doc):
    """In a section, or by a first paragraph that says "Returns"; a property is what it is."""
    if function.__name__ == "__init__" or function in PROPERTIES or not public_names.returns_a_value(function):
        return
    sections = public_names.section(doc, "Returns") + public_names.section(doc, "Yields")
    assert sections or "eturns" in doc.split("\n\n")[0]


def test_the_rules_find_what_they_look_for():
    """Worked out by hand from the code and the docstrings of these functions."""
    assert public_names.raised(mpkeras.register_policy) == {"TypeError", "ValueError"}
    assert public_names.raised(mpkeras.advise) == {"TypeError", "ValueError"}
    assert public_names.raised(mpkeras.LossScaleOptimizer.apply) == {"ValueError"}
    assert public_names.raised(mpkeras.registered_policies) == set()
    assert public_names.documented_parameters(mpkeras.advise.__doc__) == {
        *("model", "x", "y", "measure", "jit_compile", "budget_s", "verbose"),
    }
    assert public_names.documented_parameters(mpkeras.set_global_policy.__doc__, "Raises") == {
        "ValueError",
        "TypeError",
    }
    assert public_names.returns_a_value(mpkeras.advise)
    assert not public_names.returns_a_value(mpkeras.training.state.load_state_dict)
    assert "LossScale.next_state" in MEMBERS and "DynamicLossScale.next_state" not in MEMBERS
