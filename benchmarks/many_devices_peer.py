"""The process of `many_devices.py` that compiles one train step of stock Keras, for devices that need not be there.

`many_devices_peer.py ASKED PATH`: ASKED is JSON, the answer is written to PATH. The step is `keras.Model.train_step`
with a stock optimizer, compiled as `keras.Model.fit` compiles it; what of mpkeras is imported says which devices there
are, and counts what is in the program.
"""

import json
import sys
from pathlib import Path

import jax
import keras

from gpu.cases import Case, TransformerSizes
from many_devices import build_case
from mpkeras.seams import Blueprint, devices
from mpkeras.tools.forecast.compiling import facts_of
from mpkeras.tools.forecast.targets import find_target


def main():
    """Compiles what is asked for."""
    asked, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    *case, sizes = asked["case"]
    case = Case(*case, TransformerSizes(**sizes))
    path.write_text(json.dumps(said_of(case, asked["device"], asked["count"], asked["layout"], asked["policy"])))


def said_of(case: Case, device: str, count: int, layout: str, policy: str) -> dict:
    """Returns what the compiler of `device` says of the step, by the keys of `Forecast.to_dict`."""
    backend = devices.backend_module()
    targets = backend.compile_devices(find_target(device), count)
    keras.config.set_dtype_policy(policy)
    model = build_case(case)
    model.compile(keras.optimizers.Adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    shape = (case.batch_size * count, case.sizes.length)
    if count == 1:
        program = compiled(model, shape, lambda variable: jax.sharding.SingleDeviceSharding(targets[0]))
    else:
        distribution = laid_out(model, layout, backend.MeshOfDevices((count,), ["batch"], targets))
        Blueprint.lay_out(model.variables, distribution)
        with distribution.scope():
            program = compiled(
                model,
                shape,
                lambda variable: distribution.get_variable_layout(variable).backend_layout,
                distribution.get_data_layout(shape).backend_layout,
            )
    return {**facts_of(program, [variable.path for variable in model.trainable_variables]), "travels_otherwise": None}


def laid_out(model, layout: str, mesh):
    """Returns Keras' own distribution, in which each weight lies as `mpkeras.sharded` lays it."""
    if layout == "data":
        return keras.distribution.DataParallel(device_mesh=mesh)
    ours = Blueprint.model_parallel(mesh, shard=layout)
    layouts = keras.distribution.LayoutMap(mesh)
    for variable in model.variables:
        layouts[variable.path] = keras.distribution.TensorLayout(ours.split(variable.shape).axes, mesh)
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def compiled(model, shape, sharding_of, data_sharding=None):
    """Returns the program that `keras.Model.fit` makes of the step, for a batch of tokens of this shape.

    Args:
        model: The model, compiled, without values.
        shape: Rows and length.
        sharding_of: Says where a variable lies.
        data_sharding: Says where a batch lies; `None`: as a variable.
    """
    with keras.StatelessScope(initialize_variables=False):
        model.optimizer.build(model.trainable_variables)
    groups = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
    state = tuple([_described(variable, sharding_of(variable)) for variable in group] for group in groups)
    state = (*state, [_described(variable, sharding_of(variable)) for variable in model.metrics_variables])
    of_data = sharding_of(None) if data_sharding is None else data_sharding
    tokens = jax.ShapeDtypeStruct(shape, "int32", sharding=of_data)
    options = {}
    if data_sharding is not None:
        options["out_shardings"] = (None, jax.tree.map(lambda part: part.sharding, state))
    return jax.jit(model.train_step, donate_argnums=0, **options).lower(state, (tokens, tokens)).compile()


def _described(variable, sharding):
    return jax.ShapeDtypeStruct(tuple(variable.shape), variable.dtype, sharding=sharding)


if __name__ == "__main__":
    main()
