"""Ray Train starts the workers, connects them and starts them again when one has died; on TensorFlow, JAX and torch.

    pip install "mpkeras[ray]"
    KERAS_BACKEND=torch python ray_train.py --workers 2          (with GPUs: --gpus)

On JAX and CPUs alone `JaxTrainer` connects nobody unless it is told `use_gpu=True`: every worker would train by itself.
"""

import argparse
import contextlib
import os
import tempfile

import keras
import numpy as np
import ray.train
from sklearn.datasets import load_digits

import mpkeras

BATCH = 64


def main(loop=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    parser.add_argument("--storage", default=tempfile.gettempdir(), help="a folder or bucket that all machines see")
    parser.add_argument("--name", help="of this job; one that was ended goes on under its name")
    parser.add_argument("--steps", type=int, default=84)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--plant-overflow", type=int, metavar="RANK", help="one batch of this rank overflows")
    options = parser.parse_args()
    environment = {"KERAS_BACKEND": keras.backend.backend()}
    if keras.backend.backend() == "jax" and not options.gpus:
        environment["JAX_PLATFORMS"] = "cpu"
    result = trainer_class()(
        loop or train_loop,
        train_loop_config=vars(options),
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=ray.train.RunConfig(
            name=options.name,
            storage_path=options.storage,
            failure_config=ray.train.FailureConfig(max_failures=20),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            worker_runtime_env={"env_vars": environment},
        ),
    ).fit()
    print(f"checkpoint: {result.checkpoint.path}")


def trainer_class():
    if keras.backend.backend() == "tensorflow":
        from ray.train.tensorflow import TensorflowTrainer

        return TensorflowTrainer
    if keras.backend.backend() == "torch":
        from ray.train.torch import TorchTrainer

        return TorchTrainer
    import functools

    from ray.train.v2.jax import JaxConfig, JaxTrainer

    # `use_gpu` makes it call `jax.distributed.initialize`, on the platform that JAX_PLATFORMS names.
    return functools.partial(JaxTrainer, jax_config=JaxConfig(use_gpu=True))


def train_loop(options):
    """What each worker does."""
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    scope = contextlib.nullcontext()
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        scope = tf.distribute.MultiWorkerMirroredStrategy().scope()
    elif keras.backend.backend() == "jax":
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))

    keras.utils.set_random_seed(0)
    mpkeras.set_global_policy("mixed_float16")
    with scope:
        layers = [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        step = mpkeras.make_train_step(model, keras.optimizers.Adam(0.01), loss_fn)
    if keras.backend.backend() == "torch":
        average_gradients(model)

    losses = load(step)
    print(f"rank {rank}: goes on after {len(losses)} steps", flush=True)
    x, y = load_digits(return_X_y=True)
    x = x.astype("float32") / 16
    while len(losses) < options["steps"]:
        # The number of the step alone says which batch it takes.
        rows = rows_of_batch(len(losses), len(x))[rank::ranks]
        weights = np.ones(len(rows), "float32")
        if len(losses) == 5 and rank == options["plant_overflow"]:
            weights[0] = 1e9  # the loss stays finite, its gradients are beyond float16
        result = step(x[rows], y[rows], weights)
        losses.append(float(result["loss"]))
        print(f"rank {rank}: step {len(losses)}, first row {rows[0]}, loss {losses[-1]:.4f}", flush=True)
        if len(losses) % options["every"] == 0 or len(losses) == options["steps"]:
            save(step, losses, rank)
    print(
        f"rank {rank}: loss {losses[-1]:.4f}, loss scale {float(step.optimizer.loss_scale)}, "
        f"skipped {int(step.optimizer.skipped_steps.numpy())}",
        flush=True,
    )


def rows_of_batch(number: int, count: int):
    """Returns the rows of a batch, from a new order of all `count` rows in each epoch."""
    epoch, batch = divmod(number, count // BATCH)
    return np.random.default_rng(epoch).permutation(count)[batch * BATCH : (batch + 1) * BATCH]


def save(step, losses, rank):
    """Hands Ray a checkpoint, which counts once it is there whole. Every worker reports, and waits for the others."""
    state = step.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            np.savez(os.path.join(folder, "checkpoint.npz"), losses=losses, **state)
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": len(losses), "loss": losses[-1]}, checkpoint=checkpoint)


def load(step) -> list:
    """Gives `step` the state of the last checkpoint, if there is one; returns the losses of the steps until then."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return []
    with checkpoint.as_directory() as folder, np.load(os.path.join(folder, "checkpoint.npz")) as file:
        state = dict(file)
    losses = state.pop("losses").tolist()
    step.load_state_dict(state)
    return losses


def average_gradients(model):
    """Lets torch average each gradient over the ranks as soon as it is there."""
    import torch

    def average(parameter):
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()

    for variable in model.trainable_variables:
        variable.value.register_post_accumulate_grad_hook(average)


if __name__ == "__main__":
    main()
