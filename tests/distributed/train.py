"""Trains one model on one device and on many, spoils the rows of each shard in turn, and prints what happened as JSON.

The training is the same everywhere; only `devices.py` knows where it runs. The model is trained by `fit`, by a step of
`make_train_step`, or by a loop of one's own around the optimizer (torch).
"""

import json
import os
import sys
import warnings

from devices import ALONE, average_gradients, leave_the_ranks, local_values, many_devices, parser, print_result, wrapped

INITIAL_SCALE = 2.0**10
# The loss stays finite in float32; the gradient of a row with this target is beyond float16 at any scale used here.
OVERFLOWING_TARGET = 1e9
UNKNOWN = "input, and the first rank does not know its loss"


def main():
    own_parser = parser(__doc__)
    own_parser.add_argument("--by", choices=list(TRAINERS), default="fit")
    own_parser.add_argument("--eager", action="store_true")
    own_parser.add_argument("--in-run", action="store_true", help="call the step in `strategy.run`")
    options = own_parser.parse_args()
    devices = many_devices(options)
    trainer = TRAINERS[options.by]

    def made(**how):
        with devices.scope():
            return trainer(options, devices, **how)

    windows = {} if options.where == "ranks" else {"accumulate_steps": 2}
    result = {"one": train(trainer(options, ALONE), options)}
    if windows:
        result["accumulated"] = {"one": train(trainer(options, ALONE, **windows), options, with_fault=True)}
    if options.by == "step" and options.where == "mirrored":
        result["sizes"] = {"one": of_many_sizes(trainer(options, ALONE, **windows), options)}
    devices.begin_to_share()
    result |= inflict_faults(made(with_statistics=options.by != "loop"), options)
    result["many"] = train(made(), options)
    if windows:
        result["accumulated"]["many"] = train(made(**windows), options, with_fault=True)
    result |= MORE.get((options.by, options.where), lambda *arguments: {})(options, devices, made, result)
    print_result(result)


# ------------------------------------------------------------------------------------------ ways to train a model


class Fit:
    """`fit` of a model that is prepared, or with the callback that does it."""

    def __init__(
        self, options, devices, with_statistics=False, accumulate_steps=None, with_callback=False, jit_compile="auto"
    ):
        import keras

        import mpkeras

        class Counting(keras.Model):
            traces = 0

            def train_step(self, *args):
                self.traces += 1
                return super().train_step(*args)

        self.options, self.devices, self.callbacks = options, devices, []
        self.model = new_model(with_statistics, Counting)
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=accumulate_steps, name="sgd")
        self.model.compile(optimizer, "mse", run_eagerly=options.eager, jit_compile=jit_compile)
        # Low enough that no gradient overflows by chance.
        rule = mpkeras.DynamicLossScale(INITIAL_SCALE)
        if with_callback:
            self.callbacks = [mpkeras.callbacks.MixedPrecision("mixed_float16", loss_scale=rule)]
        else:
            mpkeras.prepare(self.model, "mixed_float16", loss_scale=rule)

    @property
    def optimizer(self):
        return self.model.optimizer

    @property
    def traces(self) -> int:
        return self.model.traces

    def everything(self) -> list:
        """The variables that a skipped step must not change."""
        return self.model.variables + self.optimizer.inner_optimizer.variables

    def __call__(self, x, y):
        x, y = self.devices.own_rows(x), self.devices.own_rows(y)
        if self.options.where != "multiworker" or not self.devices.is_shared:
            self.model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0, callbacks=self.callbacks)
            return
        # `fit` of Keras 3.15.1 fails under this strategy, with or without mpkeras (keras#20585): the model's train
        # step is run on the replicas as in a loop of one's own.
        import tensorflow as tf

        strategy = self.devices.strategy
        if not hasattr(self, "run_step"):
            with strategy.scope():
                self.optimizer.build(self.model.trainable_variables)
            self.run_step = tf.function(lambda values: strategy.run(self.model.train_step, args=(values,)))
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x))
        for values in strategy.experimental_distribute_dataset(data):
            self.run_step(values)


