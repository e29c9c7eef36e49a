"""Prints how many MiB a process grows by in a step of attention layers in a graph of TensorFlow: ours, then Keras' own.

A program of its own: what is known is the most that a process ever had.
"""

import json
import re
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mpkeras
from tests.sixteen_bits import without_outputs

LAYERS, BATCH, LENGTH, HEADS, DEPTH = 10, 2, 512, 8, 8


def step_of(policy, layer_count=LAYERS):
    inputs = x = keras.Input((LENGTH, DEPTH))
    for _ in range(layer_count):
        x = x + layers.MultiHeadAttention(HEADS, DEPTH)(x, x, use_causal_mask=True)
    model = keras.Model(inputs, x)
    if policy is None:
        for layer in model._flatten_layers(include_self=False):
            layer.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    else:
        mpkeras.apply_policy(model, policy)

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(model(x), tf.float32) ** 2)
        return tf.add_n([tf.reduce_sum(g) for g in tape.gradient(loss, model.trainable_variables)])

    return step


def mib() -> float:
    # Of this program: `resource.getrusage` begins with what the process that started it has.
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def main():
    # Several threads run ahead by as much as a busy machine lets them.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    x = tf.constant(np.random.default_rng(0).normal(size=(BATCH, LENGTH, DEPTH)), "bfloat16")
    # Threads, kernels and what a graph takes by itself.
    step_of(without_outputs(), 1)(x)
    start, grown = mib(), []
    # The smaller first: what it frees is there for the next.
    for step in (step_of(without_outputs()), step_of(None)):
        assert np.isfinite(float(step(x)))
        grown.append(mib() - start)
    print(json.dumps(grown))


if __name__ == "__main__":
    main()
