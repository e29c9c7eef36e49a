"""`train.py` with a loop of one's own around `make_train_step`, and what the step reports, as JSON."""

import json
import sys
import types

from train import (
    INITIAL_SCALE,
    OVERFLOWING_TARGET,
    batches,
    everything,
    layout_of,
    local_values,
    many_devices,
    new_model,
    one_device,
    parse_arguments,
    scales,
)


def main():
    options = parse_arguments(__doc__)
    scope, own_rows = many_devices(options)
    result = {}
    with scope():
        loop = Loop(options, own_rows, with_statistics=True)
    result.update(inflict_faults(loop, options))
    with scope():
        loop = Loop(options, own_rows)
    result["many"] = train(loop, options)
    with scope():
        loop = Loop(options, own_rows, accumulate_steps=2)
    result["accumulated"] = {"many": train(loop, options, with_fault=True)}
    if options.where == "mirrored":
        with scope():
            # One that gives the step whole batches.
            loop = Loop(options, own_rows, accumulate_steps=2)
        result["sizes"] = {"many": of_many_sizes(loop, options)}
        result["refused"] = refused(options, scope)
    one_device()
    alone = types.SimpleNamespace(**{**vars(options), "where": "one device"})
    result["one"] = train(Loop(alone, lambda x: x), options)
    if options.where == "mirrored":
        result["sizes"]["one"] = of_many_sizes(Loop(alone, lambda x: x, accumulate_steps=2), options)
    result["accumulated"]["one"] = train(Loop(alone, lambda x: x, accumulate_steps=2), options, with_fault=True)
    print("RESULT " + json.dumps(result))


class Loop:
    """A step and how it is called where this program runs; `model`, `optimizer` and `metric` are its parts."""

    def __init__(self, options, own_rows, with_statistics=False, accumulate_steps=1):
        import keras

        import mpkeras
        from mpkeras.training.step import make_train_step

        class Counting(keras.losses.MeanSquaredError):
            traces = 0

            def __call__(self, *args, **kwargs):
                self.traces += 1
                return super().__call__(*args, **kwargs)

        keras.utils.set_random_seed(0)
        self.options = options
        self.own_rows = own_rows
        # One of the loops gives the step whole batches, which it cuts for the replicas itself.
        self.is_plain = options.where == "mirrored" and not options.in_run and accumulate_steps > 1
        with mpkeras.policy_scope("mixed_float16"):
            self.model = new_model(with_statistics, kernel_regularizer=keras.regularizers.L2(0.1))
        self.loss = Counting()
        self.metric = keras.metrics.MeanAbsoluteError(name="mae")
        # Low enough that no gradient overflows by chance.
        rule = mpkeras.DynamicLossScale(INITIAL_SCALE)
        optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), loss_scale=rule)
        self.step = make_train_step(
            self.model, optimizer, self.loss, metrics=[self.metric], accumulate_steps=accumulate_steps
        )
        self.optimizer = self.model.optimizer = self.step.optimizer
        self.has_strategy = options.where in ("mirrored", "multiworker")
        if options.in_run and self.has_strategy:
            import tensorflow as tf

            self.run = tf.function(lambda batch: self.model.distribute_strategy.run(self.step, args=batch))

    def __call__(self, x, y, weights) -> dict:
        """Returns what the step reported: for each name a list, of one value for each local replica."""
        batch = tuple(self.own_rows(values) for values in (x, y, weights))
        if not self.has_strategy:
            return {name: [float(value)] for name, value in self.step(*batch).items()}
        import tensorflow as tf

        strategy = self.model.distribute_strategy
        data = tf.data.Dataset.from_tensor_slices(batch).batch(len(x))
        if not self.is_plain:
            (batch,) = strategy.experimental_distribute_dataset(data)
        result = self.run(batch) if self.options.in_run else self.step(*batch)
        return {name: [float(v) for v in strategy.experimental_local_results(v)] for name, v in result.items()}

    def metric_over_all(self) -> float:
        if not self.has_strategy:
            return float(self.metric.result())
        with self.model.distribute_strategy.scope():
            return float(self.metric.result())

    def everything(self) -> list:
        return everything(self.model) + self.metric.variables


def weights_of(x):
    import numpy as np

    return np.linspace(0.0, 2.0, len(x), dtype="float32")


