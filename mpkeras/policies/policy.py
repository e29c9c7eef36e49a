"""`Policy`: everything about a model's precision, in one immutable object."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import Any

import keras

from mpkeras._arguments import is_one_of
from mpkeras.policies import loss_scaling, rules
from mpkeras.policies.dtypes import (
    SIXTEEN_BIT_DTYPES,
    check_dtype,
    check_keras_name,
    check_slot_dtype,
    keras_dtypes,
    stock_name,
)

# Policies by name, filled by `registry.py`: a `Policy`, or a function that makes it when it is first asked for. It is
# here because `Policy(name)` starts from the registered settings.
REGISTERED: dict = {}
# The words that `remat` may be; otherwise it has rules.
REMAT_WORDS = ("products", "blocks")
# Keys that the config of a policy cannot do without: mpkeras 0.1 wrote the rest otherwise, or not at all.
_NEEDED = ("name", "compute_dtype", "variable_dtype", "keep_float32", "loss_scale")
# The inputs of the first layer are the data, and what the last one returns is the loss's: neither bears rounding well.
DEFAULT_KEEP_16_BITS = ("first", "last")


@dataclasses.dataclass(frozen=True)
class _Settings:
    name: str
    compute_dtype: str
    variable_dtype: str
    keep_float32: tuple
    loss_scale: loss_scaling.LossScale | None
    slot_dtype: str = "auto"
    float8: str | None = None
    keep_16_bits: tuple = ()
    remat: str | tuple | None = None
    gather_dtype: str | None = None
    reduce_dtype: str | None = None
    reason: str | None = dataclasses.field(default=None, compare=False)
    accumulate_steps: int = dataclasses.field(default=1, compare=False)

    def comparable(self) -> "_Settings":
        """Returns the same settings with the names of classes, as a file has them."""

        def named(rules_or_mode):
            if not isinstance(rules_or_mode, tuple):
                return rules_or_mode
            return tuple(rules.written(rule) if isinstance(rule, type) else rule for rule in rules_or_mode)

        names = ("keep_float32", "keep_16_bits", "remat")
        return dataclasses.replace(self, **{name: named(getattr(self, name)) for name in names})


@keras.saving.register_keras_serializable(package="mpkeras")
class Policy(keras.DTypePolicy):
    """The dtypes of a model, the layers that stay in float32, and how its loss is scaled.

    A `Policy` is a `keras.DTypePolicy`: pass it as the `dtype` of any layer, or make it global with
    `mpkeras.set_global_policy`. It never changes; two policies with the same settings are equal.

    Args:
        name: A registered name, whose settings are the defaults of the other arguments, or a new one. The
            names that Keras knows (`"float32"`, `"mixed_float16"`, ...) always stand for Keras' dtypes.
        compute_dtype: Dtype of the arithmetic: `"float16"`, `"bfloat16"`, `"float32"` or `"float64"`.
            A new name needs it.
        variable_dtype: Dtype of the weights, from the same list. A new name needs it.
        slot_dtype: Dtype of what the optimizer keeps beside each weight: `"bfloat16"`, `"float32"`, or `"auto"`, that
            of the weight. Where weights or slots are bfloat16, the optimizer computes in float32, and each value it
            assigns is rounded stochastically: with Adam 6 or 8 bytes a parameter instead of 12.
        keep_float32: Rules for the layers that stay in float32: each a layer class or its name (`"Softmax"`, by any
            name that it has in `keras.layers`), `"activation:softmax"`, `"path:REGEX"`, searched in `layer.path`, or
            a layer. A rule of your own that matches nothing in a model is named in a warning, once. `None`: the
            registered rules, and for a new name `mpkeras.policies.default_rules()` if `compute_dtype` has 16 bits,
            none otherwise. `...` among yours stands for these; without it they no longer hold.
        loss_scale: `"dynamic"`, a number (fixed), a `LossScale`, or `None` for no scaling. `"auto"`: the
            registered setting, and for a new name `"dynamic"` if `compute_dtype` is `"float16"` (its
            smallest normal number is 6.1e-5, many gradients are smaller), `None` otherwise.
        float8: Whether the products of `Dense` and `EinsumDense` layers, those in attention among them, are computed
            in float8: operands in e4m3, gradients in e5m2. `"current"`: each tensor is scaled by the largest of its
            values. `None`: not, and for a registered name its setting. Needs `compute_dtype="bfloat16"`.
        keep_16_bits: Rules for the layers whose products are not in float8: as in `keep_float32`, and `"first"` and
            `"last"`, the first and the last layer of the model that multiplies with weights. `None`: the registered
            rules, and for a new name `("first", "last")`. `...` among yours stands for these.
        remat: The part of the forward pass that is kept for the backward pass, which computes the rest again (Chen et
            al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174): less memory for more time,
            with the same numbers. `"blocks"`: what the repeated blocks of a model are given. `"products"`: the products
            with weights, too, so that little is computed twice. Or rules as in `keep_float32`: the outputs of these
            layers. `None`: everything, and for a registered name its setting. See docs/memory.md.
        gather_dtype: The dtype in which a weight travels that is split over devices, where a layer reads all of it: its
            own or that of the arithmetic. `None`: that of the layer, and for a registered name its setting. Weights
            that a float32 layer reads travel in float32.
        reduce_dtype: The dtype in which gradients are summed over devices, one of these or `"bfloat16"`, `"float16"`.
            `None`: float32, and for a registered name its setting. See docs/many_devices.md.

    Raises:
        ValueError: If the name is unknown and a dtype is missing, if a dtype is not in the list, if a name
            that Keras knows is given other dtypes, if a rule or `remat` cannot be read, or if float8 is asked for with
            another compute dtype.
        TypeError: If an argument has the wrong type.

    Example:

    >>> policy = mpkeras.Policy("mixed_float16", loss_scale=1024.0)
    >>> policy.compute_dtype, policy.variable_dtype, policy.loss_scale
    ('float16', 'float32', FixedLossScale(scale=1024.0))
    >>> rules = (..., "path:head")
    >>> policy = mpkeras.Policy("mine", compute_dtype="bfloat16", variable_dtype="float32", keep_float32=rules)
    >>> policy.keep_float32 == (*mpkeras.policies.default_rules(), "path:head")
    True
    >>> keras.layers.Dense(2, dtype=policy).compute_dtype
    'bfloat16'

    References:
        Keras' policies: https://keras.io/api/mixed_precision/policy.
    """

    _settings: _Settings
    _accumulate_steps = 1

    def __init__(
        self,
        name: str,
        *,
        compute_dtype: str | None = None,
        variable_dtype: str | None = None,
        slot_dtype: str = "auto",
        keep_float32: Iterable | None = None,
        loss_scale: str | float | loss_scaling.LossScale | None = "auto",
        float8: str | None = None,
        keep_16_bits: Iterable | None = None,
        remat: str | Iterable | None = None,
        gather_dtype: str | None = None,
        reduce_dtype: str | None = None,
    ) -> None:
        # `super().__init__` is left out: it parses `name`, and a name of one's own says nothing about dtypes.
        _check_name(name)
        is_new = name not in REGISTERED and compute_dtype is not None and variable_dtype is not None
        base = None if is_new else registered(name)._settings
        if base is not None:
            compute_dtype = base.compute_dtype if compute_dtype is None else compute_dtype
            variable_dtype = base.variable_dtype if variable_dtype is None else variable_dtype
        compute_dtype = check_dtype("compute_dtype", compute_dtype)
        variable_dtype = check_dtype("variable_dtype", variable_dtype)
        if is_one_of(slot_dtype, ("auto",)) and base is not None and base.variable_dtype == variable_dtype:
            slot_dtype = base.slot_dtype
        # Rules and scale of a registered policy were chosen for its compute dtype.
        inherited = base if base is not None and base.compute_dtype == compute_dtype else None
        default_rules = rules.default_rules() if compute_dtype in SIXTEEN_BIT_DTYPES else ()
        keep_float32 = rules.filled_in(keep_float32, default_rules if inherited is None else inherited.keep_float32)
        if isinstance(loss_scale, str) and loss_scale == "auto":
            own_scale = "dynamic" if compute_dtype == "float16" else None
            loss_scale = own_scale if inherited is None else inherited.loss_scale
        if base is not None and base.float8 is not None:
            float8 = base.float8 if float8 is None else float8
            keep_16_bits = rules.filled_in(keep_16_bits, base.keep_16_bits)
        if base is not None and remat is None:
            remat = base.remat
        # As rules and scale: chosen for the dtypes of the registered policy.
        if inherited is not None and inherited.variable_dtype == variable_dtype:
            gather_dtype = inherited.gather_dtype if gather_dtype is None else gather_dtype
        if inherited is not None:
            reduce_dtype = inherited.reduce_dtype if reduce_dtype is None else reduce_dtype
        self._settings = _checked_settings(
            name,
            compute_dtype,
            variable_dtype,
            keep_float32,
            loss_scale,
            slot_dtype=slot_dtype,
            float8=float8,
            keep_16_bits=keep_16_bits,
            remat=remat,
            gather_dtype=gather_dtype,
            reduce_dtype=reduce_dtype,
            reason=None if inherited is None else inherited.reason,
        )

    @property
    def name(self) -> str:
        """The name of this policy."""
        return self._settings.name

    @property
    def _name(self):
        return self._settings.name

    @_name.setter
    def _name(self, value):
        # `DTypePolicyMap.get_config` writes None into the `_name` of its values. A policy never changes,
        # and its config carries both dtypes, so it does not need the global policy to be reloaded.
        del value

    @property
    def compute_dtype(self) -> str:
        """The dtype of the arithmetic."""
        return self._settings.compute_dtype

    @property
    def variable_dtype(self) -> str:
        """The dtype of the weights."""
        return self._settings.variable_dtype

    @property
    def slot_dtype(self) -> str:
        """The dtype of what the optimizer keeps beside each weight; `"auto"` is that of the weight."""
        return self._settings.slot_dtype

    @property
    def quantization_mode(self) -> None:
        """Always `None`: Keras' own policies describe quantized layers."""
        return None

    @property
    def keep_float32(self) -> tuple:
        """The rules for the layers that stay in float32, as they were given."""
        return self._settings.keep_float32

    @property
    def float8(self) -> str | None:
        """How products in float8 are scaled: `"current"`; `None` if none are in float8."""
        return self._settings.float8

    @property
    def keep_16_bits(self) -> tuple:
        """The rules for the layers whose products are not in float8; empty if none are."""
        return self._settings.keep_16_bits

    @property
    def remat(self) -> str | tuple | None:
        """The part that is kept for the backward pass: `"blocks"`, `"products"`, rules for layers, or `None`, all."""
        return self._settings.remat

    @property
    def gather_dtype(self) -> str | None:
        """The dtype in which a weight that is split over devices travels to a layer; `None` for that of the layer."""
        return self._settings.gather_dtype

    @property
    def reduce_dtype(self) -> str | None:
        """The dtype in which gradients are summed over devices; `None` for float32."""
        return self._settings.reduce_dtype

    @property
    def loss_scale(self) -> loss_scaling.LossScale | None:
        """How the loss is scaled; `None` if it is not."""
        return self._settings.loss_scale

    @property
    def accumulate_steps(self) -> int:
        """How many batches make one update: 1, but for what `mpkeras.plan_memory` returns."""
        return self._settings.accumulate_steps

    @property
    def reason(self) -> str | None:
        """Why `mixed_auto` chose these dtypes; `None` for other policies."""
        return self._settings.reason

    def keeps_float32(self, layer) -> Any:
        """Returns the first rule that keeps a layer in float32, or `None`.

        Args:
            layer: A `keras.layers.Layer`.

        Example:

        >>> policy = mpkeras.Policy("mixed_float16")
        >>> policy.keeps_float32(keras.layers.Dense(2, activation="softmax"))
        'activation:softmax'
        >>> policy.keeps_float32(keras.layers.Dense(2)) is None
        True
        """
        return rules.first_match(self.keep_float32, layer)

    def stock(self) -> keras.DTypePolicy | None:
        """Returns a stock Keras policy with the same dtypes, or `None` if there is none.

        Example:

        >>> mpkeras.Policy("mine", compute_dtype="float16", variable_dtype="float32").stock()
        <DTypePolicy "mixed_float16">
        """
        name = stock_name(self.compute_dtype, self.variable_dtype)
        return None if name is None else keras.DTypePolicy(name)

    def renamed(self, name: str, reason: str | None = None) -> "Policy":
        """Returns a policy with the same settings under another name.

        Args:
            name: A name that Keras does not know, or one that stands for these dtypes.
            reason: Why the policy was chosen; see `reason`.

        Raises:
            ValueError: If Keras knows the name and it stands for other dtypes, or the name is empty.
            TypeError: If the name is no string.

        Example:

        >>> mpkeras.Policy("mixed_bfloat16").renamed("mine").name
        'mine'
        """
        _check_name(name)
        check_keras_name(name, self.compute_dtype, self.variable_dtype)
        return Policy._from_settings(dataclasses.replace(self._settings, name=name, reason=reason))

    def with_remat(self, remat) -> "Policy":
        """Returns a policy with the same settings and name, but another `remat`.

        Args:
            remat: As the argument of `mpkeras.Policy`; `None` leaves this policy as it is.

        Raises:
            ValueError, TypeError: As `mpkeras.Policy`.

        Example:

        >>> mpkeras.Policy("mixed_bfloat16").with_remat("blocks").remat
        'blocks'
        """
        if remat is None:
            return self
        return Policy._from_settings(dataclasses.replace(self._settings, remat=_check_remat(remat)))

    def get_config(self) -> dict:
        # Everything is written out: reloading depends neither on the registry nor on the machine.
        config = {
            "name": self.name,
            "compute_dtype": self.compute_dtype,
            "variable_dtype": self.variable_dtype,
            "slot_dtype": self.slot_dtype,
            "keep_float32": rules.serialized(self.keep_float32),
            "loss_scale": keras.saving.serialize_keras_object(self.loss_scale),
        }
        if self.float8 is not None:
            config["float8"] = self.float8
            config["keep_16_bits"] = rules.serialized(self.keep_16_bits)
        if self.remat is not None:
            config["remat"] = rules.serialized(self.remat)
        for name in ("gather_dtype", "reduce_dtype"):
            if getattr(self, name) is not None:
                config[name] = getattr(self, name)
        if self.reason is not None:
            config["reason"] = self.reason
        return config

    @classmethod
    def from_config(cls, config: dict):
        missing = [key for key in _NEEDED if key not in config]
        if missing:
            raise ValueError(
                f"Expected the config of a policy, as `get_config` returns it. Received: {config!r}, without "
                f"{', '.join(missing)}. Make a policy with `mpkeras.Policy(name)`."
            )
        # Those that mpkeras 0.1 wrote have only what is needed.
        fields = {field.name: config[field.name] for field in dataclasses.fields(_Settings) if field.name in config}
        dtypes = {name: check_dtype(name, fields[name]) for name in ("compute_dtype", "variable_dtype")}
        if fields["name"] is None:
            # Keras 3.16 takes the name from what stands in a `DTypePolicyMap` without a default.
            fields["name"] = stock_name(*dtypes.values()) or "_".join(dtypes.values())
        settings = _checked_settings(**{**fields, **dtypes})
        # Keras gives a reloaded layer the *name* of its policy, unless that is a `DTypePolicyMap`. A name of
        # our own means nothing to Keras, and the layer could not be reloaded.
        if cls is Policy and keras_dtypes(settings.name) is None:
            return LayerPolicy._from_settings(settings)
        return cls._from_settings(settings)

    @classmethod
    def _from_settings(cls, settings: _Settings):
        policy = cls.__new__(cls)
        policy._settings = settings
        return policy

    def __eq__(self, other):
        return isinstance(other, Policy) and self._key() == other._key()

    def __hash__(self):
        # Not the loss scale: a rule of the user's own may not be hashable.
        return hash((self.name, self.compute_dtype, self.variable_dtype, self._settings.comparable().keep_float32))

    def _key(self):
        return self._settings.comparable(), ()

    def __repr__(self):
        return (
            f'<Policy "{self.name}": compute_dtype={self.compute_dtype}, variable_dtype={self.variable_dtype}, '
            + ("" if self.slot_dtype == "auto" else f"slot_dtype={self.slot_dtype}, ")
            + ("" if self.float8 is None else f"float8={self.float8}, ")
            + ("" if self.remat is None else f"remat={self.remat!r}, ")
            + ("" if self.gather_dtype is None else f"gather_dtype={self.gather_dtype}, ")
            + ("" if self.reduce_dtype is None else f"reduce_dtype={self.reduce_dtype}, ")
            + f"{len(self.keep_float32)} float32 rules, loss_scale={self.loss_scale}"
            + "".join(f"; {note}" for note in (describe(self) for describe in NOTES_FOR_REPR) if note)
            + ">"
        )


