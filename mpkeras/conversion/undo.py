"""The way back from a conversion: after an error, or at the end of a trial."""

import contextlib

import keras

from mpkeras import _keras
from mpkeras._replaced import restore
from mpkeras.conversion.changes import changes_of, make_changes, planned_changes
from mpkeras.conversion.float8 import product_change
from mpkeras.conversion.graphs import refresh_graphs
from mpkeras.conversion.last import dtypes_of, last_conversion, set_last_conversion
from mpkeras.conversion.layer import save_as_made
from mpkeras.conversion.plan import layers_of
from mpkeras.conversion.remat import place, repeated_parts
from mpkeras.conversion.store_weights import store
from mpkeras.policies.heads import NO_HEADS
from mpkeras.policies.rules import is_quantized, layer_policy, set_layer_policy
from mpkeras.policies.survey import Survey


@contextlib.contextmanager
def converting(model, refreshes: bool = False, survey=None):
    """Context manager around a conversion: where it raises, the layers of `model` are as before.

    Where they change, Keras makes what `evaluate` and `predict` run anew. Not the train function: in the middle of a
    first step, where layers are converted, too, it must stay. `refreshes` says whether the conversion brings symbolic
    dtypes up to date; `survey` is one of the model as it is, if there is one.
    """
    survey = Survey(model) if survey is None else survey
    old_dtypes = _computed(survey)
    with put_back_on_error(model, refreshes, survey):
        yield
    survey = Survey(model)
    if _computed(survey) != old_dtypes:
        forget_functions(survey)


@contextlib.contextmanager
def put_back_on_error(model, refreshes: bool = False, survey=None):
    put_back = recorded(model, survey=survey)
    try:
        yield
    except Exception:
        put_back(refresh=refreshes)
        raise


def _store_as_before(model, dtypes):
    """Stores variables of `model` in `dtypes`, given as `(variable, dtype)`, where they are stored in others now."""
    changed = [(variable, dtype) for variable, dtype in dtypes if _keras.stored_dtype(variable) != dtype]
    if not changed:
        return
    store(model, changed)
    # On TensorFlow a function that was traced before trains variables that nobody else holds any more.
    forget_functions(model, "train_function")
    conversion = last_conversion(model)
    if conversion is not None:
        conversion.times_stored += 1


def _computed(survey) -> list:
    return [
        (layer, layer.compute_dtype, layer.variable_dtype, changes_of(layer), product_change(layer))
        for layer in survey.layers
    ]


def forget_functions(model, *names):
    """Lets `model` and the models inside make anew what they run outside training, and the functions in `names`."""
    # Functions that were compiled before hold the old dtypes. The one of `generate` is KerasHub's.
    for part in layers_of(model):
        if isinstance(part, keras.Model):
            for name in ("test_function", "predict_function", "generate_function", *names):
                if hasattr(part, name):
                    setattr(part, name, None)


def recorded(model, on=None, survey=None):
    """Returns a function that gives every layer of `model`, or of `on`, a copy of it, what it computes in now.

    `survey` is one of `model` as it is, if there is one. Called with `refresh=False`, the function leaves the symbolic
    dtypes as they are, which only new graphs are made of: on a large model that is quick.
    """
    on = model if on is None else on
    layers = layers_of(model if survey is None else survey)
    old_values = [
        (target, layer_policy(layer), changes_of(layer), product_change(layer))
        for layer, target in zip(layers, layers if on is model else layers_of(on), strict=True)
    ]
    stored = [(v, _keras.stored_dtype(v)) for v in on.variables]
    made_inputs = [(target, _keras.dtype_of_made_input(target)) for target, *_ in old_values]
    mask_casts = [(cast, cast.dtype) for target, *_ in old_values for cast in _keras.casts_of_masks(target)]
    earlier = last_conversion(on)

    def put_back(refresh: bool = True):
        for layer, policy, *_ in old_values:
            if not is_quantized(layer) and layer_policy(layer) is not policy:
                set_layer_policy(layer, policy)
        products = {id(layer): change for layer, *_, change in old_values if change is not None}
        heads, trains = (NO_HEADS, False) if earlier is None else (earlier.shown(), earlier.trains)
        names = planned_changes(on, dtypes_of(on), products, heads, trains=trains)
        place(Survey(on), repeated_parts(Survey(on), None if earlier is None else earlier.policy.remat))
        for layer, *_, changes, _ in old_values:
            make_changes(layer, names[id(layer)])
            # A layer that was made in 16 bits, and never converted, has had none.
            for name, kind in changes_of(layer) - changes:
                restore(layer, name, kind=kind)
        for layer, dtype in made_inputs:
            if dtype is not None and _keras.dtype_of_made_input(layer) is not None:
                _keras.set_dtype_of_made_input(layer, dtype)
        for cast, dtype in mask_casts:
            _keras.set_dtype_of_cast(cast, dtype)
        save_as_made(on, on.dtype_policy)
        # Doors that are given no policy go by it.
        set_last_conversion(on, earlier)
        _store_as_before(on, stored)
        if refresh:
            refresh_graphs(on)

    return put_back