def train(loop, options, with_fault=False) -> dict:
    """Trains on four weighted batches; with a fault, a gradient of the last shard overflows in the third."""
    import keras

    reported = []
    for i, (x, y) in enumerate(batches(options, 4)):
        if with_fault and i == 2:
            y[-1] = OVERFLOWING_TARGET
        reported.append(loop(x, y, weights_of(x)))
    weights = [keras.ops.convert_to_numpy(v).tolist() for v in loop.model.trainable_variables]
    return {
        "weights": weights,
        "scales": scales(loop.model),
        "losses": [result["loss"] for result in reported],
        "reported_metric": reported[-1]["mae"],
        "metric": loop.metric_over_all(),
        "skipped": [result["skipped"] for result in reported],
        "jit_compile": loop.step._parts.jit_compile,
    }


def of_many_sizes(loop, options) -> dict:
    """Trains on batches of 4, 3, 2 and 1 rows for each replica."""
    losses = []
    for i, (x, y) in enumerate(batches(options, 4)):
        rows = (4 - i) * options.shards
        losses += loop(x[:rows], y[:rows], weights_of(x[:rows]))["loss"]
    return {"losses": losses, "traces": loop.loss.traces}


def inflict_faults(loop, options) -> dict:
    """Spoils one row of each shard in turn, in the input and in the gradient alone."""
    import numpy as np

    (good_x, good_y), (x, y) = batches(options, 2)
    weights = np.ones(len(x), "float32")
    loop(good_x, good_y, weights)
    traces = loop.loss.traces
    layouts = [layout_of(v) for v in loop.everything()]
    found = []
    for shard in range(options.shards):
        for kind in ("input", "gradient"):
            bad_x, bad_y = x.copy(), y.copy()
            row = shard * (len(x) // options.shards)
            if kind == "input":
                bad_x[row, 0] = np.inf
            else:
                bad_y[row] = OVERFLOWING_TARGET
            before = [local_values(v) for v in loop.everything()]
            skipped = int(local_values(loop.optimizer.skipped_steps)[0])
            reported = loop(bad_x, bad_y, weights)
            after = [local_values(v) for v in loop.everything()]
            same = [all((a == b).all() for a, b in zip(*p, strict=True)) for p in zip(before, after, strict=True)]
            found.append(
                {
                    "shard": shard,
                    "kind": kind,
                    "changed": [v.path for v, is_same in zip(loop.everything(), same, strict=True) if not is_same],
                    "new_skips": int(local_values(loop.optimizer.skipped_steps)[0]) - skipped,
                    "scales": scales(loop.model),
                    "reported": {
                        "loss_is_finite": [bool(np.isfinite(v)) for v in reported["loss"]],
                        "loss_scale": reported["loss_scale"],
                        "skipped": reported["skipped"],
                    },
                }
            )
    before = local_values(loop.model.trainable_variables[-1])[0]
    loop(x, y, weights)
    return {
        "faults": found,
        "learns_on": bool((local_values(loop.model.trainable_variables[-1])[0] != before).any()),
        "finite": all(np.isfinite(values).all() for v in loop.everything() for values in local_values(v)),
        "new_traces": loop.loss.traces - traces,
        "layouts_kept": layouts == [layout_of(v) for v in loop.everything()],
        "part_shapes": {v.path: layout_of(v) for v in loop.everything()},
    }


def refused(options, scope) -> dict:
    """The messages of what cannot work on several replicas."""
    import keras

    from mpkeras.training.step import make_train_step

    x, y = next(batches(options, 1))
    with scope():
        model = new_model(False)
        optimizer = keras.optimizers.SGD(0.1)
        unbuilt = keras.Sequential([keras.layers.Dense(8)])
    strategy = model.distribute_strategy
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
    attempts = {
        "jit_compile": lambda: make_train_step(model, optimizer, "mse", jit_compile=True),
        "jit_compile in run": lambda: strategy.run(make_train_step(model, "sgd", "mse", jit_compile=True), args=(x, y)),
        "scalar loss": lambda: make_train_step(model, "sgd", lambda y, p: keras.ops.mean(p))(x, y),
        "optimizer made outside": lambda: make_train_step(model, keras.optimizers.SGD(0.1), "mse")(x, y),
        "odd rows": lambda: make_train_step(model, optimizer, "mse")(x[1:], y[1:]),
        "not built": lambda: strategy.run(make_train_step(unbuilt, "sgd", "mse"), args=(x, y)),
        "model made outside": lambda: _in(scope, lambda: make_train_step(plain, "sgd", "mse")(x, y)),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            messages[name] = ""
        except ValueError as error:
            messages[name] = str(error)
    return messages


def _in(scope, function):
    with scope():
        return function()


if __name__ == "__main__":
    sys.exit(main())
