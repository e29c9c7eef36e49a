"""Deep Q-learning: a compiled step, and a target network that follows, on every backend."""

import keras
import numpy as np
from keras import layers, ops

import mpkeras

CELLS = 6  # a corridor; the way out is at its right end
STATES = np.eye(CELLS, dtype="float32")


def q_loss(y, q_values):
    """`y` holds the action that was taken and the value that it should have."""
    action, wanted = ops.cast(y[:, 0], "int32"), y[:, 1]
    taken = ops.sum(q_values * ops.one_hot(action, 2, dtype=q_values.dtype), axis=-1)
    return keras.losses.huber(wanted[:, None], taken[:, None])


def train(policy="mixed_float16", seed=0):
    """Returns the model and its mean error about what the best way is worth."""
    keras.utils.set_random_seed(seed)
    with mpkeras.policy_scope(policy):
        model = keras.Sequential([keras.Input((CELLS,)), layers.Dense(32, activation="relu"), layers.Dense(2)])
    target = keras.models.clone_model(model)
    step = mpkeras.make_train_step(model, keras.optimizers.Adam(5e-3), q_loss)
    for update in range(300):
        if update % 20 == 0:
            target.set_weights(model.get_weights())
            values = ops.convert_to_numpy(target(STATES)).astype("float32")
        place, action = np.random.randint(CELLS - 1, size=32), np.random.randint(2, size=32)
        after = np.maximum(place + 2 * action - 1, 0)
        is_out = after == CELLS - 1
        wanted = np.where(is_out, 1.0, 0.8 * values[after].max(axis=-1))
        step(STATES[place], np.stack([action, wanted], axis=1).astype("float32"))
    worth = 0.8 ** np.arange(CELLS - 2, -1, -1)
    found = ops.convert_to_numpy(model(STATES)).astype("float32")[:-1].max(axis=-1)
    return model, float(np.abs(found - worth).mean())


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
