"""Steps of others, compiled for a device that need not be there: `python -m gpu.peer_programs`, on JAX, for one.

Stock Keras as its guide to JAX writes a step, and jmp and flax with optax.adam as their documentation does, all on the
same Keras model under the same stock policy, so that what differs is the step. It reads what to compile as one JSON
object and writes what the compiler says as another.
"""

import json
import sys

import jax
import keras
from keras import ops

from gpu import keras_models
from gpu.cases import case_of
from gpu.keras_trainer import StockStep
from mpkeras.devices._jax import compile_devices
from mpkeras.tools.forecast.compiling import facts_of
from mpkeras.tools.forecast.targets import find_target


def compile_step(model: str, device: str, policy: str, step: str, is_tiny: bool) -> dict:
    """Returns what the compiler says of one step, as `mpkeras.tools.forecast.compiling` says it of ours.

    A TPU multiplies no float16 where stock Keras asks for sums in float32: then it is `{"refused": the reason}`.

    Args:
        model: One of `gpu.cases.CASES`.
        device: As `mpkeras.forecast` takes it.
        policy: One of Keras' own; under `"mixed_float16"` the loss is scaled, as each library does it.
        step: `"keras"`, `"jmp"` or `"flax"`.
        is_tiny: Whether to compile the model of the tests.
    """
    keras.config.set_dtype_policy(policy)
    case = case_of(model, is_tiny)
    network = keras_models.build(case)
    scales = policy == "mixed_float16"
    state, function = (_keras_step if step == "keras" else _optax_step)(network, step, scales)
    (target_device,) = compile_devices(find_target(device), 1)
    sharding = jax.sharding.SingleDeviceSharding(target_device)

    def on_device(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    x = keras.KerasTensor((case.batch_size, *network.inputs[0].shape[1:]), network.inputs[0].dtype)
    y = keras.KerasTensor((case.batch_size, *network.outputs[0].shape[1:-1]), "int32")
    batch = [on_device(tensor) for tensor in (x, y)]
    try:
        program = function.lower(jax.tree.map(on_device, state), *batch).compile()
    except jax.errors.JaxRuntimeError as error:
        return {"refused": str(error).splitlines()[0]}
    return facts_of(program)


def _loss(y, y_pred):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, y_pred)


def _keras_step(model, step, scales):
    del step
    optimizer = keras.optimizers.Adam()
    stock = StockStep(model, keras.optimizers.LossScaleOptimizer(optimizer) if scales else optimizer, _loss)
    return stock.state, stock.function


def _optax_step(model, step, scales):
    import optax

    from peers_jax import guarded_update, make_scale, value_and_grads

    if not scales:
        raise ValueError(f"Expected mixed_float16: without loss scaling {step} has no part in a step.")
    optimizer = optax.adam(1e-3)
    params, statistics = (
        [variable.value for variable in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    )

    # Of numbers alone: jmp's own object refuses the descriptions of arrays that a program is compiled from.
    numbers, structure = jax.tree.flatten(make_scale(step))

    def update(state, x, y):
        params, statistics, opt_state, numbers = state
        loss_scale = jax.tree.unflatten(structure, numbers)

        def loss_fn(params):
            y_pred, updated = model.stateless_call(params, statistics, x, training=True)
            return _loss(y, ops.cast(y_pred, "float32")), updated

        loss_scale, finite, (loss, updated), grads = value_and_grads(loss_scale, loss_fn, params, has_aux=True)
        params, opt_state = guarded_update(optimizer, finite, grads, params, opt_state)
        return (params, updated, opt_state, jax.tree.leaves(loss_scale)), loss

    state = params, statistics, optimizer.init(params), numbers
    return state, jax.jit(update, donate_argnums=0)


if __name__ == "__main__":
    print(json.dumps(compile_step(**json.loads(sys.stdin.read()))))
