"""The layers of the zoo: how each stock Keras layer is made, and what it is given.

A case is named after its class; `Dense[softmax]` is a variant of `Dense`. Each class of `keras.layers` has a case, or a
reason in `NOT_RUN` why it has none.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# Shapes, batch first. Tiny, except where a sum must be long enough to leave float16.
_VECTOR, _SEQUENCE = (4, 8), (4, 6, 4)
_IMAGE1D, _IMAGE2D, _IMAGE3D = (4, 8, 4), (4, 6, 6, 4), (2, 4, 4, 4, 2)
_PIXELS = (2, 16, 16, 3)

# Of the four samples, how many steps count.
_LENGTHS = np.arange(6) < np.array([[6], [6], [4], [1]])
_LONG_LENGTHS = np.arange(512) < np.array([[512], [512], [300], [1]])
_KEYS = np.broadcast_to(_LENGTHS[:, None, :], (4, 6, 6))
# The last sample has no step at all.
_NONE_LEFT = np.arange(6) < np.array([[6], [6], [4], [0]])
_NO_KEYS = np.broadcast_to(_NONE_LEFT[:, None, :], (4, 6, 6))


class Case(NamedTuple):
    """One layer with its inputs.

    Attributes:
        make: Called with `keras.layers`, returns the layer under the global dtype policy.
        family: What its error bound goes by (`BOUNDS` in `zoo_measure.py`).
        shapes: One shape per input, batch first.
        kind: `"float"`, `"ids"` (integers below 10), `"logits"` (pairs up to 60 apart), or data as it comes, float32
            that is *not* rounded to 16 bits beforehand: `"pixels"` (in [0, 255]), `"offset"` (300 ± 1),
            `"wave"` (samples of sound), `"large"` (7e4 ± 1e3), `"names"` (whole numbers from 2041 to 2055).
        call: `(layer, inputs, **options)`, where the layer is not called with its input, or the list of them.
        options: Keyword arguments of the call, such as masks.
        draws: Whether it draws random numbers: the reference is then float32, as float64 draws others.
    """

    make: Callable
    family: str
    shapes: tuple = (_VECTOR,)
    kind: str = "float"
    call: Callable | None = None
    options: dict = {}
    draws: bool = False


def _apart(layer, inputs, **options):
    return layer(*inputs, **options)


def _cell(layer, inputs, **options):
    return layer(inputs[0], [inputs[0][:, :3]] * (2 if "LSTM" in type(layer).__name__ else 1), **options)


def _stacked(layer, inputs, **options):
    return layer(inputs[0], [[inputs[0][:, :3]] * 2, [inputs[0][:, 3:6]] * 2], **options)


def _reverse(layer, inputs, **options):
    return layer(inputs[0], reverse=True, **options)


CASES: dict[str, Case] = {}

# Layers that move or pick numbers.
for _name, _shapes, _make in [
    ("Identity", (_VECTOR,), lambda k: k.Identity()),
    ("Flatten", (_SEQUENCE,), lambda k: k.Flatten()),
    ("Reshape", (_SEQUENCE,), lambda k: k.Reshape((4, 6))),
    ("Permute", (_SEQUENCE,), lambda k: k.Permute((2, 1))),
    ("RepeatVector", (_VECTOR,), lambda k: k.RepeatVector(3)),
    ("Masking", (_SEQUENCE,), lambda k: k.Masking()),
    ("Cropping1D", (_IMAGE1D,), lambda k: k.Cropping1D(1)),
    ("Cropping2D", (_IMAGE2D,), lambda k: k.Cropping2D(1)),
    ("Cropping3D", (_IMAGE3D,), lambda k: k.Cropping3D(1)),
    ("ZeroPadding1D", (_IMAGE1D,), lambda k: k.ZeroPadding1D(1)),
    ("ZeroPadding2D", (_IMAGE2D,), lambda k: k.ZeroPadding2D(1)),
    ("ZeroPadding3D", (_IMAGE3D,), lambda k: k.ZeroPadding3D(1)),
    ("UpSampling1D", (_IMAGE1D,), lambda k: k.UpSampling1D(2)),
    ("UpSampling2D", (_IMAGE2D,), lambda k: k.UpSampling2D(2)),
    ("UpSampling2D[bilinear]", (_IMAGE2D,), lambda k: k.UpSampling2D(2, interpolation="bilinear")),
    ("UpSampling3D", (_IMAGE3D,), lambda k: k.UpSampling3D(2)),
    ("MaxPooling1D", (_IMAGE1D,), lambda k: k.MaxPooling1D(2)),
    ("MaxPooling2D", (_IMAGE2D,), lambda k: k.MaxPooling2D(2)),
    ("MaxPooling3D", (_IMAGE3D,), lambda k: k.MaxPooling3D(2)),
    ("GlobalMaxPooling1D", (_IMAGE1D,), lambda k: k.GlobalMaxPooling1D()),
    ("GlobalMaxPooling2D", (_IMAGE2D,), lambda k: k.GlobalMaxPooling2D()),
    ("GlobalMaxPooling3D", (_IMAGE3D,), lambda k: k.GlobalMaxPooling3D()),
    ("AdaptiveMaxPooling1D", (_IMAGE1D,), lambda k: k.AdaptiveMaxPooling1D(3)),
    ("AdaptiveMaxPooling2D", (_IMAGE2D,), lambda k: k.AdaptiveMaxPooling2D(3)),
    ("AdaptiveMaxPooling3D", (_IMAGE3D,), lambda k: k.AdaptiveMaxPooling3D(2)),
    ("Concatenate", (_VECTOR, _VECTOR), lambda k: k.Concatenate()),
    ("Maximum", (_VECTOR, _VECTOR), lambda k: k.Maximum()),
    ("Minimum", (_VECTOR, _VECTOR), lambda k: k.Minimum()),
]:
    CASES[_name] = Case(_make, "moves", _shapes)

# One or two operations on each number.
for _name, _shapes, _make in [
    ("Add", (_VECTOR, _VECTOR), lambda k: k.Add()),
    ("Subtract", (_VECTOR, _VECTOR), lambda k: k.Subtract()),
    ("Multiply", (_VECTOR, _VECTOR), lambda k: k.Multiply()),
    ("Average", (_VECTOR, _VECTOR, _VECTOR), lambda k: k.Average()),
    ("Lambda", (_VECTOR,), lambda k: k.Lambda(lambda x: x * 0.3)),
    ("ReLU", (_VECTOR,), lambda k: k.ReLU()),
    ("LeakyReLU", (_VECTOR,), lambda k: k.LeakyReLU()),
    ("PReLU", (_VECTOR,), lambda k: k.PReLU(alpha_initializer="glorot_uniform")),
    ("ELU", (_VECTOR,), lambda k: k.ELU()),
    ("ActivityRegularization", ((4, 128),), lambda k: k.ActivityRegularization(l2=1e-4)),
]:
    CASES[_name] = Case(_make, "elementwise", _shapes)

ACTIVATIONS = (
    "celu elu exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_tanh leaky_relu linear log_sigmoid "
    "log_softmax mish relu relu6 selu sigmoid silu soft_shrink softmax softplus softsign sparse_plus sparse_sigmoid "
    "sparsemax squareplus tanh tanh_shrink threshold"
).split()
for _name in ACTIVATIONS:
    # `threshold` has no defaults to be named by.
    if _name == "threshold":
        CASES["Activation[threshold]"] = Case(
            lambda k: k.Activation(lambda x: __import__("keras").activations.threshold(x, 0.5, 0.0)), "elementwise"
        )
    else:
        CASES[f"Activation[{_name}]"] = Case(lambda k, name=_name: k.Activation(name), "elementwise")
CASES["Activation"] = CASES.pop("Activation[relu]")
CASES["Softmax"] = Case(lambda k: k.Softmax(), "elementwise", (_SEQUENCE[:2],))
CASES["Softmax[mask]"] = Case(lambda k: k.Softmax(), "elementwise", ((4, 6),), options={"mask": _LENGTHS})
CASES["Softmax[nothing left]"] = Case(lambda k: k.Softmax(), "elementwise", ((4, 6),), options={"mask": _NONE_LEFT})


def _through(loss, labels):
    """Returns a `call` that gives the layer's probabilities to a Keras loss: there 16 bits lose the gradient."""

    def call(layer, inputs, **options):
        import keras

        return getattr(keras.losses, loss)()(np.array(labels, "float32"), layer(inputs[0], **options))

    return call


