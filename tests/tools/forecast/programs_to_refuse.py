"""Compiles programs that wait for an H100, or, where that takes one, for the CPU, and prints what is counted."""

import dataclasses
import json
import os

from mpkeras.tools.forecast.targets import TARGETS, find_target

os.environ |= TARGETS["h100"].environment(1)
os.environ["KERAS_BACKEND"] = "jax"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from mpkeras.devices._jax import compile_devices  # noqa: E402
from mpkeras.tools.forecast.hlo import read_program  # noqa: E402


def with_a_conditional(w, x):
    return jax.lax.cond(jnp.isfinite(x).all(), lambda: x @ w, lambda: x)


def to_the_host(w, x):
    return jax.device_put(x @ w, jax.memory.Space.Host)


def with_a_callback(w, x):
    jax.debug.callback(print, x[0, 0])
    return x @ w


def main():
    (h100,) = compile_devices(TARGETS["h100"], 1)
    (cpu,) = compile_devices(find_target("cpu"), 1)
    found = {}
    for function, device in ((with_a_conditional, h100), (to_the_host, h100), (with_a_callback, cpu)):
        square = jax.ShapeDtypeStruct((64, 64), "float16", sharding=jax.sharding.SingleDeviceSharding(device))
        text = jax.jit(function).lower(square, square).compile().as_text()
        found[function.__name__.replace("_", " ")] = dataclasses.asdict(read_program(text))
    print(json.dumps(found))


main()
