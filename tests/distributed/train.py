"""Trains one model on one device or on many, spoils the rows of each shard in turn, and prints what happened as JSON.

The training is the same everywhere; only `many_devices` knows where it runs. Devices and processes are set up
before a backend does anything else, so the tests run this as a program.
"""

import argparse
import contextlib
import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Keras imports them wherever they are installed, which takes longer than much of what is trained here.
sys.modules.update(dict.fromkeys(("matplotlib", "sklearn")))

INITIAL_SCALE = 2.0**10
# The loss stays finite in float32; the gradient of a row with this target is beyond float16 at any scale used here.
OVERFLOWING_TARGET = 1e9


def parse_arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("where", choices=["mirrored", "multiworker", "data_parallel", "model_parallel"])
    parser.add_argument("--shards", type=int, default=2, help="parts that the batch is cut into")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--process", type=int, default=0, help="number of this process (JAX)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--port", type=int, default=0, help="port of the coordinator on 127.0.0.1 (JAX)")
    parser.add_argument("--in-run", action="store_true", help="call the step in `strategy.run` (own_loop.py)")
    return parser.parse_args()


def main():
    options = parse_arguments(__doc__)
    scope, batch = many_devices(options)

    import keras

    import mpkeras

    result = {}
    keras.utils.set_random_seed(0)
    with scope():
        model = compiled_model(options, with_statistics=True)
    result.update(inflict_faults(model, options, batch))
    result["audited"] = [line for line in mpkeras.audit(model).notes() if "share a batch" in line]
    keras.utils.set_random_seed(0)
    with scope():
        model = compiled_model(options, with_statistics=False)
    result["many"] = train(model, options, batch)
    keras.utils.set_random_seed(0)
    with scope():
        model = compiled_model(options, with_statistics=False, accumulate_steps=2)
    result["accumulated"] = {"many": train_with_a_fault(model, options, batch)}
    if options.where == "multiworker":
        result["one_worker_knows_its_loss"] = one_worker_knows_its_loss(model.distribute_strategy)
        result["sum_in_16_bits"] = sum_in_16_bits(model.distribute_strategy)
    one_device()
    result["one"] = train(compiled_model(options, with_statistics=False), options, lambda x: x)
    model = compiled_model(options, with_statistics=False, accumulate_steps=2)
    result["accumulated"]["one"] = train_with_a_fault(model, options, lambda x: x)
    print("RESULT " + json.dumps(result))


def many_devices(options):
    """Sets up the devices; returns the scope to make a model in, and what this process feeds of a batch."""
    if options.where in ("mirrored", "multiworker"):
        os.environ["KERAS_BACKEND"] = "tensorflow"
        import tensorflow as tf

        if options.where == "multiworker":
            # Reads TF_CONFIG. Collectives must be set up before anything else runs.
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
        else:
            cpu = tf.config.list_physical_devices("CPU")[0]
            logical = [tf.config.LogicalDeviceConfiguration()] * options.shards
            tf.config.set_logical_device_configuration(cpu, logical)
            strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(options.shards)])
        # Every worker reads the whole batch: Keras gives each replica its part.
        return strategy.scope, lambda values: values

    os.environ["KERAS_BACKEND"] = "jax"
    local = 8 // options.processes
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={local}"
    import jax

    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    import keras

    if options.processes > 1:
        keras.distribution.initialize(f"127.0.0.1:{options.port}", options.processes, options.process)
    if options.where == "data_parallel":
        distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    else:
        mesh = keras.distribution.DeviceMesh((options.shards, 8 // options.shards), ["batch", "model"])
        layout = keras.distribution.LayoutMap(mesh)
        layout[".*kernel"] = (None, "model")
        layout[".*bias"] = ("model",)
        distribution = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    keras.distribution.set_distribution(distribution)

    def own_rows(values):
        rows = len(values) // options.processes
        return values[options.process * rows : (options.process + 1) * rows]

    return contextlib.nullcontext, own_rows


def backend() -> str:
    return os.environ["KERAS_BACKEND"]


def one_device():
    import keras

    if backend() == "jax":
        keras.distribution.set_distribution(None)


def new_model(with_statistics: bool, **options_of_last):
    import keras

    class Counting(keras.Model):
        traces = 0

        def train_step(self, *args):
            self.traces += 1
            return super().train_step(*args)

    class RunningMean(keras.layers.Layer):
        """Passes its inputs on and keeps their mean, with one value for all replicas."""

        def build(self, input_shape):
            self.mean = self.add_weight(
                shape=input_shape[1:], initializer="zeros", trainable=False, aggregation="mean", name="mean"
            )

        def call(self, inputs):
            new = keras.ops.cast(keras.ops.mean(inputs, axis=0), self.mean.dtype)
            self.mean.assign(0.9 * self.mean + 0.1 * new)
            return inputs

    def dense(units, seed, **options):
        return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed), **options)

    inputs = keras.Input((4,))
    hidden = inputs
    if with_statistics:
        hidden = RunningMean()(keras.layers.BatchNormalization()(inputs))
    return Counting(inputs, dense(8, 4, **options_of_last)(dense(8, 3)(hidden)))