_CROSSENTROPY = _through("CategoricalCrossentropy", [[0, 1], [0, 1], [1, 0], [1, 0]])
_BINARY = _through("BinaryCrossentropy", [[0, 1], [0, 1], [1, 0], [0, 0]])
for _name, _make, _call in [
    ("Softmax[crossentropy]", lambda k: k.Softmax(), _CROSSENTROPY),
    ("Activation[softmax, crossentropy]", lambda k: k.Activation("softmax"), _CROSSENTROPY),
    ("Activation[sigmoid, crossentropy]", lambda k: k.Activation("sigmoid"), _BINARY),
    ("Activation[log_softmax, logits]", lambda k: k.Activation("log_softmax"), None),
]:
    CASES[_name] = Case(_make, "elementwise", ((4, 2),), "logits", _call)


def _small(k, activation):
    # Products that stay below 65504 for inputs of 6e4: what is looked at is the activation.
    from keras import initializers

    return k.Dense(3, activation=activation, kernel_initializer=initializers.RandomUniform(-0.1, 0.1, seed=1))


# Sums of products.
for _name, _shapes, _make in [
    ("Dense", (_VECTOR,), lambda k: k.Dense(3)),
    ("Dense[softmax]", (_VECTOR,), lambda k: _small(k, "softmax")),
    ("Dense[sigmoid]", (_VECTOR,), lambda k: _small(k, "sigmoid")),
    ("Dense[log_softmax]", (_VECTOR,), lambda k: _small(k, "log_softmax")),
    ("Dense[gelu]", (_VECTOR,), lambda k: _small(k, "gelu")),
    ("EinsumDense", (_SEQUENCE,), lambda k: k.EinsumDense("abc,cd->abd", (None, 3), bias_axes="d")),
    ("Dot", (_VECTOR, _VECTOR), lambda k: k.Dot(1)),
    ("Dot[normalize]", (_VECTOR, _VECTOR), lambda k: k.Dot(1, normalize=True)),
    ("Conv1D", (_IMAGE1D,), lambda k: k.Conv1D(3, 3)),
    ("Conv2D", (_IMAGE2D,), lambda k: k.Conv2D(3, 3)),
    ("Conv3D", (_IMAGE3D,), lambda k: k.Conv3D(3, 2)),
    ("Conv1DTranspose", (_IMAGE1D,), lambda k: k.Conv1DTranspose(3, 3)),
    ("Conv2DTranspose", (_IMAGE2D,), lambda k: k.Conv2DTranspose(3, 3)),
    ("Conv3DTranspose", (_IMAGE3D,), lambda k: k.Conv3DTranspose(3, 2)),
    ("DepthwiseConv1D", (_IMAGE1D,), lambda k: k.DepthwiseConv1D(3)),
    ("DepthwiseConv2D", (_IMAGE2D,), lambda k: k.DepthwiseConv2D(3)),
    ("SeparableConv1D", (_IMAGE1D,), lambda k: k.SeparableConv1D(3, 3)),
    ("SeparableConv2D", (_IMAGE2D,), lambda k: k.SeparableConv2D(3, 3)),
    ("TimeDistributed", (_SEQUENCE,), lambda k: k.TimeDistributed(k.Dense(3))),
]:
    CASES[_name] = Case(_make, "products", _shapes)
