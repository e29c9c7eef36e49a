"""The layers that stay in float32 by default, each with the number that says why.

Measured with Keras 3.15 on TensorFlow, JAX and torch (CPU): each layer under `mixed_float16` and
`mixed_bfloat16` against itself in float32, on inputs of 0, ±300, ±1e5, standard normal numbers and pixels in
[0, 255]. Where the backends differ, the worst is given.

`python benchmarks/layer_zoo.py` measures every layer of Keras, with these rules and without, and a test fails when a
rule is no longer needed or a layer needs one. Numbers here for sizes that the zoo does not have (kernels, windows and
random draws of their own) were measured once, with Keras 3.15.
"""

_PIXELS = (
    "pixels in [0, 255] move by up to {bfloat16} in bfloat16 and {float16} in float16; "
    "inputs of 1e5 leave float16 as inf or NaN"
)
_DRAWS = (
    "draws other random numbers in 16 bits than in float32: with one seed, pixels in [0, 255] differ by "
    "up to {difference}; inputs of 1e5 leave float16 as inf or NaN"
)


def _moves(float16: float, bfloat16: float) -> str:
    return _PIXELS.format(float16=float16, bfloat16=bfloat16)


def _draws(difference: int) -> str:
    return _DRAWS.format(difference=difference)


_AVERAGE = (
    "the sum over the window overflows float16 (32x32 windows of 305: inf on TensorFlow and JAX), and JAX "
    "adds up in bfloat16 (8x8 windows: 2.7% off, 32x32: 51%)"
)
_ADAPTIVE_AVERAGE = "JAX adds up in bfloat16: 1.4% off, and 314 instead of 305 over 64x64"