class Step:
    """A step of `make_train_step`, called with weights of examples, for a model with a loss of its own and a metric."""

    def __init__(self, options, devices, with_statistics=False, accumulate_steps=1):
        import keras

        import mpkeras

        class Counting(keras.losses.MeanSquaredError):
            traces = 0

            def __call__(self, *args, **kwargs):
                self.traces += 1
                return super().__call__(*args, **kwargs)

        self.options, self.devices = options, devices
        # The loop with windows gives the step whole batches, which it cuts for the replicas itself.
        self.is_plain = options.where == "mirrored" and not options.in_run and accumulate_steps > 1
        with mpkeras.policy_scope("mixed_float16"):
            self.model = new_model(with_statistics, kernel_regularizer=keras.regularizers.L2(0.1))
        if options.where == "ranks" and devices.is_shared:
            average_gradients(self.model, options.processes)
        self.loss, self.metric = Counting(), keras.metrics.MeanAbsoluteError(name="mae")
        self.step = mpkeras.make_train_step(
            self.model, new_optimizer(), self.loss, metrics=[self.metric], accumulate_steps=accumulate_steps
        )
        self.optimizer = self.step.optimizer
        if options.in_run and devices.strategy:
            import tensorflow as tf

            self.run = tf.function(lambda batch: devices.strategy.run(self.step, args=batch))

    @property
    def traces(self) -> int:
        return self.loss.traces

    def everything(self) -> list:
        return self.model.variables + self.optimizer.inner_optimizer.variables + self.metric.variables

    def __call__(self, x, y) -> dict:
        """Returns what the step reported: for each name a list, of one value for each local replica."""
        import numpy as np

        weights = np.linspace(0.5, 2.0, len(x), dtype="float32")
        batch = tuple(self.devices.own_rows(values) for values in (x, y, weights))
        strategy = self.devices.strategy
        if not strategy:
            return {name: [float(value)] for name, value in self.step(*batch).items()}
        import tensorflow as tf

        if not self.is_plain:
            data = tf.data.Dataset.from_tensor_slices(batch).batch(len(x))
            (batch,) = strategy.experimental_distribute_dataset(data)
        result = self.run(batch) if self.options.in_run else self.step(*batch)
        return {name: [float(v) for v in strategy.experimental_local_results(v)] for name, v in result.items()}

    def told(self, reported) -> dict:
        """What is said of a training, by its steps and by the metric itself."""
        with self.devices.scope():
            metric = float(self.metric.result())
        return {
            "losses": [result["loss"] for result in reported],
            "reported_metric": reported[-1]["mae"],
            "metric": metric,
            "skipped": [result["skipped"] for result in reported],
            "jit_compile": self.step._parts.jit_compile,
        }


class Loop:
    """A loop of one's own around the optimizer, in which ranks share a module of torch."""

    traces = 0

    def __init__(self, options, devices, with_statistics=False, hook=None):
        import mpkeras

        self.devices, self.knows_loss = devices, True
        with mpkeras.policy_scope("mixed_float16"):
            self.model = new_model(with_statistics)
        self.optimizer = new_optimizer()
        self.module = wrapped(self.model) if devices.is_shared else self.model
        if hook is not None:
            self.module.register_comm_hook(None, hook)

    def everything(self) -> list:
        return self.model.variables + self.optimizer.inner_optimizer.variables

    def __call__(self, x, y):
        import keras
        import torch

        x, y = (torch.tensor(self.devices.own_rows(values)) for values in (x, y))
        self.model.zero_grad()
        loss = keras.losses.MeanSquaredError()(y, self.module(x))
        scaled_loss = self.optimizer.scale_loss(loss) if self.knows_loss else loss * self.optimizer.loss_scale
        scaled_loss.backward()
        variables = self.model.trainable_variables
        self.optimizer.apply([variable.value.grad for variable in variables], variables)


TRAINERS = {"fit": Fit, "step": Step, "loop": Loop}


def new_optimizer():
    import keras

    import mpkeras

    rule = mpkeras.DynamicLossScale(INITIAL_SCALE)
    return mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9, name="sgd"), loss_scale=rule)


def new_model(with_statistics: bool, model_class=None, **options_of_last):
    import keras

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

    def dense(name, seed, **options):
        return keras.layers.Dense(8, kernel_initializer=keras.initializers.GlorotUniform(seed), name=name, **options)

    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    hidden = inputs
    if with_statistics:
        hidden = RunningMean()(keras.layers.BatchNormalization()(inputs))
    return (model_class or keras.Model)(inputs, dense("dense", 4, **options_of_last)(dense("hidden", 3)(hidden)))


# ------------------------------------------------------------------------------------------------ what is trained


def batches(options, count: int):
    import numpy as np

    rng = np.random.default_rng(0)
    rows = 4 * options.shards
    for _ in range(count):
        yield rng.normal(size=(rows, 4)).astype("float32"), rng.normal(size=(rows, 8)).astype("float32")


