"""A job that goes on where it was ended, whichever of its workers was killed at whatever moment; on every backend.

    KERAS_BACKEND=torch python resume.py --coordinator 10.0.0.1:1234 --workers 2 --worker 0 --folder /shared/job

and with `--worker 1` on the other machine. When one of them has failed, end the other and start both again, as Slurm,
Kubernetes and torchrun do: they read the last checkpoint and go on. On TensorFlow set `TF_CONFIG` instead of
`--coordinator` and `--worker`.
"""

import argparse
import contextlib
import json
import os
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import mpkeras

BATCH = 64


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoint; all workers read it")
    parser.add_argument("--coordinator", help="host:port of worker 0")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", type=int, help="number of this one")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    options = parser.parse_args()
    scope = connect(options)

    keras.utils.set_random_seed(0)
    mpkeras.set_global_policy("mixed_float16")
    with scope:
        hidden = [keras.layers.Dense(128, activation="relu"), keras.layers.Dropout(0.2, seed=1)]
        model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        step = mpkeras.make_train_step(model, keras.optimizers.Adam(0.01), loss_fn)
    if keras.backend.backend() == "torch":
        average_gradients(model)

    path = options.folder / "checkpoint.npz"
    losses = load(step, path)
    print(f"rank {options.worker}: goes on after {len(losses)} steps", flush=True)
    x, y = load_digits(return_X_y=True)
    x = x.astype("float32") / 16
    while len(losses) < options.steps:
        # The number of the step alone says which batch it takes.
        rows = rows_of_batch(len(losses), len(x))[options.worker :: options.workers]
        result = step(x[rows], y[rows])
        losses.append(float(result["loss"]))
        print(f"rank {options.worker}: step {len(losses)}, first row {rows[0]}, loss {losses[-1]:.4f}", flush=True)
        if len(losses) % options.every == 0 or len(losses) == options.steps:
            # Every worker asks for the state, which may be spread over them; one of them writes it.
            state = {**step.state_dict(), "losses": np.array(losses)}
            if options.worker == 0:
                save(path, state)
    optimizer = step.optimizer
    print(
        f"rank {options.worker}: loss {losses[-1]:.4f}, loss scale {float(optimizer.loss_scale)}, "
        f"skipped {int(optimizer.skipped_steps.numpy())}",
        flush=True,
    )
    if keras.backend.backend() == "torch":
        import torch

        torch.distributed.destroy_process_group()


def rows_of_batch(number: int, count: int):
    """Returns the rows of a batch, from a new order of all `count` rows in each epoch."""
    epoch, batch = divmod(number, count // BATCH)
    return np.random.default_rng(epoch).permutation(count)[batch * BATCH : (batch + 1) * BATCH]


def save(path, state):
    """Writes a checkpoint, whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "wb") as file:
        np.savez(file, **state)
        file.flush()
        os.fsync(file.fileno())
    # Whoever is killed before this line leaves the checkpoint before it, and behind it the new one.
    os.replace(unfinished, path)


def load(step, path) -> list:
    """Gives `step` the state of the checkpoint, if there is one, and returns the losses of the steps until then."""
    if not path.exists():
        return []
    with np.load(path) as file:
        state = dict(file)
    losses = state.pop("losses").tolist()
    step.load_state_dict(state)
    return losses


def connect(options):
    """Connects this worker to the others; returns the scope to make the model in."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        config = json.loads(os.environ["TF_CONFIG"])
        options.worker, options.workers = config["task"]["index"], len(config["cluster"]["worker"])
        return tf.distribute.MultiWorkerMirroredStrategy().scope()
    if keras.backend.backend() == "jax":
        keras.distribution.initialize(options.coordinator, options.workers, options.worker)
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    else:
        import torch

        address = f"tcp://{options.coordinator}"
        torch.distributed.init_process_group(init_method=address, rank=options.worker, world_size=options.workers)
    return contextlib.nullcontext()


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