# Of a plan of `plan_memory` a file holds the policy: it is read where nobody has asked for that tool, too.
keras.saving.get_custom_objects()["mpkeras>MemoryPlan"] = Policy


def accumulating(policy: Policy, accumulate_steps: int) -> Policy:
    """Returns a policy with the settings and the name of `policy` and so many batches to an update."""
    if policy.accumulate_steps == accumulate_steps:
        return policy
    return Policy._from_settings(dataclasses.replace(policy._settings, accumulate_steps=accumulate_steps))


def storing_slots(policy: Policy, slot_dtype: str) -> Policy:
    """Returns a policy with the settings and the name of `policy` and this `slot_dtype`."""
    return Policy._from_settings(dataclasses.replace(policy._settings, slot_dtype=slot_dtype))


def with_rules(policy: Policy, *, keep_float32=(), keep_16_bits=()) -> Policy:
    """Returns a policy with the settings and the name of `policy` and these rules behind its own."""
    settings = dataclasses.replace(
        policy._settings,
        keep_float32=tuple(dict.fromkeys((*policy.keep_float32, *keep_float32))),
        keep_16_bits=tuple(dict.fromkeys((*policy.keep_16_bits, *keep_16_bits))),
    )
    return Policy._from_settings(settings)


# The texts of what is in force because of a policy, for its `repr`: functions of the policy that return a text or "".
NOTES_FOR_REPR: list[Callable[["Policy"], str]] = []