def train(trainer, options, with_fault=False) -> dict:
    """Trains on four batches; with a fault, a gradient of the last shard overflows in the third."""
    reported = []
    for i, (x, y) in enumerate(batches(options, 4)):
        if with_fault and i == 2:
            y[-1] = OVERFLOWING_TARGET
        reported.append(trainer(x, y))
    weights = [variable.numpy().tolist() for variable in trainer.model.trainable_variables]
    said = trainer.told(reported) if isinstance(trainer, Step) else {}
    return {"weights": weights, "scales": scales(trainer), **said}


def of_many_sizes(trainer, options) -> dict:
    """Trains on batches of 4, 3, 2 and 1 rows for each replica."""
    losses = []
    for i, (x, y) in enumerate(batches(options, 4)):
        rows = (4 - i) * options.shards
        losses += trainer(x[:rows], y[:rows])["loss"]
    return {"losses": losses, "traces": trainer.traces}


def inflict_faults(trainer, options) -> dict:
    """Spoils one row of each shard in turn, in the input and in the gradient alone."""
    import numpy as np

    (good_x, good_y), (x, y) = batches(options, 2)
    trainer(good_x, good_y)
    traces, layouts = trainer.traces, [layout_of(v) for v in trainer.everything()]
    found = []
    for shard in range(options.shards):
        for kind in ("input", "gradient", *((UNKNOWN,) if options.by == "loop" else ())):
            bad_x, bad_y = x.copy(), y.copy()
            row = shard * (len(x) // options.shards)
            if kind == "gradient":
                bad_y[row] = OVERFLOWING_TARGET
            else:
                bad_x[row, 0] = np.inf
            trainer.knows_loss = kind != UNKNOWN or options.process > 0
            before = [local_values(v) for v in trainer.everything()]
            skipped = int(local_values(trainer.optimizer.skipped_steps)[0])
            with warnings.catch_warnings():
                if kind == UNKNOWN:
                    # Says that the loss was not scaled by `scale_loss`.
                    warnings.simplefilter("ignore")
                reported = trainer(bad_x, bad_y)
            pairs = zip(before, map(local_values, trainer.everything()), strict=True)
            same = [all((a == b).all() for a, b in zip(*pair, strict=True)) for pair in pairs]
            fault = {
                "shard": shard,
                "kind": kind,
                "changed": [v.path for v, is_same in zip(trainer.everything(), same, strict=True) if not is_same],
                "new_skips": int(local_values(trainer.optimizer.skipped_steps)[0]) - skipped,
                "scales": scales(trainer),
            }
            if reported:
                fault["reported"] = {name: reported[name] for name in ("loss_scale", "skipped")}
                fault["reported"]["loss_is_finite"] = [bool(np.isfinite(loss)) for loss in reported["loss"]]
            found.append(fault)
    trainer.knows_loss = True
    before = local_values(trainer.model.trainable_variables[-1])[0]
    trainer(x, y)
    return {
        "faults": found,
        "learns_on": bool((local_values(trainer.model.trainable_variables[-1])[0] != before).any()),
        "finite": all(np.isfinite(values).all() for v in trainer.everything() for values in local_values(v)),
        "new_traces": trainer.traces - traces,
        "layouts_kept": layouts == [layout_of(v) for v in trainer.everything()],
        "part_shapes": {v.path: layout_of(v) for v in trainer.everything()},
        "audited": audited(trainer.model),
    }


def audited(model) -> list:
    import mpkeras

    return [line for line in mpkeras.audit(model).notes() if "share a batch" in line]


def scales(trainer) -> list:
    return [float(value) for value in local_values(trainer.optimizer.dynamic_scale)]


def layout_of(variable):
    """The shape of one device's part (JAX)."""
    sharding = getattr(variable.value, "sharding", None)
    return None if sharding is None else list(sharding.shard_shape(variable.value.shape))


# ------------------------------------------------------------------------------ what is asked of some places alone


def callback_and_xla(options, devices, made, result) -> dict:
    return {
        "callback": inflict_faults(made(with_statistics=True, with_callback=True), options),
        "xla": message_of(lambda: made(jit_compile=True)),
        "metrics": metrics_of_epochs(options, devices, with_callback=False),
        "metrics_with_callback": metrics_of_epochs(options, devices, with_callback=True),
        "gradients": logs_of_gradients(options, devices),
        "losses": losses_of_outputs(options, devices),
    }


def losses_of_outputs(options, devices) -> list:
    """Returns the losses of two outputs in the logs of the first batches of a training."""
    import keras
    import numpy as np

    import mpkeras

    with devices.scope():
        inputs = keras.Input((1,))
        outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("near", "far")}
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=options.eager, jit_compile=False)
        mpkeras.prepare(model, "mixed_float16")
    # With a shorter last batch Keras' step is traced for batches of any length.
    y = np.repeat([1.0, 3.0, 5.0**0.5], [8, 8, 4])[:, None]
    logs = model.fit(np.zeros((20, 1)), {"near": y, "far": 2 * y}, batch_size=8, shuffle=False, verbose=0).history
    return [float(logs["near_loss"][0]), float(logs["far_loss"][0])]


