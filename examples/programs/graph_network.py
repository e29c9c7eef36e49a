"""Graph network: nodes gather what their neighbours say; the sums run in a layer of your own."""

import keras
import numpy as np
from keras import layers, ops

import mpkeras

NODES = 64


@keras.saving.register_keras_serializable()
class Gathered(layers.Layer):
    """Means of the messages that arrive at each node along edges `(2, edges)`."""

    def __init__(self, size, edges, **kwargs):
        super().__init__(**kwargs)
        self.edges = np.asarray(edges)
        self.degree = np.maximum(np.bincount(self.edges[1], minlength=NODES), 1)[:, None].astype("float32")
        self.message, self.update = layers.Dense(size, activation="relu"), layers.Dense(size, activation="relu")

    def call(self, nodes):
        source, target = self.edges
        messages = ops.take(self.message(nodes), source, axis=0)
        sums = ops.segment_sum(messages, ops.convert_to_tensor(target, "int32"), num_segments=NODES)
        means = sums / ops.cast(self.degree, sums.dtype)
        return self.update(ops.concatenate([nodes, means], axis=-1))


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss."""
    keras.utils.set_random_seed(seed)
    kind = np.arange(NODES) % 2
    edges = np.random.randint(0, NODES, (2, 600))
    edges = edges[:, (kind[edges[0]] == kind[edges[1]]) | (np.random.uniform(size=600) < 0.1)]  # mostly among their own
    features = (kind[:, None] + 2.0 * np.random.normal(size=(NODES, 8))).astype("float32")
    inputs = keras.Input((8,), batch_size=NODES)
    nodes = Gathered(16, edges)(Gathered(16, edges)(inputs))
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(nodes))
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy")
    mpkeras.prepare(model, policy)
    model.fit(features, kind, batch_size=NODES, shuffle=False, epochs=30, verbose=0)
    return model, model.evaluate(features, kind, batch_size=NODES, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
