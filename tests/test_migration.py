"""docs/migration.md: both sides of each pair of code blocks are run and compared, every name of its tables exists.

What is left of an arrow is run where its packages are installed; they are no dependencies of mpkeras.
"""

import ast
import contextlib
import dataclasses
import inspect
import re
import runpy
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.training import covered_compile, global_policy

PAGE = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()
SECTIONS = dict(re.findall(r"^## (?:From )?(.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
ORIGINS = [name for name in SECTIONS if name != "What differs everywhere"]
SETUP = re.search(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[1]


def pairs():
    """Yields each block to be run with the block that it replaces, and whether that one can be run."""
    for origin in ORIGINS:
        before, number = None, 0
        for kind, code in re.findall(r"```python( before| not-run)?\n(.*?)```", SECTIONS[origin], flags=re.DOTALL):
            if kind:
                before = code, kind.strip()
            else:
                number += 1
                yield pytest.param(*before, code, id=f"{origin} {number}")


def run(code, path):
    # A file, as `tf.function` reads the source of what it compiles.
    path.write_text(SETUP + code)
    return runpy.run_path(str(path))


def skip_where_it_cannot_run(code):
    for line in re.findall(r"^(?:import|from) .*", code, flags=re.MULTILINE):
        name = line.split()[1]
        if name.split(".")[0] not in ("keras", "mpkeras"):
            pytest.importorskip(name)


@contextlib.contextmanager
def theirs_as_before(code):
    """Undoes what `code` sets for the whole process in other libraries."""
    try:
        yield
    finally:
        if "import tf_keras" in code:
            import tf_keras

            tf_keras.mixed_precision.set_global_policy("float32")
        if "enable_mixed_precision_graph_rewrite" in code:
            import tensorflow as tf

            tf.compat.v1.mixed_precision.disable_mixed_precision_graph_rewrite()


@pytest.mark.slow
@pytest.mark.parametrize(("before", "kind", "after"), list(pairs()))
def test_both_sides_train_alike(before, kind, after, tmp_path, backend):
    for library in ("tensorflow", "jax", "torch"):
        if f"import {library}" in after and library != backend:
            pytest.skip(f"this loop is for Keras on {library}")
    found = run(after, tmp_path / "after.py")
    assert np.isfinite(found["kernel"]).all() and np.abs(found["kernel"]).max() > 1
    if "losses" in found:
        assert found["losses"][-1] < 0.8 * found["losses"][0]
    if kind == "not-run":
        return
    skip_where_it_cannot_run(before)
    keras.config.set_dtype_policy("float32")
    with warnings.catch_warnings(), theirs_as_before(before):
        warnings.simplefilter("ignore")
        expected = run(before, tmp_path / "before.py")
    compared = {"losses", "scale", "kernel"} & set(expected) & set(found)
    assert "kernel" in compared
    for name in compared:
        # float16 has 11 significant bits, and there are eight steps; the scale is a power of two.
        rtol = 0 if name == "scale" else 5e-3
        np.testing.assert_allclose(found[name], np.asarray(expected[name]), rtol=rtol, err_msg=name)


# ---------------------------------------------------------------------------------------------------- tables


def rows():
    for origin, text in SECTIONS.items():
        for line in re.findall(r"^\|.*\|$", text, flags=re.MULTILINE):
            cells = [cell.strip() for cell in line[1:-1].split("|")]
            if cells[0] != "---" and cells[1] != "here":
                yield pytest.param(cells, id=f"{origin}: {cells[0]}")


def names_on_the_left(origin):
    cells = [row.values[0][0] for row in rows() if row.id.startswith(f"{origin}: ")]
    return set(re.findall(r"\w+", " ".join(" ".join(re.findall(r"`(.*?)`", cell)) for cell in cells)))


def namespace(codes=()):
    """What the expressions of the tables are about; the step only where one of them is about it."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, name="head")])
    model.compile("sgd", "mse")
    inner = keras.optimizers.SGD(0.1, momentum=0.5)
    optimizer = mpkeras.LossScaleOptimizer(inner)
    variables = model.trainable_variables
    optimizer.build(variables)
    x, y = np.ones((8, 8), "float32"), np.ones((8, 1), "float32")
    if any(code.startswith("step") for code in codes):
        step = mpkeras.make_train_step(model, mpkeras.LossScaleOptimizer("sgd"), "mse", jit_compile=False)
        step(x, y)
    weights, values = [v.value for v in variables], [v.value for v in optimizer.variables]
    grads = [keras.ops.zeros(v.shape) for v in variables]
    loss = optimizer.scale_loss(np.float32(1.0))
    inner = keras.optimizers.SGD()
    state = {"scale": 8.0, "_growth_tracker": 3, "loss_scaler0": {"loss_scale": 8.0}}
    return {"keras": keras, "mpkeras": mpkeras, "np": np} | locals()


def names_in(code):
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def is_code(text):
    # Not a line for the shell: `mpkeras run ...`.
    return re.match(r"(float\()?(mpkeras\b(?! )|(optimizer|step|keras)\b)", text)


# The expressions stand for themselves, without what a whole program has around them.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(the loss was not scaled|scales no loss|Under policy 'float16'):UserWarning")
@pytest.mark.parametrize("cells", list(rows()))
def test_what_stands_on_the_right_runs(cells):
    here, remark = cells[1], "".join(cells[2:])
    codes = re.findall(r"`(.*?)`", here)
    if here.startswith("absent"):
        assert remark, "a reason for what is absent"
    else:
        assert codes
        assert re.sub(r"`.*?`|, ", "", here) == "", "code alone"
    run_here = [code for code in (*codes, *re.findall(r"`(.*?)`", remark)) if is_code(code)]
    modules = {"keras": keras, "mpkeras": mpkeras, "np": np}
    # A model and its optimizer are made only for rows that are about them.
    names = modules if all(names_in(code) <= set(modules) for code in run_here) else namespace(codes)
    for code in codes:
        if code.startswith("MPKERAS_POLICY="):
            assert global_policy.ENVIRONMENT_VARIABLE + "=mixed_float16" == code
        else:
            assert is_code(code), code
            exec(code, names)
            for follow in list(covered_compile._in_force):
                covered_compile.leave(follow)
    # Whole expressions in the remarks run; a bare name such as `keras.distribution` has to exist.
    for code in filter(is_code, re.findall(r"`(.*?)`", remark)):
        exec(code, names)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        pytest.param("mpkeras.DynamicLossScale(period=3)", TypeError, id="an option that is not there"),
        pytest.param("optimizer.unscale_(grads)", AttributeError, id="a method that is not there"),
    ],
)
def test_a_wrong_name_on_the_right_would_be_found(code, error):
    with pytest.raises(error):
        exec(code, namespace())


def options(thing):
    return set(inspect.signature(thing).parameters)


def fields(thing):
    return {field.name for field in dataclasses.fields(thing) if field.name != "parent"}


def public_names(module):
    return {name for name in dir(module) if not name.startswith("_")}


def methods(thing):
    return {name for name in vars(thing) if not name.startswith("_")}


def test_every_option_of_stock_keras_has_a_row():
    scaler = keras.optimizers.LossScaleOptimizer
    known = options(scaler) | options(keras.optimizers.SGD) - {"momentum", "nesterov"}
    known |= {"scale_loss", "apply", "stateless_apply", "iterations", "learning_rate", "auto_scale_loss"}
    known |= {"set_dtype_policy", "DTypePolicy", "DTypePolicyMap"} | public_names(keras.mixed_precision)
    assert known - {"kwargs"} <= names_on_the_left("stock Keras 3")


@pytest.mark.backends("torch")
def test_every_option_of_torch_amp_has_a_row():
    torch = pytest.importorskip("torch")
    known = options(torch.amp.autocast) | options(torch.amp.GradScaler) | methods(torch.amp.GradScaler)
    assert known <= names_on_the_left("torch.amp")


def test_every_option_of_tf_keras_has_a_row():
    mixed_precision = pytest.importorskip("tf_keras").mixed_precision
    scaler = mixed_precision.LossScaleOptimizer
    known = {"inner_optimizer", "dynamic", "initial_scale", "dynamic_growth_steps"} | methods(scaler)
    known |= public_names(mixed_precision)
    assert known <= names_on_the_left("tf.keras")


@pytest.mark.backends("jax")
def test_every_option_of_jmp_has_a_row():
    jmp = pytest.importorskip("jmp")
    # `LossScale` is a union of the three for type hints.
    known = set(jmp.__all__) - {"LossScale"}
    for thing in (jmp.Policy, jmp.DynamicLossScale, jmp.StaticLossScale):
        known |= fields(thing) | methods(thing) - {"tree_flatten", "tree_unflatten"}
    assert known <= names_on_the_left("jmp")


@pytest.mark.backends("jax")
def test_every_option_of_flax_has_a_row():
    module = pytest.importorskip("flax.training.dynamic_scale")
    known = fields(module.DynamicScale) | options(module.DynamicScale.value_and_grad) - {"self"} | {"value_and_grad"}
    assert known <= names_on_the_left("flax DynamicScale")


def test_every_option_of_apex_has_a_row():
    """As listed in apex/amp/frontend.py, handle.py and amp.py."""
    known = """models optimizers enabled opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32
    master_weights loss_scale cast_model_outputs num_losses verbosity min_loss_scale max_loss_scale O0 O1 O2 O3
    scale_loss loss_id model delay_unscale delay_overflow_check master_params state_dict load_state_dict
    float_function half_function promote_function disable_casts
    register_float_function register_half_function register_promote_function"""
    assert set(known.split()) <= names_on_the_left("NVIDIA Apex")
