"""mpkeras: mixed precision for Keras 3 that cannot fail silently."""

from typing import TYPE_CHECKING

from mpkeras import _start, callbacks, layers  # noqa: F401  `_start` imports Keras
from mpkeras._version import __version__
from mpkeras._when_asked import importing_when_asked
from mpkeras.conversion.apply import apply_policy
from mpkeras.layers import float32_island
from mpkeras.policies import (
    Policy,
    get_policy,
    global_policy,
    register_policy,
    registered_policies,
)
from mpkeras.policies.loss_scaling import DynamicLossScale, FixedLossScale, LossScale
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training.autoprepare import autoprepare
from mpkeras.training.global_policy import install_from_environment, policy_scope, set_global_policy
from mpkeras.training.prepare import prepare
from mpkeras.training.state import load_state_dict, state_dict
from mpkeras.training.step import make_train_step

if TYPE_CHECKING:
    from mpkeras.tools.advise.advice import advise
    from mpkeras.tools.advise.hardware import hardware
    from mpkeras.tools.audit.audit import audit
    from mpkeras.tools.blackbox.capsule import load_capsule
    from mpkeras.tools.forecast.forecast import forecast
    from mpkeras.tools.forecast.memory_plan import plan_memory
    from mpkeras.tools.forecast.sharded import sharded
    from mpkeras.tools.numerics.numerics import trace_numerics

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaleOptimizer",
    "Policy",
    "__version__",
    "advise",
    "apply_policy",
    "audit",
    "autoprepare",
    "callbacks",
    "float32_island",
    "forecast",
    "get_policy",
    "global_policy",
    "hardware",
    "layers",
    "load_capsule",
    "load_state_dict",
    "make_train_step",
    "plan_memory",
    "policy_scope",
    "prepare",
    "register_policy",
    "registered_policies",
    "set_global_policy",
    "sharded",
    "state_dict",
    "trace_numerics",
]

_TOOLS = {
    "advise": "mpkeras.tools.advise.advice",
    "audit": "mpkeras.tools.audit.audit",
    "forecast": "mpkeras.tools.forecast.forecast",
    "hardware": "mpkeras.tools.advise.hardware",
    "load_capsule": "mpkeras.tools.blackbox.capsule",
    "plan_memory": "mpkeras.tools.forecast.memory_plan",
    "sharded": "mpkeras.tools.forecast.sharded",
    "trace_numerics": "mpkeras.tools.numerics.numerics",
}
__getattr__, __dir__ = importing_when_asked(__name__, _TOOLS)

with _start.ending_in_one_line():
    install_from_environment()