def compiled_model(options, with_statistics: bool, accumulate_steps=None):
    import keras

    import mpkeras

    model = new_model(with_statistics)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=accumulate_steps)
    model.compile(optimizer, "mse", run_eagerly=options.eager, jit_compile="auto")
    # Low enough that no gradient overflows by chance.
    return mpkeras.prepare(model, "mixed_float16", loss_scale=mpkeras.DynamicLossScale(INITIAL_SCALE))


def batches(options, count: int):
    import numpy as np

    rng = np.random.default_rng(0)
    rows = 4 * options.shards
    for _ in range(count):
        yield rng.normal(size=(rows, 4)).astype("float32"), rng.normal(size=(rows, 8)).astype("float32")


def fit(model, x, y, options, batch):
    x, y = batch(x), batch(y)
    if not is_multi_worker(model):
        model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
        return
    # `fit` of Keras 3.15.1 fails under this strategy, with or without mpkeras (keras#20585): the model's train
    # step is run on the replicas as in a loop of one's own.
    import tensorflow as tf

    strategy = model.distribute_strategy
    if not hasattr(model, "run_step"):
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)

        def run_step(values):
            strategy.run(model.train_step, args=(values,))

        model.run_step = run_step if options.eager else tf.function(run_step)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x))
    for values in strategy.experimental_distribute_dataset(data):
        model.run_step(values)


def is_multi_worker(model) -> bool:
    if backend() != "tensorflow":
        return False
    import tensorflow as tf

    return isinstance(model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy)


def train(model, options, batch):
    """Trains on three batches without faults."""
    for x, y in batches(options, 3):
        fit(model, x, y, options, batch)
    return weights_and_scales(model)


def train_with_a_fault(model, options, batch):
    """Trains on two windows of two batches; a gradient of the last shard overflows in the third batch."""
    for i, (x, y) in enumerate(batches(options, 4)):
        if i == 2:
            y[-1] = OVERFLOWING_TARGET
        fit(model, x, y, options, batch)
    return weights_and_scales(model)


def weights_and_scales(model):
    import keras

    weights = [keras.ops.convert_to_numpy(v).tolist() for v in model.trainable_variables]
    return {"weights": weights, "scales": scales(model)}