def logs_of_gradients(options, devices) -> list:
    """Returns norm and share of zeros of the gradients of eight rows, of which the last alone has a second column."""
    import keras
    import numpy as np

    import mpkeras

    with devices.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=options.eager, jit_compile=False)
        mpkeras.prepare(model, "mixed_float16", loss_scale=mpkeras.DynamicLossScale(INITIAL_SCALE))
    x = np.array([[1, 0, 0]] * 4 + [[0, 0, 0]] * 3 + [[0, 2, 0]], "float32")
    callbacks = [mpkeras.callbacks.NumericsMonitor(gradients=True)]
    logs = model.fit(x, np.zeros((8, 1)), batch_size=8, shuffle=False, verbose=0, callbacks=callbacks).history
    return [logs["grad_norm"][0], logs["zero_grad_fraction"][0]]


def metrics_of_epochs(options, devices, with_callback: bool) -> list:
    """Returns the logs of two epochs with validations: eight rows and eight that are skipped, and the latter alone."""
    import keras
    import numpy as np

    import mpkeras

    with devices.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        metrics = [keras.metrics.Precision(name="precision"), keras.metrics.TruePositives(name="true_positives")]
        # With an array of numbers, one for each class.
        metrics.append(keras.metrics.F1Score(threshold=0.5, name="f1"))
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=metrics, run_eagerly=options.eager, jit_compile=False)
        policy = {"policy": "mixed_float16", "loss_scale": mpkeras.DynamicLossScale(INITIAL_SCALE)}
        callbacks = [mpkeras.callbacks.MixedPrecision(**policy)] if with_callback else []
        if not with_callback:
            mpkeras.prepare(model, **policy)
    seen: list = []
    callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs))))
    x = np.array([0.75, 0.75, 0.75, 0.25, 0.75, 0.25, 0.25, 0.25] + 8 * [np.inf], "float32")[:, None]
    y = np.array([1, 0, 0, 1, 1, 1, 0, 0] + 8 * [1], "float32")[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how = {
            "batch_size": 8,
            "shuffle": False,
            "verbose": 0,
            "validation_data": (x[3:11], y[3:11]),
            "callbacks": callbacks,
        }
        epochs = [model.fit(x[i:], y[i:], **how).history for i in (0, 8)]
    logs = [{name: float(np.squeeze(values[-1])) for name, values in epoch.items()} for epoch in epochs]
    return [{**log, "seen_precision": float(told["precision"])} for log, told in zip(logs, seen, strict=True)]


def sizes_and_refusals(options, devices, made, result) -> dict:
    """Batches of many sizes, and the messages of what cannot work on several replicas."""
    import keras

    from mpkeras import make_train_step

    result["sizes"]["many"] = of_many_sizes(made(accumulate_steps=2), options)
    x, y = next(batches(options, 1))
    with devices.scope():
        model, optimizer = new_model(False), keras.optimizers.SGD(0.1)
        unbuilt = keras.Sequential([keras.layers.Dense(8)])
    run = devices.strategy.run
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])

    def train_a_model_made_outside():
        with devices.scope():
            make_train_step(plain, "sgd", "mse")(x, y)

    attempts = {
        "jit_compile": lambda: make_train_step(model, optimizer, "mse", jit_compile=True),
        "jit_compile in run": lambda: run(make_train_step(model, "sgd", "mse", jit_compile=True), args=(x, y)),
        "scalar loss": lambda: make_train_step(model, "sgd", lambda y, p: keras.ops.mean(p))(x, y),
        "optimizer made outside": lambda: make_train_step(model, keras.optimizers.SGD(0.1), "mse")(x, y),
        "odd rows": lambda: make_train_step(model, optimizer, "mse")(x[1:], y[1:]),
        "not built": lambda: run(make_train_step(unbuilt, "sgd", "mse"), args=(x, y)),
        "model made outside": train_a_model_made_outside,
    }
    return {
        "refused": {name: message_of(attempt) for name, attempt in attempts.items()},
        "state": goes_on(options, made),
    }


