import keras
import numpy as np

from mpkeras.demo import models


def text_model(blocks=1):
    return models.text_model(context=6, width=8, heads=2, hidden=16, blocks=blocks)


def logits(model, codes):
    return keras.ops.convert_to_numpy(model(np.array([codes], "int32")))[0]


def test_digits_model_returns_probabilities():
    model = models.digits_model(width=2, hidden=8)
    output = keras.ops.convert_to_numpy(model(np.linspace(0, 1, 128, dtype="float32").reshape(2, 8, 8, 1)))
    assert output.shape == (2, 10)
    np.testing.assert_allclose(output.sum(axis=-1), 1.0, rtol=1e-6)  # ten float32 roundings


def test_digits_model_has_batch_normalization_and_a_softmax_head():
    model = models.digits_model(width=2, hidden=8)
    assert sum(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers) == 3
    assert model.layers[-1].activation is keras.activations.softmax


def test_text_model_does_not_look_ahead():
    model = text_model(blocks=2)
    one, other = logits(model, [1, 2, 3, 4, 5, 6]), logits(model, [1, 2, 3, 99, 5, 6])
    np.testing.assert_allclose(one[:3], other[:3], rtol=1e-5, atol=1e-6)  # another order of summation at most
    assert np.abs(one[3] - other[3]).max() > 1e-2


def test_text_model_looks_back():
    model = text_model()
    one, other = logits(model, [1, 2, 3, 4, 5, 6]), logits(model, [99, 2, 3, 4, 5, 6])
    assert np.abs(one[5] - other[5]).max() > 1e-4


def test_positions_are_told_apart_and_trained():
    model = text_model()
    output = logits(model, [7, 7, 7, 7, 7, 7])
    assert np.abs(output[1] - output[4]).max() > 1e-2
    tables = [tuple(w.shape) for w in model.trainable_variables if w.path.endswith("embeddings")]
    assert sorted(tables) == [(6, 8), (256, 8)]


def test_models_are_float32_as_built():
    for model in (text_model(), models.digits_model(width=2, hidden=8)):
        assert {layer.compute_dtype for layer in model.layers} == {"float32"}