CASES["ReversibleEmbedding[reverse]"] = Case(lambda k: k.ReversibleEmbedding(10, 8), "products", call=_reverse)
CASES["Embedding"] = Case(lambda k: k.Embedding(10, 4), "products", ((4, 6),), "ids")
CASES["Embedding[mask_zero]"] = Case(lambda k: k.Embedding(10, 4, mask_zero=True), "products", ((4, 6),), "ids")
CASES["ReversibleEmbedding"] = Case(lambda k: k.ReversibleEmbedding(10, 4), "products", ((4, 6),), "ids")
CASES["CategoryEncoding"] = Case(lambda k: k.CategoryEncoding(10, output_mode="count"), "moves", ((4, 6),), "ids")


def _in_graph(layer, inputs, **options):
    """Calls the layer as `fit` does on TensorFlow; elsewhere as it is."""
    import keras

    if keras.backend.backend() != "tensorflow":
        return layer(inputs[0], **options)
    import tensorflow as tf

    return tf.function(layer, autograph=False)(inputs[0], **options)


# Numbers that are names, as floats.
CASES["CategoryEncoding[graph]"] = Case(lambda k: k.CategoryEncoding(4096), "data", ((4, 6),), "names", _in_graph)
CASES["Masking[2052]"] = Case(lambda k: k.Masking(2052.0), "data", (_SEQUENCE,), "names")