# Rows of `(rule, reason)`. The first rule that matches a layer counts.
DEFAULT_RULES = (
    # Probability heads. Keras looks for their logits, and the loss's cast of 16-bit numbers hides those.
    (
        "Softmax",
        "through the crossentropy, logits [15, 0] with label 1 get the gradient NaN in float16, and logits "
        "[20, 0] get [0, 0] instead of [1, -1] in 16 bits (TensorFlow)",
    ),
    ("activation:softmax", "as a `Softmax` layer"),
    (
        "activation:log_softmax",
        "for logits of ±30, log-probabilities are off by up to 0.25 in bfloat16 and 0.03 in float16",
    ),
    (
        "activation:sigmoid",
        "through the binary crossentropy, logit 10 with label 0 gets the gradient 0 instead of 1 in 16 bits",
    ),
    # Other activations.
    ("activation:squareplus", "float16: the square of 300 overflows, and 300 becomes inf"),
    ("activation:sparse_plus", "float16: the gradient for an input of 6e4 is NaN (JAX, torch)"),
    ("activation:sparsemax", "bfloat16: rows of 300 become inf or NaN"),
    # Normalization. `LayerNormalization` is not here: under any policy it casts nothing on the way in, sums in
    # float32 and rounds to the dtype of its input. Under the policy `float32` it gives the same numbers bit for
    # bit, on every backend, and writes them in twice the memory.
    (
        "BatchNormalization",
        "inputs of 1e5: NaN in float16; float32 inputs of 300 ± 1: off by 31% in bfloat16, 4% in float16",
    ),
    (
        "GroupNormalization",
        "inputs of 1e5: NaN in float16 with Keras 3.10; 300 ± 1: off by 40 epsilons (3.15 gives the same numbers under "
        "any policy)",
    ),
    ("RMSNormalization", "inputs of 1e5: NaN in float16; float32 inputs of 300 ± 1: off by 6e-3 in bfloat16"),
    ("UnitNormalization", "float16: zeros become NaN, and rows of 300 become 0 as their squares overflow"),
    (
        "SpectralNormalization",
        "float16: NaN for kernels with a standard deviation of 1e-3 and of 300 (TensorFlow, JAX); "
        "16 bits on torch: the kernel is not normalized at all",
    ),
    ("Dot", "with `normalize=True`, float16: zeros become NaN, and rows of 300 give 0 instead of 1"),
    # Averages.
    ("Average", "the sum comes before the division: three inputs of 6e4 become inf in float16"),
    ("AveragePooling1D", _AVERAGE),
    ("AveragePooling2D", _AVERAGE),
    ("AveragePooling3D", _AVERAGE),
    ("AdaptiveAveragePooling1D", _ADAPTIVE_AVERAGE),
    ("AdaptiveAveragePooling2D", _ADAPTIVE_AVERAGE),
    ("AdaptiveAveragePooling3D", _ADAPTIVE_AVERAGE),
    ("GlobalAveragePooling1D", "with a mask, the sum overflows float16 (4096 steps of 305: inf)"),
    # Regularizers.
    ("ActivityRegularization", "float16: the penalty of 512 activations of 300 is inf instead of 14400"),
    # Preprocessing: the data as it comes, not yet in a range that suits 16 bits.
    ("Normalization", "a mean of 7e4 or a variance of 1e6 is inf in float16: NaN for every input"),
    ("Rescaling", _moves(float16=0.2, bfloat16=3.6)),
    ("Resizing", _moves(float16=0.2, bfloat16=1.6)),
    ("ContrastLimitedAdaptiveHistogramEqualization", _moves(float16=3.0, bfloat16=4.9)),
    ("MaxNumBoundingBoxes", _moves(float16=0.1, bfloat16=0.5)),
    ("CenterCrop", _moves(float16=0.1, bfloat16=0.5)),
    ("AutoContrast", _moves(float16=0.2, bfloat16=2.0)),
    ("Equalization", _moves(float16=4.1, bfloat16=7.9)),
    ("Solarization", _moves(float16=0.1, bfloat16=0.7)),
    ("MixUp", _moves(float16=0.2, bfloat16=1.5)),
    ("RandomBrightness", _moves(float16=0.1, bfloat16=1.1)),
    ("RandomColorDegeneration", _moves(float16=0.1, bfloat16=1.1)),
    ("RandomColorJitter", _moves(float16=0.1, bfloat16=1.1)),
    ("RandomCrop", _moves(float16=0.1, bfloat16=0.5)),
    ("RandomFlip", _moves(float16=0.1, bfloat16=0.5)),
    ("RandomGrayscale", _moves(float16=0.1, bfloat16=1.1)),
    ("RandomHue", _moves(float16=0.1, bfloat16=1.5)),
    ("RandomInvert", _moves(float16=0.1, bfloat16=0.7)),
    ("RandomPosterization", _moves(float16=0.0, bfloat16=35.7)),
    ("RandomRotation", _moves(float16=0.1, bfloat16=1.0)),
    ("RandomSaturation", _moves(float16=0.1, bfloat16=1.5)),
    ("RandomSharpness", _moves(float16=0.3, bfloat16=1.6)),
    ("RandomTranslation", _moves(float16=0.1, bfloat16=0.9)),
    ("RandomZoom", _moves(float16=0.1, bfloat16=0.9)),
    ("CutMix", "bfloat16 raises on TensorFlow, float16 and bfloat16 on torch; on JAX another box is drawn"),
    ("AugMix", _draws(92)),
    ("RandAugment", _draws(176)),
    ("RandomContrast", _draws(13)),
    ("RandomElasticTransform", _draws(122)),
    ("RandomErasing", _draws(255)),
    ("RandomGaussianBlur", _draws(115)),
    ("RandomPerspective", _draws(255)),
    ("RandomShear", _draws(222)),
    ("MelSpectrogram", "off by 0.29 dB in bfloat16, 0.03 dB in float16; samples of 1e5 leave float16 as NaN"),
    ("STFTSpectrogram", "bfloat16 raises on every backend; float16 is off by 5e-3 of the largest"),
)


def default_rules() -> tuple[str, ...]:
    """Returns the rules of `DEFAULT_RULES` without the reasons, as `Policy(keep_float32=...)` takes them.

    Example:

    >>> mpkeras.policies.default_rules()[:2]
    ('Softmax', 'activation:softmax')
    """
    return tuple(rule for rule, _ in DEFAULT_RULES)


def describe_rules() -> str:
    """Returns the default rules with their reasons as a table in plain text.

    Example:

    >>> print(mpkeras.policies.describe_rules())
    stays in float32 because
    Softmax through the crossentropy, logits ...
    """
    width = max(len(rule) for rule, _ in DEFAULT_RULES)
    lines = [f"{'stays in float32':{width}}  because"]
    lines.extend(f"{rule:{width}}  {reason}" for rule, reason in DEFAULT_RULES)
    return "\n".join(lines)
