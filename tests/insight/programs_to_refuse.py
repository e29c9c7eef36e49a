"""Compiles a program with a conditional and one with a callback for an H100, and prints what is counted in them."""

import dataclasses
import json
import os

from mpkeras.devices.targets import TARGETS

os.environ |= TARGETS["h100"].environment(1)
os.environ["KERAS_BACKEND"] = "jax"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from mpkeras.devices._jax import compile_devices  # noqa: E402
from mpkeras.insight.hlo import read_program  # noqa: E402


def with_a_conditional(w, x):
    return jax.lax.cond(jnp.isfinite(x).all(), lambda: x @ w, lambda: x)


def with_a_callback(w, x):
    jax.debug.callback(print, x[0, 0])
    return x @ w


def main():
    (device,) = compile_devices(TARGETS["h100"], 1)
    square = jax.ShapeDtypeStruct((64, 64), "float16", sharding=jax.sharding.SingleDeviceSharding(device))
    found = {}
    for function in (with_a_conditional, with_a_callback):
        text = jax.jit(function).lower(square, square).compile().as_text()
        found[function.__name__.replace("_", " ")] = dataclasses.asdict(read_program(text))
    print(json.dumps(found))


main()