# Averages, over windows of up to 32x32.
for _name, _shapes, _make in [
    ("AveragePooling1D", ((2, 512, 2),), lambda k: k.AveragePooling1D(256)),
    ("AveragePooling2D", ((2, 32, 32, 1),), lambda k: k.AveragePooling2D(32)),
    ("AveragePooling2D[8x8]", ((2, 16, 16, 2),), lambda k: k.AveragePooling2D(8)),
    ("AveragePooling3D", ((2, 8, 8, 8, 1),), lambda k: k.AveragePooling3D(8)),
    ("AdaptiveAveragePooling1D", ((2, 512, 2),), lambda k: k.AdaptiveAveragePooling1D(2)),
    ("AdaptiveAveragePooling2D", ((2, 32, 32, 1),), lambda k: k.AdaptiveAveragePooling2D(1)),
    ("AdaptiveAveragePooling3D", ((2, 8, 8, 8, 1),), lambda k: k.AdaptiveAveragePooling3D(1)),
    ("GlobalAveragePooling1D", ((4, 512, 2),), lambda k: k.GlobalAveragePooling1D()),
    ("GlobalAveragePooling2D", ((2, 32, 32, 1),), lambda k: k.GlobalAveragePooling2D()),
    ("GlobalAveragePooling3D", ((2, 8, 8, 8, 1),), lambda k: k.GlobalAveragePooling3D()),
]:
    CASES[_name] = Case(_make, "averages", _shapes)
CASES["GlobalAveragePooling1D[mask]"] = Case(
    lambda k: k.GlobalAveragePooling1D(), "averages", ((4, 512, 2),), options={"mask": _LONG_LENGTHS}
)

# Normalization.
for _name, _shapes, _make in [
    ("BatchNormalization", (_IMAGE2D,), lambda k: k.BatchNormalization()),
    ("LayerNormalization", (_SEQUENCE,), lambda k: k.LayerNormalization()),
    ("GroupNormalization", (_IMAGE2D,), lambda k: k.GroupNormalization(2)),
    ("RMSNormalization", (_SEQUENCE,), lambda k: k.RMSNormalization()),
    ("UnitNormalization", (_SEQUENCE,), lambda k: k.UnitNormalization()),
]:
    CASES[_name] = Case(_make, "normalization", _shapes)
    CASES[f"{_name}[300 ± 1]"] = Case(_make, "normalization", _shapes, "offset")
    CASES[f"{_name}[7e4 ± 1e3]"] = Case(_make, "normalization", _shapes, "large")
CASES["BatchNormalization[mask]"] = Case(
    lambda k: k.BatchNormalization(), "normalization", (_SEQUENCE,), options={"mask": _LENGTHS}
)


def _spectral(k, stddev):
    from keras import initializers

    dense = k.Dense(3, kernel_initializer=initializers.RandomNormal(stddev=stddev, seed=1))
    return k.SpectralNormalization(dense)


for _stddev in (1e-3, 0.3, 300.0):
    _name = "SpectralNormalization" if _stddev == 0.3 else f"SpectralNormalization[kernel {_stddev:g}]"
    CASES[_name] = Case(lambda k, stddev=_stddev: _spectral(k, stddev), "normalization")

