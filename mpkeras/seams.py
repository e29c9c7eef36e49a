"""The names of the core that tools may use, beside the public ones: at most 30, each with a sentence.

A model:

- `ModelView`: a model as reports see it; the questions that they ask of it, and no change.
- `ConvertedLayer`: one layer, what its conversion made of it, and what can be done to it alone.
- `RuleNames`: how float32 rules are named in the rows of a plan, and why the default ones are there.
- `dtypes`: the module of the dtypes: which are floats, which have 16 bits, and how many bytes a tensor has.
- `mixing`: the module that knows how a layer mixes dtypes, and what to do about it.

A machine:

- `devices`: the module of versions and machine, with the part of it that is the backend's.
- `native`: the module that says what the devices of a backend compute natively.
- `missing_kernel_rules`: the layers for which the backend has no kernel in a dtype here.

Changes, which can be put back:

- `layer_converter`: gives the layers of a model their dtypes under a policy.
- `recorded`: lets every layer of a model compute again in what it computes in now.
- `in_float32`: lets a model compute in float32 for a moment.
- `let_heads_tell`: asks a model that has not run yet which of its layers make its outputs.
- `end_in_float32`: casts the outputs of a model, as plain Keras can load it.
- `replaced`: puts an attribute on an object for a moment.
- `policy_alone`: lets a policy be in force for what is made, whatever the user has set.
- `all_generators_put_back`: lets the random numbers that are drawn in between be drawn again.
- `backend_generators_put_back`: the same for those that the backend draws itself.
- `copy_mask`: lets a tensor stand for another one in a model.
- `has_logits`: says of a tensor that Keras finds the logits of a softmax by it.

The run of a step:

- `MixedPrecision`: the public callback, which guards the step for a callback that looks at it.
- `ModelInFit`: a model in `fit`, as callbacks see it that look at its steps.
- `FitStep`: one step of `fit`, run by hand.
- `capsule_file`: the module of the file of a skipped step: writes it, reads it, and says what is in it.
- `Blueprint`: what another process needs beside a configuration to make a model and its step.
- `scales_loss`: says whether an optimizer multiplies the loss.
- `number`: reads a number from a variable or a tensor.

Arguments of users:

- `check_model`, `check_switch`, `checked_count`, `checked_path`: the checks of arguments that the core makes, too.
"""

from mpkeras import devices
from mpkeras._arguments import check_switch, checked_count, checked_path
from mpkeras._keras import copy_mask, has_logits
from mpkeras._replaced import replaced
from mpkeras.callbacks.mixed_precision import MixedPrecision
from mpkeras.conversion import mixing
from mpkeras.conversion.apply import scales_loss
from mpkeras.conversion.converted_layer import ConvertedLayer
from mpkeras.conversion.converter import layer_converter
from mpkeras.conversion.in_float32 import in_float32
from mpkeras.conversion.outputs import end_in_float32, let_heads_tell
from mpkeras.conversion.undo import recorded
from mpkeras.devices import native
from mpkeras.policies import dtypes
from mpkeras.policies.kernels import missing_kernel_rules
from mpkeras.policies.loss_scaling import number
from mpkeras.policies.rule_names import RuleNames
from mpkeras.training import capsule_file
from mpkeras.training.blueprint import Blueprint
from mpkeras.training.fit_step import FitStep
from mpkeras.training.global_policy import policy_alone
from mpkeras.training.model_in_fit import ModelInFit
from mpkeras.training.model_view import ModelView
from mpkeras.training.prepare import check_model
from mpkeras.training.random_numbers import all_generators_put_back, backend_generators_put_back

__all__ = [
    "Blueprint",
    "ConvertedLayer",
    "FitStep",
    "MixedPrecision",
    "ModelInFit",
    "ModelView",
    "RuleNames",
    "all_generators_put_back",
    "backend_generators_put_back",
    "capsule_file",
    "check_model",
    "check_switch",
    "checked_count",
    "checked_path",
    "copy_mask",
    "devices",
    "dtypes",
    "end_in_float32",
    "has_logits",
    "in_float32",
    "layer_converter",
    "let_heads_tell",
    "missing_kernel_rules",
    "mixing",
    "native",
    "number",
    "policy_alone",
    "recorded",
    "replaced",
    "scales_loss",
]