@keras.saving.register_keras_serializable(package="mpkeras")
class LayerPolicy(Policy, keras.dtype_policies.DTypePolicyMap):
    """A reloaded `Policy` with a name of its own, in the one form that a reloaded Keras layer keeps.

    It equals the `Policy` it was saved as. As with any `DTypePolicyMap`, `layer.dtype_policy = ...` on the
    built layer adds an entry for `layer.path`.
    """

    @classmethod
    def _from_settings(cls, settings: _Settings, policy_map: dict | None = None):
        policy = super()._from_settings(settings)
        policy._policy_map = dict(policy_map or {})
        return policy

    @property
    def default_policy(self) -> Policy:
        """The policy of every layer without an entry."""
        return Policy._from_settings(self._settings)

    def get_config(self) -> dict:
        config = super().get_config()
        if self._policy_map:
            config["policy_map"] = keras.saving.serialize_keras_object(self._policy_map)
        return config

    @classmethod
    def from_config(cls, config: dict):
        policy = Policy.from_config(config)
        entries = keras.saving.deserialize_keras_object(config.get("policy_map", {}))
        return cls._from_settings(policy._settings, entries)

    def _key(self):
        return self._settings.comparable(), tuple(
            sorted((path, repr(policy)) for path, policy in self._policy_map.items())
        )

    # `MutableMapping` would make it unhashable, false when it has no entries, and print as a map.
    __eq__ = Policy.__eq__
    __hash__ = Policy.__hash__
    __repr__ = Policy.__repr__

    def __bool__(self):
        return True