# Recurrent layers and their cells, with and without a mask.
for _name, _shape, _make in [
    ("SimpleRNN", _SEQUENCE, lambda k: k.SimpleRNN(3)),
    ("LSTM", _SEQUENCE, lambda k: k.LSTM(3)),
    ("GRU", _SEQUENCE, lambda k: k.GRU(3)),
    ("RNN", _SEQUENCE, lambda k: k.RNN(k.LSTMCell(3))),
    ("Bidirectional", _SEQUENCE, lambda k: k.Bidirectional(k.LSTM(3))),
    ("ConvLSTM1D", (4, 6, 5, 2), lambda k: k.ConvLSTM1D(2, 3)),
    ("ConvLSTM2D", (4, 6, 4, 4, 2), lambda k: k.ConvLSTM2D(2, 3)),
    ("ConvLSTM3D", (4, 6, 3, 3, 3, 2), lambda k: k.ConvLSTM3D(2, 2)),
]:
    CASES[_name] = Case(_make, "recurrent", (_shape,))
    if _name in ("SimpleRNN", "LSTM", "GRU"):
        CASES[f"{_name}[mask]"] = Case(_make, "recurrent", (_shape,), options={"mask": _LENGTHS})
CASES["SimpleRNNCell"] = Case(lambda k: k.SimpleRNNCell(3), "products", call=_cell)
CASES["LSTMCell"] = Case(lambda k: k.LSTMCell(3), "products", call=_cell)
CASES["GRUCell"] = Case(lambda k: k.GRUCell(3), "products", call=_cell)
CASES["StackedRNNCells"] = Case(lambda k: k.StackedRNNCells([k.LSTMCell(3), k.LSTMCell(3)]), "products", call=_stacked)
CASES["TimeDistributed[mask]"] = CASES["TimeDistributed"]._replace(options={"mask": _LENGTHS})

# Attention.
_PAIR = (_SEQUENCE, _SEQUENCE)
for _name, _make, _call, _mask in [
    ("Attention", lambda k: k.Attention(), None, "mask"),
    ("Attention[concat]", lambda k: k.Attention(use_scale=True, score_mode="concat"), None, "mask"),
    ("AdditiveAttention", lambda k: k.AdditiveAttention(), None, "mask"),
    ("MultiHeadAttention", lambda k: k.MultiHeadAttention(2, 4), _apart, "attention_mask"),
    ("GroupQueryAttention", lambda k: k.GroupQueryAttention(4, 2, 1), _apart, "attention_mask"),
]:
    CASES[_name] = Case(_make, "attention", _PAIR, call=_call)
    for _variant, _lengths, _keys in [("mask", _LENGTHS, _KEYS), ("nothing left", _NONE_LEFT, _NO_KEYS)]:
        if "[" in _name:
            continue  # As in `Attention`.
        _value = [_LENGTHS, _lengths] if _mask == "mask" else _keys
        CASES[f"{_name}[{_variant}]"] = Case(_make, "attention", _PAIR, call=_call, options={_mask: _value})

# Random layers: finite or not is looked at, and no error, as 16-bit draws are other draws on some backends.
for _name, _shape, _make in [
    ("Dropout", _VECTOR, lambda k: k.Dropout(0.5, seed=1)),
    ("SpatialDropout1D", _IMAGE1D, lambda k: k.SpatialDropout1D(0.5, seed=1)),
    ("SpatialDropout2D", _IMAGE2D, lambda k: k.SpatialDropout2D(0.5, seed=1)),
    ("SpatialDropout3D", _IMAGE3D, lambda k: k.SpatialDropout3D(0.5, seed=1)),
    ("AlphaDropout", _VECTOR, lambda k: k.AlphaDropout(0.5, seed=1)),
    ("GaussianDropout", _VECTOR, lambda k: k.GaussianDropout(0.5, seed=1)),
    ("GaussianNoise", _VECTOR, lambda k: k.GaussianNoise(0.5, seed=1)),
]:
    CASES[_name] = Case(_make, "random", (_shape,), draws=True)


def _random(name, *arguments, **options):
    return lambda k: getattr(k, name)(*arguments, seed=1, **options)


