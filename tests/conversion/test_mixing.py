"""P11: a layer of the user's own that mixes dtypes is named, with the tensor and both dtypes."""

import functools
import re
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.conversion.mixing import MixedDtypesError, NoKernelError
from mpkeras.policies.heads import own_functions
from tests.cases import first_quick
from tests.sixteen_bits import without_outputs

POLICIES = first_quick(["mixed_float16", "mixed_bfloat16"])
X = np.ones((2, 4), "float32")
SCALES = ops.convert_to_tensor(np.full(4, 2.0, "float32"))


class Attribute(layers.Layer):
    def __init__(self, convert=ops.convert_to_tensor, **kwargs):
        super().__init__(**kwargs)
        self.scales = convert(np.full(4, 2.0, "float32"))

    def call(self, x):
        return x * ops.convert_to_tensor(self.scales)


class NumpyAttribute(Attribute):
    def __init__(self, **kwargs):
        super().__init__(np.asarray, **kwargs)


class InADictionary(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tables = {"scales": [ops.convert_to_tensor(np.full(4, 2.0, "float32"))]}

    def call(self, x):
        return x * self.tables["scales"][0]


class Unmoved(layers.Layer):
    """A variable that asked to be read as it is stored."""

    def build(self, input_shape):
        self.scales = self.add_weight(shape=(4,), initializer="ones", autocast=False)

    def call(self, x):
        return x * self.scales.value


class Matrix(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.matrix = ops.convert_to_tensor(np.eye(4, dtype="float32"))

    def call(self, x):
        return x @ self.matrix


class Argument(layers.Layer):
    """Takes its arguments as they come, and relies on their being alike."""

    def __init__(self):
        super().__init__(autocast=False)

    def call(self, x, scales):
        return ops.cast(x, self.compute_dtype) * scales


class MadeInside(layers.Layer):
    def call(self, x):
        return x * ops.ones((4,)) @ ops.eye(4)


class Global(layers.Layer):
    def call(self, x):
        return x * SCALES


class GlobalInside(layers.Layer):
    def call(self, x):
        return (lambda rows: rows * SCALES)(x)


class NamedAlike(layers.Layer):
    """A weight, read in the dtype of the layer, has the name of a global variable that nothing reads."""

    def build(self, input_shape):
        self.SCALES = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x):
        return x * self.SCALES * ops.ones((4,))


class Composite(layers.Layer):
    """The fault is in its own code, behind a layer that is in order."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4)
        self.scales = ops.convert_to_tensor(np.full((4, 4), 2.0, "float32"))

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, x):
        return self.dense(x) @ self.scales


def closure():
    scales = ops.convert_to_tensor(np.full(4, 2.0, "float32"))
    return layers.Lambda(lambda x: x * scales, output_shape=(4,))


# The layer, and what is to be named.
WRONG = {
    "attribute": (Attribute, "attribute `scales`"),
    "numpy": (NumpyAttribute, "attribute `scales`"),
    "nested": (InADictionary, "attribute `tables`"),
    "variable": (Unmoved, "attribute `scales`"),
    "matrix": (Matrix, "attribute `matrix`"),
    "argument": (Argument, "argument `scales`"),
    "inside": (MadeInside, "made inside `call`"),
    "global": (Global, "global variable `SCALES`"),
    "global inside": (GlobalInside, "global variable `SCALES`"),
    "alike": (NamedAlike, "made inside `call`"),
    "composite": (Composite, "attribute `scales`"),
    "closure": (closure, "variable `scales` of the function around it"),
}


class Model(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.wrong = layer

    def call(self, x):
        if isinstance(self.wrong, Argument):
            return self.wrong(x, scales=ops.convert_to_tensor(np.full(4, 2.0, "float32")))
        return self.wrong(x)


class Normalizing(layers.Layer):
    """Adds to its inputs what a layer inside makes of them, which its user has made in float32."""

    def __init__(self):
        super().__init__()
        self.center = layers.LayerNormalization(name="center", dtype="float32")

    def build(self, shape):
        self.center.build(shape)

    def call(self, x):
        return x + self.center(x)


@pytest.mark.backends("tensorflow")  # others add float32 to float16
def test_a_float32_layer_inside_is_named_where_nothing_else_is_in_reach():
    with mpkeras.policy_scope("mixed_float16"):
        model = Model(Normalizing())
    mpkeras.apply_policy(model, mpkeras.Policy("mixed_float16", keep_float32=[]))
    with pytest.raises(TypeError, match="mixes it with float32.*or what layer 'center' inside returns, in float32"):
        model(X)


def raises(name, policy):
    """Whether the backend refuses to mix. JAX promotes; torch does in sums and products, but not in `@`."""
    backend = keras.backend.backend()
    if backend == "tensorflow":  # Its matrix product takes bfloat16 and float32 together.
        return policy == "mixed_float16" or name not in ("matrix", "composite")
    return backend == "torch" and name in ("matrix", "composite")


# Where nothing is raised: a tensor made inside, and the cast of a layer that takes arguments as they come, cannot be
# told from a cast on purpose; the layers inside a composite may be float32 by a rule.
UNSEEN = ("inside", "argument", "composite", "alike")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_layer_is_named_with_what_it_mixes_and_both_dtypes(name, policy):
    make, culprit = WRONG[name]
    layer = make()
    model = Model(layer)
    model(X)  # It works in float32.
    mpkeras.apply_policy(model, without_outputs(policy))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if raises(name, policy):
            with pytest.raises(TypeError) as error:
                model(X)
            message = str(error.value)
        else:
            model(X)
            model(X)
            named = [str(warning.message) for warning in caught if "mixes it with" in str(warning.message)]
            assert len(named) == (name not in UNSEEN)
            message = named[0] if named else None
    if message is not None:
        assert f"Layer '{layer.name}' ({type(layer).__name__})" in message
        assert f"computes in {policy.removeprefix('mixed_')} and mixes it with float32" in message
        assert culprit in message


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [name for name in WRONG if name not in ("closure", "argument")])
def test_the_same_layer_passes_as_a_float32_island(name, policy):
    make, _ = WRONG[name]

    class Right(make):
        call = mpkeras.float32_island(make.call)

    model = Model(Right())
    expected = ops.convert_to_numpy(model(X))
    mpkeras.apply_policy(model, without_outputs(policy))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            outputs = model(X)
        except TypeError as error:
            # The layers inside an island follow their own policy: the remedy here is the rule, or `dtype`.
            assert name == "composite" and "`keep_float32=(..., 'path:" in str(error)
            return
        except UserWarning as warning:
            assert "mixes it with" in str(warning)
            outputs = None
    if outputs is not None:
        np.testing.assert_allclose(ops.convert_to_numpy(ops.cast(outputs, "float32")), expected, rtol=0.02)


@pytest.mark.parametrize(
    "door",
    [
        pytest.param("apply_policy", marks=pytest.mark.backends("tensorflow")),
        pytest.param("fit", marks=pytest.mark.backends("tensorflow", "torch")),
    ],
)
def test_the_doors_name_the_layer(door):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), Matrix(name="mine"), layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="Layer 'mine'.*attribute `matrix` is float32"):
        if door == "apply_policy":
            mpkeras.apply_policy(model, "mixed_float16")
        else:
            model.fit(X, X[:, :1], verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision("mixed_float16")])
    if keras.backend.backend() == "tensorflow":
        # Refused while it is converted, it stays as it was.
        assert {layer.compute_dtype for layer in model.layers} == {"float32"}


class Broken(layers.Layer):
    def call(self, x):
        raise RuntimeError("no disk, no float")


class Logits(layers.Layer):
    """Ends in float32 on purpose, with a number of its own that is float32."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.temperature = np.float32(2.0)

    def call(self, x):
        return ops.cast(x, "float32") * self.temperature


def test_other_errors_and_casts_on_purpose_are_left_in_peace():
    with pytest.raises(RuntimeError, match="no disk") as error:
        mpkeras.apply_policy(Model(Broken()), without_outputs("mixed_float16"))(X)
    assert not isinstance(error.value, MixedDtypesError)
    outputs = mpkeras.apply_policy(Model(Logits()), without_outputs("mixed_bfloat16"))(X)
    assert keras.backend.standardize_dtype(outputs.dtype) == "float32"  # Warnings are errors here.


class Table(layers.Layer):
    """Casts a table of float32 as it should; its weight is read in the dtype of the layer."""

    def build(self, input_shape):
        self.table = np.full(input_shape[-1], 0.75, "float32")
        self.gain = self.add_weight(shape=(input_shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.gain * ops.cast(self.table, x.dtype)


def test_a_layer_that_mixes_nothing_is_left_in_peace_in_fit():
    """On torch Keras builds for `fit` with variables as they are stored, which promote what they meet."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), Table(), layers.Dense(1)])
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    with warnings.catch_warnings(record=True) as caught:
        # Not as errors, of which Keras would catch one and build once more, with numbers.
        warnings.simplefilter("always")
        model.fit(X, X[:, :1], verbose=0)
    assert not [str(warning.message) for warning in caught if "mixes it with" in str(warning.message)]


class Times:
    """A callable of the user's that is no function."""

    def __init__(self, number):
        self.number = number

    def __call__(self, x):
        return ops.add(x, ops.convert_to_tensor(self.number))


@pytest.mark.parametrize("make", [Times, lambda number: functools.partial(ops.add, ops.convert_to_tensor(number))])
def test_callables_that_are_no_functions_of_python(make):
    """Of what they add nothing is in reach, and nothing is said: Keras' operations return float32."""
    model = Model(layers.Lambda(make(np.full(4, 2.25, "float32")), output_shape=(4,), name="times"))
    mpkeras.apply_policy(model, without_outputs("mixed_bfloat16"))
    # Warnings are errors here.
    np.testing.assert_array_equal(ops.convert_to_numpy(model(X)), X * 3.25)


def steeper(x):
    return ops.maximum(x, 0) * ops.ones((1,)) * SCALES[:1]


def shifted(x):
    return ops.tanh(x) * ops.ones((1,))


class Leaving(layers.SimpleRNNCell):
    """A cell of the user's, whose state is float32 from its first step on."""

    def call(self, x, states, training=False):
        output, states = super().call(x, states, training)
        return output * ops.ones((3,)), [state * ops.ones((3,)) for state in states]


# By what applies the code: the layer, the shape that it takes, and the parts of the message.
APPLIED = {
    "a product": (lambda: layers.Dense(4, activation=steeper), (2, 4), ("dense", "(Dense)", "`SCALES` is float32")),
    "a partial function": (
        lambda: layers.Conv1D(3, 2, activation=functools.partial(steeper)), (2, 2, 4), ("conv", "`SCALES` is float32")
    ),
    "an activation": (
        lambda: layers.Activation(steeper), (2, 4), ("activation", "(Activation)", "`SCALES` is float32")
    ),
    "a cell": (lambda: layers.RNN(Leaving(3)), (2, 2, 4), ("'leaving", "(Leaving)", "made inside `call`")),
}  # fmt: skip


@pytest.mark.parametrize("name", APPLIED)
def test_a_function_of_the_users_in_a_stock_layer_is_named(name):
    """Where the backend refuses what it mixes; where it goes on in float32, what is in reach of it."""
    make, shape, culprits = APPLIED[name]
    layer, x = make(), np.ones(shape, "float32")
    model = Model(layer)
    model(x)
    mpkeras.apply_policy(model, without_outputs("mixed_bfloat16"))
    backend, is_in_loop = keras.backend.backend(), name == "a cell"
    if backend == "tensorflow" or (backend == "jax" and is_in_loop):
        with pytest.raises(TypeError) as error:
            model(x)
        message = str(error.value)
    elif is_in_loop:
        model(x)  # Warnings are errors here.
        return
    else:
        with pytest.warns(UserWarning, match="mixes it with float32") as caught:
            model(x)
        message = str(caught[0].message)
    assert "computes in bfloat16 and mixes it with float32" in message
    assert all(culprit in message for culprit in culprits), message
    assert "keras.ops.cast(..., x.dtype)" in message or name == "a cell"


def test_what_keras_offers_as_activations_is_no_code_of_the_users():
    names = [own_functions(layers.Dense(2, activation=activation)) for activation in (
        None, "gelu", functools.partial(keras.activations.gelu, approximate=True), layers.LeakyReLU(0.25)
    )]  # fmt: skip
    assert names == [[], [], [], []]
    assert own_functions(layers.LSTM(2).cell) == []
    assert own_functions(layers.LSTM(2, activation=shifted).cell) == [shifted]


class Fourier(layers.Layer):
    """The mixing of FNet. No backend has a Fourier transform of 16 bits on a CPU."""

    def __init__(self, run=lambda function: function, **kwargs):
        super().__init__(**kwargs)
        self.transform = run(lambda x: ops.fft2((x, ops.zeros_like(x)))[0])

    def call(self, x):
        return ops.squeeze(self.transform(ops.expand_dims(x, 1)), 1)


# Some backends list the dtypes that such an operation takes, others say that it takes few.
TAKES_NO_16_BITS = {
    "rfft": lambda x: ops.rfft(x, 4)[0][:, :1],
    "irfft": lambda x: ops.irfft((x, x))[:, :1],
    "stft": lambda x: ops.stft(x, 2, 1, 2)[0][:, 0, :1],
    "determinant": lambda x: ops.det(ops.reshape(x, (-1, 4, 4)))[:, None],
    "slogdet": lambda x: ops.slogdet(ops.reshape(x, (-1, 4, 4)))[1][:, None],
    "singular values": lambda x: ops.svd(ops.reshape(x, (-1, 4, 4)))[1][:, :1],
}


class Taker(layers.Layer):
    def __init__(self, operation, **kwargs):
        super().__init__(**kwargs)
        self.operation = operation

    def call(self, x):
        return x * self.operation(x)


@pytest.mark.parametrize(
    "operation",
    [pytest.param(name, marks=pytest.mark.slow if name == "stft" else ()) for name in TAKES_NO_16_BITS],
)
def test_the_dtypes_that_an_operation_takes_are_not_those_that_a_layer_mixes(operation):
    x = np.random.default_rng(5).normal(size=(2, 16)).astype("float32")
    model = Model(Taker(TAKES_NO_16_BITS[operation], name="taker"))
    wide = ops.convert_to_numpy(model(x))
    mpkeras.apply_policy(model, without_outputs("mixed_bfloat16"))
    with pytest.raises(NoKernelError, match="'taker' .*computes in bfloat16, for which an operation") as error:
        model(x)
    assert "mixes" not in str(error.value)
    kept = mpkeras.apply_policy(model, mpkeras.Policy("mixed_bfloat16", keep_float32=(..., "path:taker")))
    np.testing.assert_allclose(ops.convert_to_numpy(kept(x)), wide, rtol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_operation_without_a_kernel_is_no_mixing_of_dtypes(policy):
    model = Model(Fourier(name="fourier"))
    model(X)
    mpkeras.apply_policy(model, without_outputs(policy))
    expected = (
        f"'fourier' .*computes in {policy.removeprefix('mixed_')}, for which an operation in its `call` has no kernel"
    )
    with pytest.raises(NoKernelError, match=expected) as error:
        model(X)
    assert "mixes" not in str(error.value)
    if keras.backend.backend() != "torch":  # There `audit` runs no kernel.
        (finding,) = [finding for finding in mpkeras.audit(model, inputs=X).findings if finding.severity == "error"]
        assert re.search(expected, finding.what) and "Cast what the operation takes to float32" in finding.remedy
    # The remedies that the error names help.
    island = mpkeras.apply_policy(Model(Fourier(mpkeras.float32_island)), without_outputs(policy))
    by_rule = mpkeras.apply_policy(
        Model(Fourier(name="fourier")), mpkeras.Policy(policy, keep_float32=["path:fourier"])
    )
    for found in (island(X), by_rule(X)):
        np.testing.assert_allclose(ops.convert_to_numpy(ops.cast(found, "float32"))[:, 0], 4.0)  # the sum of four ones


@pytest.mark.backends("tensorflow")
def test_an_operation_without_a_kernel_is_named_in_a_graph_too():
    class Positions(layers.Layer):
        def call(self, x):
            return x + ops.arange(4, dtype=self.compute_dtype)  # TensorFlow counts in bfloat16, and not in float16

    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(2)(Positions(name="positions")(layers.Dense(4)(inputs))))
    with pytest.raises(NoKernelError, match="'positions' .*computes in float16, for which an operation in its `call`"):
        mpkeras.apply_policy(model, "mixed_float16")
    rule = mpkeras.Policy("mixed_float16", keep_float32=["path:positions"])
    assert np.isfinite(mpkeras.apply_policy(model, rule).predict_on_batch(X)).all()


@pytest.mark.backends("tensorflow")
def test_two_dtypes_given_to_an_operation_without_a_kernel_are_mixed():
    class Complex(layers.Layer):
        def call(self, x):
            return ops.fft2((ops.expand_dims(x, 1), ops.ones((2, 1, 4))))[0]

    with pytest.raises(MixedDtypesError, match="mixes it with float32"):
        mpkeras.apply_policy(Model(Complex()), without_outputs("mixed_bfloat16"))(X)


class Around(keras.Model):
    def __init__(self, *parts):
        super().__init__()
        self.parts = parts

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [Attribute, Matrix])
def test_a_layer_that_makes_the_outputs_is_in_float32_and_mixes_nothing(make, policy):
    """Also where only a call tells, which is traced while the layer is in 16 bits: warnings are errors here."""
    inputs = keras.Input((4,))
    own = [make() for _ in range(2)]
    hidden = [layers.Dense(4) for _ in range(3)]
    graph = keras.Model(inputs, own[0](hidden[0](inputs)))
    around = Around(hidden[1], hidden[2], own[1])
    around(X)
    for model in (graph, around):
        mpkeras.apply_policy(model, policy)
        assert keras.backend.standardize_dtype(model(X).dtype) == "float32"
    assert [layer.compute_dtype for layer in own] == ["float32"] * 2
    assert hidden[1].compute_dtype == policy.removeprefix("mixed_")


def test_a_hidden_layer_is_named_where_only_a_call_tells_what_makes_the_outputs():
    hidden = Matrix(name="hidden")
    model = Around(hidden, layers.Dense(3))
    model(X)
    mpkeras.apply_policy(model, "mixed_float16")
    what = "Layer 'hidden'.*attribute `matrix` is float32"
    with (
        pytest.warns(UserWarning, match=what)
        if keras.backend.backend() == "jax"
        else pytest.raises(MixedDtypesError, match=what)
    ):
        model(X)


def test_the_way_back_leaves_nothing_on_the_layer():
    model = Model(Attribute())
    model(X)
    mpkeras.apply_policy(model, without_outputs("mixed_bfloat16"))
    assert "call" in vars(model.wrong)
    mpkeras.apply_policy(model, "float32")
    assert not {"call", "add_loss"} & set(vars(model.wrong))
    model(X)


@pytest.mark.backends("tensorflow")
def test_of_the_remedies_the_rule_helps_a_model_that_was_made_in_float32():
    """There `dtype="float32"` is what every layer has, and no choice."""

    def converted(policy):
        made = [layers.Dense(4), MadeInside(name="odd", dtype="float32"), layers.Dense(2)]
        model = keras.Sequential([keras.Input((4,)), *made])
        return mpkeras.apply_policy(model, policy)

    with pytest.raises(
        MixedDtypesError, match=r"`keep_float32=\(\.\.\., 'path:odd'\)`, or `dtype=\"float32\"` where it is made under"
    ):
        converted("mixed_bfloat16")
    rules = (*mpkeras.get_policy("mixed_bfloat16").keep_float32, "path:odd")
    assert converted(mpkeras.Policy("mixed_bfloat16", keep_float32=rules)).get_layer("odd").compute_dtype == "float32"


@pytest.mark.backends("tensorflow")
def test_a_lambda_whose_shape_keras_infers_is_named_with_remedies_that_help():
    """Keras says of what its function raises that the layer needs an `output_shape`, which would help nothing."""

    def converted(divide, keep_float32=(...,)):
        made = [layers.Dense(6), layers.Lambda(divide, name="shares"), layers.Dense(3)]
        model = keras.Sequential([keras.Input((4,)), *made])
        return mpkeras.apply_policy(model, mpkeras.Policy("mixed_bfloat16", keep_float32=keep_float32))

    def divide(x):
        return x / (ops.convert_to_tensor(0.25) + ops.sum(x, axis=-1, keepdims=True))

    def divide_as_told(x):
        return x / (ops.cast(ops.convert_to_tensor(0.25), x.dtype) + ops.sum(x, axis=-1, keepdims=True))

    with pytest.raises(MixedDtypesError) as error:
        converted(divide)
    told = str(error.value)
    assert "Layer 'shares' (Lambda) computes in bfloat16 and mixes it with float32" in told
    assert "`keras.ops.cast(..., x.dtype)`" in told and "keep_float32=(..., 'path:shares')" in told
    assert converted(divide_as_told).get_layer("shares").compute_dtype == "bfloat16"
    assert converted(divide, (..., "path:shares")).get_layer("shares").compute_dtype == "float32"