def inflict_faults(model, options, batch) -> dict:
    """Spoils one row of each shard in turn, in the input and in the gradient alone."""
    import numpy as np

    (good_x, good_y), (x, y) = batches(options, 2)
    fit(model, good_x, good_y, options, batch)
    traces = model.traces
    layouts = [layout_of(v) for v in everything(model)]
    found = []
    for shard in range(options.shards):
        for kind in ("input", "gradient"):
            bad_x, bad_y = x.copy(), y.copy()
            row = shard * (len(x) // options.shards)
            if kind == "input":
                bad_x[row, 0] = np.inf
            else:
                bad_y[row] = OVERFLOWING_TARGET
            before = [local_values(v) for v in everything(model)]
            skipped = int(local_values(model.optimizer.skipped_steps)[0])
            fit(model, bad_x, bad_y, options, batch)
            after = [local_values(v) for v in everything(model)]
            same = [all((a == b).all() for a, b in zip(*p, strict=True)) for p in zip(before, after, strict=True)]
            found.append(
                {
                    "shard": shard,
                    "kind": kind,
                    "changed": [v.path for v, is_same in zip(everything(model), same, strict=True) if not is_same],
                    "new_skips": int(local_values(model.optimizer.skipped_steps)[0]) - skipped,
                    "scales": scales(model),
                }
            )
    before = local_values(model.trainable_variables[-1])[0]
    fit(model, x, y, options, batch)
    return {
        "faults": found,
        "learns_on": bool((local_values(model.trainable_variables[-1])[0] != before).any()),
        "finite": all(np.isfinite(values).all() for v in everything(model) for values in local_values(v)),
        "new_traces": model.traces - traces,
        "layouts_kept": layouts == [layout_of(v) for v in everything(model)],
        "part_shapes": {v.path: layout_of(v) for v in everything(model)},
    }


def one_worker_knows_its_loss(strategy) -> dict:
    """Worker 1 alone has a NaN loss and says so; worker 0 scales its own by hand."""
    import warnings

    import keras
    import tensorflow as tf

    import mpkeras

    with strategy.scope():
        variable = keras.Variable([1.0, 1.0, 1.0])
        optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
        optimizer.build([variable])
    knows_loss = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1

    @tf.function
    def run_step():
        def step():
            loss = tf.constant(float("nan") if knows_loss else 1.0)
            scaled_loss = optimizer.scale_loss(loss) if knows_loss else loss * optimizer.loss_scale
            optimizer.apply([scaled_loss * tf.ones(3)], [variable])

        strategy.run(step)

    with warnings.catch_warnings():
        # Says that the loss was not scaled by `scale_loss`.
        warnings.simplefilter("ignore")
        run_step()
    return {"value": variable.numpy().tolist(), "scale": float(optimizer.loss_scale)}


def sum_in_16_bits(strategy) -> dict:
    """Worker k has a gradient of 8 + 8 k, at a scale of 8."""
    import keras
    import tensorflow as tf

    import mpkeras

    with strategy.scope():
        variable = keras.Variable([0.0])
        optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0, all_reduce_dtype="float16")
        optimizer.build([variable])

    @tf.function
    def run_step():
        def step():
            index = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            optimizer.scale_loss(tf.ones(()))
            optimizer.apply([tf.reshape(8.0 + 8.0 * index, [1])], [variable])

        strategy.run(step)

    run_step()
    return {"value": variable.numpy().tolist(), "scale": float(optimizer.loss_scale)}


def everything(model) -> list:
    """The variables that a skipped step must not change."""
    return model.trainable_variables + model.non_trainable_variables + model.optimizer.inner_optimizer.variables


def scales(model) -> list:
    return [float(value) for value in local_values(model.optimizer.dynamic_scale)]


def local_values(variable) -> list:
    """The value that each device of this process holds."""
    import numpy as np

    value = variable.value
    if backend() == "jax":
        return [np.array(shard.data) for shard in value.addressable_shards]
    return [v.numpy() for v in getattr(value, "values", (value,))]


def layout_of(variable):
    """The shape of one device's part (JAX)."""
    sharding = getattr(variable.value, "sharding", None)
    return None if sharding is None else list(sharding.shard_shape(variable.value.shape))


if __name__ == "__main__":
    sys.exit(main())