def registered(name: str) -> Policy:
    """Returns the policy registered as `name`. Raises `ValueError` if there is none."""
    if name not in REGISTERED:
        raise ValueError(_unknown_name(name))
    policy = REGISTERED[name]
    if not isinstance(policy, Policy):
        policy = REGISTERED[name] = policy()
    return policy


def _check_name(name):
    if not isinstance(name, str):
        raise TypeError(
            "Expected `name` to be a string. Received: "
            f"name={name!r} (of type {type(name).__name__}). Use a name such as 'mixed_float16'."
        )
    if not name:
        raise ValueError(
            "Expected a `name` that is not empty. Received: name=''. Use 'mixed_float16', or one of yours."
        )


def _checked_settings(
    name,
    compute_dtype,
    variable_dtype,
    keep_float32,
    loss_scale,
    slot_dtype="auto",
    float8=None,
    keep_16_bits=None,
    remat=None,
    gather_dtype=None,
    reduce_dtype=None,
    reason=None,
) -> _Settings:
    check_keras_name(name, compute_dtype, variable_dtype)
    return _Settings(
        name=name,
        compute_dtype=compute_dtype,
        variable_dtype=variable_dtype,
        keep_float32=rules.validate(keep_float32),
        loss_scale=loss_scaling.resolve(loss_scale),
        slot_dtype=check_slot_dtype(slot_dtype),
        float8=_check_float8(float8, compute_dtype),
        keep_16_bits=_check_keep_16_bits(keep_16_bits, float8),
        remat=_check_remat(remat),
        gather_dtype=_check_gather_dtype(gather_dtype, compute_dtype, variable_dtype),
        reduce_dtype=_check_reduce_dtype(reduce_dtype, compute_dtype),
        reason=reason,
    )


