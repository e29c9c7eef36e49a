"""Precision policies: which dtypes, which layers stay in float32, how the loss is scaled."""

from mpkeras.policies.kernels import missing_kernel_rules
from mpkeras.policies.policy import Policy
from mpkeras.policies.registry import (
    get_policy,
    global_policy,
    register_policy,
    registered_policies,
)
from mpkeras.policies.rules import (
    DEFAULT_RULES,
    default_rules,
    describe_rules,
    layer_policy,
    layers_to_keep,
    set_layer_policy,
)

__all__ = [
    "DEFAULT_RULES",
    "Policy",
    "default_rules",
    "describe_rules",
    "get_policy",
    "global_policy",
    "layer_policy",
    "layers_to_keep",
    "missing_kernel_rules",
    "register_policy",
    "registered_policies",
    "set_layer_policy",
]