def goes_on(options, made) -> dict:
    """A step and another one that goes on from its state: what the state counts, and what both say of a next batch."""
    batch, next_batch = batches(options, 2)
    first, second = made(), made()
    first(*batch)
    second(*next_batch)
    state = first.step.state_dict()
    second.step.load_state_dict(state)
    told = [trainer.told([trainer(*next_batch)])["metric"] for trainer in (first, second)]
    weights = [[v.numpy().tolist() for v in trainer.model.variables] for trainer in (first, second)]
    (counted,) = (float(array) for key, array in state.items() if key.endswith("/count"))
    return {"counted": counted, "metric": told, "same_weights": weights[0] == weights[1]}


def message_of(attempt) -> str:
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return ""


def decisions_of_workers(options, devices, made, result) -> dict:
    import tensorflow as tf

    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

    def one_worker_knows_its_loss(optimizer):
        """Worker 1 alone has a NaN loss and says so; worker 0 scales its own by hand."""
        loss = tf.constant(float("nan") if index else 1.0)
        scaled_loss = optimizer.scale_loss(loss) if index else loss * optimizer.loss_scale
        return scaled_loss * tf.ones(1)

    def sum_in_16_bits(optimizer):
        """Worker k has a gradient of 8 + 8 k, at a scale of 8."""
        optimizer.scale_loss(tf.ones(()))
        return tf.constant([8.0 + 8.0 * index])

    return {
        "one_worker_knows_its_loss": one_update(devices, one_worker_knows_its_loss),
        "sum_in_16_bits": one_update(devices, sum_in_16_bits, all_reduce_dtype="float16"),
    }


def one_update(devices, scaled_grads, all_reduce_dtype=None) -> dict:
    """Applies what `scaled_grads` returns on each replica to a variable that is 0, at a scale of 8 and a rate of 1."""
    from all_reduce import made, run

    variable, optimizer = made(devices, all_reduce_dtype, [0.0])
    with warnings.catch_warnings():
        # Says that the loss was not scaled by `scale_loss`.
        warnings.simplefilter("ignore")
        run(devices, lambda: optimizer.apply([scaled_grads(optimizer)], [variable]))
    return {"value": variable.numpy().tolist(), "scale": float(optimizer.loss_scale)}


def hooks_and_own_gradients(options, devices, made, result) -> dict:
    """Torch's own 16-bit sums; and gradients that nobody reduced, of which the last rank's alone is not finite."""
    import keras
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    import mpkeras

    compressed = train(made(hook=default_hooks.fp16_compress_hook), options)
    variable = keras.Variable([1.0, 1.0, 1.0])
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=8.0)
    optimizer.build([variable])
    optimizer.scale_loss(torch.ones(()))
    optimizer.apply([torch.full((3,), torch.inf if options.process == options.processes - 1 else 1.0)], [variable])
    own = {"value": variable.numpy().tolist(), "skipped": int(optimizer.skipped_steps.value)}
    return {"compressed": compressed, "own_gradients": own}


def capsule_of_each_rank(options, devices, made, result) -> dict:
    """What each rank's file says of a step in which the last rank's gradients overflowed."""
    import tempfile

    import mpkeras

    trainer = made()
    good, (x, y) = batches(options, 2)
    trainer(*good)
    y[-1] = OVERFLOWING_TARGET
    trainer(x, y)
    path = f"{tempfile.mkdtemp()}/failure.mpk"
    trainer.step.capsule(path)
    # As somebody does who is sent the file.
    leave_the_ranks()
    capsule = mpkeras.load_capsule(path, custom_objects={"Counting": type(trainer.loss)})
    return {"capsule": {"devices": capsule.devices, **capsule.run(), "remedy": capsule.remedy()}}


MORE = {
    ("fit", "mirrored"): callback_and_xla,
    ("fit", "multiworker"): decisions_of_workers,
    ("step", "mirrored"): sizes_and_refusals,
    ("step", "ranks"): capsule_of_each_rank,
    ("loop", "ranks"): hooks_and_own_gradients,
}


if __name__ == "__main__":
    sys.exit(main())