def _check_float8(float8, compute_dtype: str) -> str | None:
    if float8 is not None and not is_one_of(float8, ("current",)):
        raise ValueError(
            f"Expected `float8` to be 'current' or None. Received: float8={float8!r}. Use 'current': 'delayed' was "
            "removed."
        )
    if float8 is not None and compute_dtype != "bfloat16":
        # float16 does not hold sums of products of values up to 448 and 57344.
        raise ValueError(
            "Expected `compute_dtype='bfloat16'` beside float8: what is not in float8 needs float32's range. Received: "
            f"compute_dtype={compute_dtype!r}, float8={float8!r}. Use 'mixed_float8'."
        )
    return float8


def _check_gather_dtype(gather_dtype, compute_dtype: str, variable_dtype: str) -> str | None:
    if gather_dtype is None:
        return None
    gather_dtype = check_dtype("gather_dtype", gather_dtype)
    if gather_dtype not in (compute_dtype, variable_dtype):
        # In a third dtype a weight would be rounded twice, or travel with bits that nobody reads.
        raise ValueError(
            "Expected `gather_dtype` to be the dtype of the weights or of the arithmetic. Received: "
            f"gather_dtype={gather_dtype!r}, variable_dtype={variable_dtype!r}, compute_dtype={compute_dtype!r}. Leave "
            "it out for that of the arithmetic."
        )
    return gather_dtype


