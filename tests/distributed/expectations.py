"""What every run of `train.py` must have found, wherever it ran."""

import numpy as np


def check_faults(result, shards: int, copies: int):
    """Each shard was spoiled twice: first in the forward pass, then in the gradient alone.

    The scale starts at 1024 and halves for the gradient only, so after shard k it is 1024 / 2^(k + 1).
    """
    assert [(fault["shard"], fault["kind"]) for fault in result["faults"]] == [
        (shard, kind) for shard in range(shards) for kind in ("input", "gradient")
    ]
    for fault in result["faults"]:
        halvings = fault["shard"] + (fault["kind"] == "gradient")
        assert fault["changed"] == [], fault
        assert fault["new_skips"] == 1, fault
        assert fault["scales"] == [1024.0 / 2**halvings] * copies, fault
    assert result["finite"]
    assert result["learns_on"]


def check_equals_one_device(result):
    check_equal(result["one"], result["many"], scale=1024.0)
    # Two windows of two batches: one gradient overflowed in the second, so the scale halved at its end.
    check_equal(**result["accumulated"], scale=512.0)


def check_equal(one, many, scale: float):
    assert set(one["scales"]) == set(many["scales"]) == {scale}
    for a, b in zip(one["weights"], many["weights"], strict=True):
        # float16 has 11 significant bits, and the batch is summed in another order
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=5e-4)
