"""Actor and critic: one episode after the other in a `GradientTape` loop around the optimizer."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mpkeras

CELLS = 6  # a corridor; the way out is at its right end


def play(model, choose):
    """Walks through one corridor. Returns what was seen, done and rewarded in each step."""
    place, states, actions, rewards = np.random.randint(CELLS - 1), [], [], []
    while place < CELLS - 1 and len(rewards) < 20:
        state = np.eye(CELLS, dtype="float32")[place]
        action = choose(np.asarray(model(state[None])[0])[0])
        place = max(place + (1 if action else -1), 0)
        states.append(state)
        actions.append(action)
        rewards.append(1.0 if place == CELLS - 1 else -0.1)
    return np.array(states), np.array(actions), np.array(rewards)


def train(policy="mixed_float16", seed=0):
    """Returns the model and how many steps it takes to the way out, on average."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((CELLS,))
    hidden = layers.Dense(32, activation="relu")(inputs)
    model = keras.Model(inputs, [layers.Dense(2, activation="softmax")(hidden), layers.Dense(1)(hidden)])
    mpkeras.apply_policy(model, policy)
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(1e-2))
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def learn(states, actions, returns):
        with tf.GradientTape() as tape:
            probabilities, values = model(states, training=True)
            chosen = tf.math.log(tf.gather(probabilities, actions, batch_dims=1) + 1e-6)
            advantage = returns - tf.squeeze(values, axis=-1)
            actor_loss = -tf.reduce_mean(chosen * tf.stop_gradient(advantage))
            scaled_loss = optimizer.scale_loss(actor_loss + tf.reduce_mean(advantage**2))
        optimizer.apply(tape.gradient(scaled_loss, model.trainable_variables), model.trainable_variables)

    for _ in range(80):
        states, actions, rewards = play(model, lambda p: np.random.choice(2, p=p / p.sum()))
        returns = np.cumsum(rewards[::-1])[::-1]
        learn(*(tf.constant(values) for values in (states, actions.astype("int32"), returns.astype("float32"))))
    return model, float(np.mean([len(play(model, np.argmax)[2]) for _ in range(10)]))


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