def _check_reduce_dtype(reduce_dtype, compute_dtype: str) -> str | None:
    if reduce_dtype is None:
        return None
    reduce_dtype = check_dtype("reduce_dtype", reduce_dtype)
    if reduce_dtype not in ("float32", *SIXTEEN_BIT_DTYPES, compute_dtype):
        raise ValueError(
            "Expected `reduce_dtype` to be 'float32', a dtype of 16 bits or that of the arithmetic. Received: "
            f"reduce_dtype={reduce_dtype!r}, compute_dtype={compute_dtype!r}. Leave it out for float32."
        )
    return reduce_dtype


def _check_remat(remat) -> str | tuple | None:
    if remat is None or is_one_of(remat, REMAT_WORDS):
        return remat
    if isinstance(remat, str):
        raise ValueError(
            f"Expected `remat` to be one of {REMAT_WORDS}, a list of rules for the layers whose outputs are kept, or "
            f"None. Received: remat={remat!r}. Use 'blocks', or for one rule [{remat!r}]."
        )
    layers = rules.validate(remat, "remat", "'blocks', or the layers whose outputs are kept: ['path:REGEX', layer]")
    if not layers:
        raise ValueError(
            "Expected `remat` to name layers whose outputs are kept. Received: none. Leave it out to keep everything."
        )
    return layers


def _check_keep_16_bits(keep_16_bits, float8) -> tuple:
    if float8 is None:
        if rules.validate(rules.filled_in(keep_16_bits, ()), "keep_16_bits"):
            raise ValueError(
                "Expected `keep_16_bits` for a policy with products in float8 only. Received: "
                f"keep_16_bits={keep_16_bits!r}, float8=None. Pass `float8='current'`, or leave `keep_16_bits` out."
            )
        return ()
    return rules.validate(rules.filled_in(keep_16_bits, DEFAULT_KEEP_16_BITS), "keep_16_bits")


def _unknown_name(name: str) -> str:
    if name.startswith("float8"):
        return (
            "Expected the name of a registered policy. No layer computes in float8 alone: products do. Received: "
            f"{name!r}. Use 'mixed_float8'."
        )
    near = difflib.get_close_matches(name, REGISTERED, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return (
        f"Expected the name of a registered policy. Received: {name!r}. {hint}Registered: "
        f"{', '.join(sorted(REGISTERED))}. For a new one pass `mpkeras.Policy` both `compute_dtype` and "
        "`variable_dtype`."
    )
