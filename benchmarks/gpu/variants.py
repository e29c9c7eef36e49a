"""What is compared: which framework trains, in which dtype, with or without loss scaling."""

from typing import NamedTuple


class Variant(NamedTuple):
    """One way to train.

    Attributes:
        name: What tables and results call it.
        framework: Whose process runs it: `"keras"` (on JAX) or `"torch"`.
        dtype: Of matrix products and convolutions.
        library: What brings them there: `"keras"`, `"mpkeras"` or `"torch"`.
        scales: Whether the loss is scaled and steps are checked, by that library.
        tf32: Whether float32 products may round their inputs to TF32's 11 bits.
        compiles: Whether torch compiles. The JAX step always is.
        unscaled: Name of the same without loss scaling: the difference is what loss scaling costs.
        policy: Name of mpkeras' policy, where it is not `mixed_{dtype}`.
        options: Further arguments of `mpkeras.Policy`, as pairs.
    """

    name: str
    framework: str
    dtype: str
    library: str
    scales: bool = False
    tf32: bool = False
    compiles: bool = False
    unscaled: str | None = None
    policy: str | None = None
    options: tuple[tuple[str, object], ...] = ()


def _with_and_without(name: str, **options) -> list[Variant]:
    bare = f"{name}, no scaling"
    return [Variant(name, scales=True, unscaled=bare, **options), Variant(bare, **options)]


FLOAT32, TF32 = "keras float32", "keras float32, TF32"
KERAS_FLOAT16 = "keras mixed_float16"
MPKERAS_FLOAT16, MPKERAS_BFLOAT16 = "mpkeras mixed_float16", "mpkeras mixed_bfloat16"
TORCH_FLOAT16 = ("torch float16, eager", "torch float16, compiled")
TORCH_BFLOAT16 = ("torch bfloat16, eager", "torch bfloat16, compiled")

# A unit is what has to be timed in the same rounds, whatever the memory of the device: see `rounds.py`.
UNITS = (
    [Variant(FLOAT32, "keras", "float32", "keras")],
    [Variant(TF32, "keras", "float32", "keras", tf32=True)],
    _with_and_without(KERAS_FLOAT16, framework="keras", dtype="float16", library="keras"),
    # Without scaling: the model of `apply_policy` in the plain step of Keras' guide. mpkeras itself never trains
    # in float16 without it. The difference is the whole of scaling, checks and rollback.
    _with_and_without(MPKERAS_FLOAT16, framework="keras", dtype="float16", library="mpkeras"),
    [Variant(MPKERAS_BFLOAT16, "keras", "bfloat16", "mpkeras", scales=True)],
    [Variant("mpkeras small state", "keras", "bfloat16", "mpkeras", scales=True, policy="bfloat16")],
    *(
        [Variant(f"{MPKERAS_BFLOAT16}, {words}", "keras", "bfloat16", "mpkeras", scales=True, options=(option,))]
        for words, option in (
            ("remat products", ("remat", "products")),
            ("remat blocks", ("remat", "blocks")),
            ("float8", ("float8", "current")),
        )
    ),
    _with_and_without(TORCH_FLOAT16[0], framework="torch", dtype="float16", library="torch"),
    _with_and_without(TORCH_FLOAT16[1], framework="torch", dtype="float16", library="torch", compiles=True),
    [Variant(TORCH_BFLOAT16[0], "torch", "bfloat16", "torch")],
    [Variant(TORCH_BFLOAT16[1], "torch", "bfloat16", "torch", compiles=True)],
)
VARIANTS = {variant.name: variant for unit in UNITS for variant in unit}
