"""Policies for tests of what a layer does in 16 bits, in models that are that layer."""

import keras

import mpkeras


def without_outputs(name="mixed_bfloat16", **options) -> mpkeras.Policy:
    """Returns a policy by which what makes the outputs of a model follows its dtype, too, but for its other rules."""
    rules = tuple(rule for rule in mpkeras.policies.default_rules() if rule != "outputs")
    return mpkeras.Policy(name, keep_float32=rules, **options)


class Weighted(keras.layers.Layer):
    """A layer of the user's that follows a policy where it is given data, too: without weights it stays in float32."""

    def build(self, shape):
        self.add_weight(shape=(), trainable=False)
