"""A Keras model among scikit-learn's: in a pipeline, with cross-validation."""

import keras
import numpy as np
from keras import layers
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import mpkeras


def make_model(X, y, policy):
    """Returns a compiled and prepared model: scikit-learn calls this for every fit."""
    model = keras.Sequential([keras.Input(X.shape[1:]), layers.Dense(32, "relu"), layers.Dense(y.shape[1], "softmax")])
    model.compile(keras.optimizers.Adam(2e-2), "categorical_crossentropy")
    return mpkeras.prepare(model, policy)


def train(policy="mixed_float16", seed=0):
    """Returns the model and the share of held-out examples that it gets wrong."""
    keras.utils.set_random_seed(seed)
    x = 100 * np.random.normal(size=(400, 4)).astype("float32")
    y = np.array(["left", "right", "straight"])[(x[:, 0] > x[:, 1]).astype(int) + (x[:, 2] > 50)]
    pipeline = make_pipeline(
        StandardScaler(), keras.wrappers.SKLearnClassifier(make_model, model_kwargs={"policy": policy})
    )
    # Arguments of `fit` go this way: the wrapper's `fit_kwargs` are lost when scikit-learn clones it (Keras 3.15).
    options = {"sklearnclassifier__epochs": 15, "sklearnclassifier__verbose": 0}
    error = 1 - cross_val_score(pipeline, x, y, cv=2, params=options).mean()
    return pipeline.fit(x, y, **options)[-1].model_, float(error)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
