"""How float32 rules are named in the rows of a plan and in reports, and why the default ones are there."""

from mpkeras.policies.heads import OUTPUTS
from mpkeras.policies.own_state import REMAT_RULE, STATE_RULE
from mpkeras.policies.rules import DEFAULT_RULES, default_rules, kept_by, path_rule


class RuleNames:
    """The names of the rules that are no layer's class, and functions on names.

    Attributes:
        OUTPUTS: Of layers that make outputs of a model.
        STATE: Of layers that write state in their `call`.
        REMAT: Of layers that could not be computed again in 16 bits.
    """

    OUTPUTS, STATE, REMAT = OUTPUTS, STATE_RULE, REMAT_RULE

    @staticmethod
    def default() -> tuple[str, ...]:
        """Returns the default rules, as `mpkeras.policies.default_rules`."""
        return default_rules()

    @staticmethod
    def reason(rule: str) -> str:
        """Returns why a default rule keeps its layers in float32."""
        return dict(DEFAULT_RULES)[rule]

    @staticmethod
    def of_path(path: str) -> str:
        """Returns the rule for the layer of this path alone."""
        return path_rule(path)

    @staticmethod
    def keeping(path: str, argument: str = "keep_float32") -> str:
        """Returns the argument of a policy that adds the rule for this layer to those that hold without it, as code."""
        return kept_by(path_rule(path), argument=argument)
