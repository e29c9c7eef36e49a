"""Sets up the devices of a program of this folder, before a backend does anything else, and prints what it has found.

The programs tell the tests in the last line that they print: `RESULT` and JSON.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Keras imports them wherever they are installed, which takes longer than much of what is trained here.
sys.modules.update(dict.fromkeys(("matplotlib", "sklearn")))

BACKENDS = {
    "mirrored": "tensorflow",
    "multiworker": "tensorflow",
    "data_parallel": "jax",
    "model_parallel": "jax",
    "ranks": "torch",
}


class Devices(NamedTuple):
    """Where a model is trained."""

    # The scope to make a model in.
    scope: Callable = contextlib.nullcontext
    # What this process feeds of a batch.
    own_rows: Callable = lambda values: values
    # From this call on devices or ranks share batches; until then each trains alone.
    begin_to_share: Callable = lambda: None
    # The strategy of TensorFlow; elsewhere there is none.
    strategy: Any = None
    is_shared: bool = True


ALONE = Devices(is_shared=False)


def parser(description) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description)
    options.add_argument("where", choices=list(BACKENDS))
    options.add_argument("--shards", type=int, default=2, help="parts that the batch is cut into")
    options.add_argument("--devices", type=int, default=8, help="of all processes together (JAX)")
    options.add_argument("--process", type=int, default=0, help="number of this process (JAX, torch)")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--port", type=int, default=0, help="port of the coordinator on 127.0.0.1")
    return options


def many_devices(options) -> Devices:
    os.environ["KERAS_BACKEND"] = BACKENDS[options.where]
    return {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[BACKENDS[options.where]](options)


def _tensorflow(options) -> Devices:
    import tensorflow as tf

    if options.where == "multiworker":
        # Reads TF_CONFIG. Collectives must be set up before anything else runs.
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * options.shards)
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(options.shards)])
    # Every worker reads the whole batch: Keras gives each replica its part.
    return Devices(strategy.scope, strategy=strategy)


def _jax(options) -> Devices:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices // options.processes}"
    import jax

    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    import keras

    if options.processes > 1:
        keras.distribution.initialize(f"127.0.0.1:{options.port}", options.processes, options.process)
    if options.where == "data_parallel":
        distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    else:
        shape = (options.shards, options.devices // options.shards)
        layout = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, ["batch", "model"]))
        layout[".*kernel"] = (None, "model")
        layout[".*bias"] = ("model",)
        # As for RMSNormalization: it fits the numbers of a `loss_scale_optimizer`, too.
        layout[".*scale"] = ("model",)
        distribution = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    return Devices(
        own_rows=_rows_of(options),
        begin_to_share=lambda: keras.distribution.set_distribution(distribution),
    )


def _torch(options) -> Devices:
    import datetime

    import torch

    torch.set_num_threads(1)

    def begin_to_share():
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{options.port}",
            rank=options.process,
            world_size=options.processes,
            timeout=datetime.timedelta(seconds=60),
        )

    return Devices(own_rows=_rows_of(options), begin_to_share=begin_to_share)


def _rows_of(options) -> Callable:
    def own_rows(values):
        rows = len(values) // options.processes
        return values[options.process * rows : (options.process + 1) * rows]

    return own_rows


def wrapped(model):
    """Returns the module of torch whose ranks share their gradients."""
    import torch

    return torch.nn.parallel.DistributedDataParallel(model)


def average_gradients(model, ranks: int):
    """Lets torch average each gradient over the ranks as soon as it is there."""
    import torch

    def average(parameter):
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= ranks

    for variable in model.trainable_variables:
        variable.value.register_post_accumulate_grad_hook(average)


def local_values(variable) -> list:
    """Returns the value that each device of this process holds."""
    import numpy as np

    value, backend = variable.value, os.environ["KERAS_BACKEND"]
    if backend == "jax":
        return [np.array(shard.data) for shard in value.addressable_shards]
    if backend == "torch":
        return [variable.numpy().copy()]
    return [copy.numpy() for copy in getattr(value, "values", (value,))]


def leave_the_ranks():
    """Ends what the ranks of torch share: from here on each is alone."""
    import gc

    import torch

    if torch.distributed.is_initialized():
        # What holds the group is gone before it: freed after it, it now and then waited for ever.
        gc.collect()
        # A rank that ends while another one still talks to it aborts.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def print_result(result):
    if os.environ["KERAS_BACKEND"] == "torch":
        leave_the_ranks()
    print("RESULT " + json.dumps(result))