# Preprocessing: data as it comes. The rounding of the input is the harm, so it counts.
for _name, _make in [
    ("Rescaling", lambda k: k.Rescaling(1 / 255)),
    ("Resizing", lambda k: k.Resizing(9, 9)),
    ("CenterCrop", lambda k: k.CenterCrop(9, 9)),
    ("AutoContrast", lambda k: k.AutoContrast()),
    ("Equalization", lambda k: k.Equalization()),
    ("ContrastLimitedAdaptiveHistogramEqualization", lambda k: k.ContrastLimitedAdaptiveHistogramEqualization()),
    ("MaxNumBoundingBoxes", lambda k: k.MaxNumBoundingBoxes(3)),
    ("Pipeline", lambda k: k.Pipeline([k.Rescaling(1 / 255), k.CenterCrop(9, 9)])),
    ("Solarization", _random("Solarization", 0.2, 0.5)),
    ("MixUp", _random("MixUp", 0.5)),
    ("CutMix", _random("CutMix")),
    ("AugMix", _random("AugMix")),
    ("RandAugment", _random("RandAugment")),
    ("RandomBrightness", _random("RandomBrightness", 0.2)),
    ("RandomColorDegeneration", _random("RandomColorDegeneration", 0.5)),
    ("RandomColorJitter", _random("RandomColorJitter", (0, 255), 0.2, 0.2, 0.2, 0.2)),
    ("RandomContrast", _random("RandomContrast", 0.5)),
    ("RandomCrop", _random("RandomCrop", 9, 9)),
    ("RandomElasticTransform", _random("RandomElasticTransform")),
    ("RandomErasing", _random("RandomErasing")),
    ("RandomFlip", _random("RandomFlip")),
    ("RandomGaussianBlur", _random("RandomGaussianBlur")),
    ("RandomGrayscale", _random("RandomGrayscale", 1.0)),
    ("RandomHue", _random("RandomHue", 0.2)),
    ("RandomInvert", _random("RandomInvert")),
    ("RandomPerspective", _random("RandomPerspective")),
    ("RandomPosterization", _random("RandomPosterization", 4)),
    ("RandomRotation", _random("RandomRotation", 0.2)),
    ("RandomSaturation", _random("RandomSaturation", 0.5)),
    ("RandomSharpness", _random("RandomSharpness", 0.5)),
    ("RandomShear", _random("RandomShear", 0.3, 0.3)),
    ("RandomTranslation", _random("RandomTranslation", 0.2, 0.2)),
    ("RandomZoom", _random("RandomZoom", 0.2)),
]:
    CASES[_name] = Case(_make, "data", (_PIXELS,), "pixels", draws=_make.__qualname__.startswith("_random"))
CASES["Normalization"] = Case(lambda k: k.Normalization(mean=120.0, variance=4900.0), "data", (_PIXELS,), "pixels")
CASES["Normalization[7e4 ± 1e3]"] = Case(
    lambda k: k.Normalization(mean=7e4, variance=1e6), "data", (_SEQUENCE,), "large"
)
CASES["Discretization"] = Case(
    lambda k: k.Discretization(bin_boundaries=[64.3, 127.7, 191.2], output_mode="one_hot"), "data", ((64,),), "pixels"
)
CASES["Discretization[count]"] = Case(
    lambda k: k.Discretization(bin_boundaries=[0.0, 2048.5], output_mode="count"), "data", ((2, 3001),), "names"
)
CASES["MelSpectrogram"] = Case(
    lambda k: k.MelSpectrogram(fft_length=64, sequence_stride=32, num_mel_bins=8), "data", ((2, 256),), "wave"
)
CASES["STFTSpectrogram"] = Case(lambda k: k.STFTSpectrogram(frame_length=32), "data", ((2, 256, 1),), "wave")

# Classes without a case.
NOT_RUN = {
    "Layer": "abstract: it has no `call`",
    "Wrapper": "abstract: it has no `call`; its subclasses have cases",
    "InputLayer": "a placeholder of Functional models; it computes nothing",
    "TFSMLayer": "wraps a SavedModel: foreign code with dtypes of its own",
    "JaxLayer": "wraps a JAX function: foreign code with dtypes of its own",
    "FlaxLayer": "wraps a Flax module: foreign code with dtypes of its own",
    "TorchModuleWrapper": "wraps a torch module: foreign code with dtypes of its own",
    "Hashing": "integers or strings to integers",
    "HashedCrossing": "integers or strings to integers",
    "IntegerLookup": "integers to integers",
    "StringLookup": "strings to integers",
    "TextVectorization": "strings to integers",
    "GroupedQueryAttention": "Keras 3.16 calls `GroupQueryAttention` so, and keeps the old name",
    "Mosaic": "new in Keras 3.16: to be measured when that is released",
    "TernaryDense": "new in Keras 3.16: to be measured when that is released",
}
