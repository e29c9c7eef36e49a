"""Outputs of a model are float32: the layers that make its outputs are found, and 16-bit outputs end in a cast."""

import contextlib
import functools
import importlib
import inspect
import re
import types
import weakref
from collections.abc import Callable

import keras

from mpkeras import _keras
from mpkeras._replaced import is_replaced, replace, replaced_on_all, restore, value_below
from mpkeras.conversion.inner_results import can_run, changes_asked_about, dtypes_returned, taking_inner_results
from mpkeras.conversion.mixing import MixedDtypesError, in_silence
from mpkeras.conversion.noted_casts import noting_casts
from mpkeras.conversion.raw_inputs import cast_inputs, is_to_tell, let_keras_cast_inputs, passes_inputs_on
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, widen
from mpkeras.policies.heads import (
    GIVEN,
    NO_HEADS,
    Flow,
    Heads,
    called_by,
    casts_inside,
    heads_in_flow,
    is_large,
    is_large_together,
    names_with_layers_inside,
    used_behind_layers,
)
from mpkeras.policies.reach import asks_for
from mpkeras.policies.rules import is_quantized

# What ends a 16-bit output in float32. In a file of `convert` it is a layer, known by this name on the way back.
CAST_NAME = "mpkeras_float32_output"

# The part of the active backend: only that may be imported.
_backend = importlib.import_module(f"mpkeras.conversion._{keras.backend.backend()}")
# Names in a `call` that may cast what the layers inside return. Layers that it makes have the global policy.
_CASTING = {"dtype", *dir(keras.layers)}
# By model: the dtypes that its layers were last asked with, and what was left open.
_unanswered: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def return_float32(layer):
    """Ends in float32 what the `call` of a model returns, in whatever structure."""
    call = layer.call

    @functools.wraps(call)
    def call_and_widen(*args, **kwargs):
        return keras.tree.map_structure(widen, call(*args, **kwargs))

    replace(layer, "call", call_and_widen, kind="outputs")


def serve_with_float32_inputs(model):
    """Lets `export` take float32 where Keras goes by what the model computes in, and refuses float32 then."""
    export = model.export
    signature = inspect.signature(export)

    @functools.wraps(export)
    def export_with_float32_inputs(*args, **kwargs):
        options = signature.bind(*args, **kwargs)
        if options.arguments.get("input_signature") is None:
            options.arguments["input_signature"] = _keras.float32_signature(model)
        return export(*options.args, **options.kwargs)

    replace(model, "export", export_with_float32_inputs, kind="outputs")


def read_variables_in_float32(model):
    """Reads variables that no layer inside reads in float32 in the `call` of a model; layers read theirs as before."""
    replace(model, "call", _reading_float32(model.call), kind="variables")


def _reading_float32(call):
    @functools.wraps(call)
    def call_in_float32(*args, **kwargs):
        with _keras.computing_in_float32():
            return call(*args, **kwargs)

    return call_in_float32


def make_layers_as_it_computes(layer):
    """Makes layers that the `call` of `layer` makes compute in float32 while `layer` does."""
    call = layer.call
    call_in_float32 = _reading_float32(call)

    @functools.wraps(call)
    def call_and_make(*args, **kwargs):
        return (call_in_float32 if layer.compute_dtype == "float32" else call)(*args, **kwargs)

    replace(layer, "call", call_and_make, kind="made inside")


def reads_variables_in_float32(model) -> bool:
    """Whether `read_variables_in_float32` is in force."""
    return is_replaced(model, "call", "variables")


def compute_metrics_in_float32(model):
    """Hands the metrics of a model float32, which its user's own step may compute from layers in 16 bits.

    Keras casts what a loss gets, and hands a metric what the step has: the mean absolute error of prices of 80000 is
    inf in float16. A model whose step hands its own `compute_metrics` other arguments has none to widen there.
    """
    compute_metrics = model.compute_metrics
    signature = inspect.signature(compute_metrics)

    @functools.wraps(compute_metrics)
    def compute_float32_metrics(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        if "y_pred" in given.arguments:
            given.arguments["y_pred"] = keras.tree.map_structure(widen, given.arguments["y_pred"])
        return compute_metrics(*given.args, **given.kwargs)

    replace(model, "compute_metrics", compute_float32_metrics, kind="outputs")


def tell_heads_at_first_call(layer, tell: Callable, withdraw: Callable, is_whole: bool = False):
    """Calls `tell` with the layers inside `layer` that make its outputs, before it computes for the first time.

    Where the `call` then mixes dtypes that the backend refuses, as it computes with its inputs itself, Keras casts
    these again; or what meets the result of a head is made float32. Where neither helps, as behind a cast of the
    user's, `withdraw` is called, and the layers are as before.

    Args:
        layer: A layer or model whose `call` is its user's: no graph shows which of the layers inside makes an output.
            Its first call is traced once before it runs, for shapes alone.
        is_whole: Whether `layer` is the whole model, which stays in 16 bits whatever its `call` computes itself.
        tell, withdraw: Functions of the `Heads` inside `layer`. `withdraw` takes back, too, what the `unknown` ones
            among them have told, or would tell later.
    """
    call = layer.call

    @functools.wraps(call)
    def call_and_tell(*args, **kwargs):
        # Keras builds what is not built by a run of its own, which comes this way first. Its results are not used.
        is_built = layer.built
        if is_built:
            if not all(inner.built for inner in _keras.flatten_layers(layer)):
                # No call uses it, or the first one builds it.
                can_run(layer, taking_inner_results(layer, call), args, kwargs)
            restore(layer, "call", kind="heads")
            ask = functools.partial(_ask_call, layer, tell=tell, withdraw=withdraw, is_whole=is_whole)
            in_other_mode = _arguments_of_other_mode(layer, args, kwargs)
            if in_other_mode is not None:
                ask(*in_other_mode, may_fail=True)
            args, kwargs = ask(args, kwargs)
            if layer.compute_dtype == "float32":
                # From this call on, whose inputs Keras has cast already.
                args, kwargs = keras.tree.map_structure(widen, (args, kwargs))
        reads_float32 = layer.compute_dtype == "float32" or reads_variables_in_float32(layer)
        run = _reading_float32(call) if reads_float32 else call
        try:
            return run(*args, **kwargs)
        except MixedDtypesError:
            if is_built or not passes_inputs_on(layer):
                raise
            args, kwargs = cast_inputs(layer, args, kwargs)
            return call(*args, **kwargs)

    replace(layer, "call", call_and_tell, kind="heads")


def _arguments_of_other_mode(layer, args, kwargs) -> tuple | None:
    """Returns the arguments of the same call in inference, if it is one in training, and the other way round.

    `None` where the `call` does the same in both, but for what it hands `training` to: other outputs may come of it.
    """
    call = called_by(type(layer).call)
    if not isinstance(call, types.FunctionType) or not asks_for(call, "training"):
        return None
    try:
        bound = inspect.signature(call).bind(layer, *args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    if "training" not in bound.arguments:
        return None
    bound.arguments["training"] = not bound.arguments["training"]
    return bound.args[1:], bound.kwargs


def _ask_call(layer, args, kwargs, *, tell: Callable, withdraw: Callable, is_whole: bool, may_fail=False) -> tuple:
    """Tells what makes the outputs of a call of `layer`, and returns the arguments for it, as `_tell_heads`.

    Nothing where it `may_fail`, as in a mode that nobody uses, and does.
    """
    flow = _flow_in_float32(layer, value_below(layer, "call"), args, kwargs)
    if flow is not None:
        heads, used = heads_in_flow(layer, flow), used_behind_layers(flow)
    elif may_fail:
        return args, kwargs
    else:
        # It is not known how the call uses weights of its own.
        weights = _keras.own_weights(layer)
        heads, used = NO_HEADS, [GIVEN, *weights] if weights else []
    args, kwargs = _tell_heads(layer, heads, used, args, kwargs, tell, withdraw, is_whole=is_whole)
    tell(_of_own_arithmetic(layer, used, args, kwargs, is_whole=is_whole))
    return args, kwargs


def _tell_heads(layer, heads, used, args, kwargs, tell: Callable, withdraw: Callable, *, is_whole: bool) -> tuple:
    """Tells the `heads` inside `layer`, or withdraws them where its `call` does not run so.

    Returns:
        The arguments of the `call`, in place of `args` and `kwargs`.
    """
    tell(heads)
    may_mix = heads.layers or heads.unknown or passes_inputs_on(layer)
    if not may_mix or _runs(layer, args, kwargs):
        return args, kwargs
    cast = cast_inputs(layer, args, kwargs) if passes_inputs_on(layer) else None
    if cast is None or not _runs(layer, *cast):
        # The results of heads meet 16 bits.
        if _uses_given(used) and not is_whole and not is_large(layer):
            attempts = [(Heads([layer]), keras.tree.map_structure(widen, (args, kwargs)))]
        else:
            # First the layers that outputs are made of: what goes from layer to layer in float32 takes memory.
            attempts = [(_widening(parts, heads), (args, kwargs)) for parts in (used, _keras.direct_sublayers(layer))]
        for meeting, given in attempts:
            tell(meeting)
            if _runs(layer, *given):
                return given
            withdraw(meeting)
        withdraw(heads)
        # Where heads and inputs both meet 16 bits, as in the steps of a flow, it takes both.
        if cast is None or _runs(layer, args, kwargs) or not _runs(layer, *cast):
            return args, kwargs
    let_keras_cast_inputs(layer)
    return cast


def _widening(parts, heads: Heads) -> Heads:
    """Returns what is to be told of the layers in 16 bits among `parts`, where results of `heads` meet theirs."""
    layers = [part for part in parts if isinstance(part, keras.layers.Layer) and part not in heads.layers]
    return Heads(widened=[layer for layer in layers if layer.compute_dtype in SIXTEEN_BIT_DTYPES])


def _of_own_arithmetic(layer, used, args, kwargs, *, is_whole: bool) -> Heads:
    """Returns what is to be told of a `layer` whose `call` computes outputs with variables itself.

    They are read in float32 where what the layers inside are given stays as it is: a scale and a mean behind the last
    layer do that, and positions that are added in front of one would not. Otherwise, and where the call computes
    outputs with what it is given, too, all of a layer inside a model is in float32, unless it is large. So is a layer
    that names its own dtype, to which it may cast an output, or casts one to that of its inputs, where what the layers
    inside are given stays as it is. A whole model, too, makes layers behind those inside in float32.

    Args:
        used: What `used_behind_layers` returned for a trace of the call.
    """
    variables = [part for part in used if isinstance(part, keras.Variable)]
    if layer.compute_dtype not in SIXTEEN_BIT_DTYPES:
        return NO_HEADS
    is_one_layer = not is_whole and not is_large(layer)
    if is_one_layer and _uses_given(used):
        # Rounded inputs would round the outputs: a forecast is the last value of the data and a small change.
        return Heads([layer])
    # A cast of what a layer inside returns would round it, unless the layer itself is in float32.
    names = names_with_layers_inside(layer)
    ends_small = not names.isdisjoint(_CASTING) and _ends_in_16_bits(layer, args, kwargs)
    may_cast = is_one_layer and ("compute_dtype" in names or ends_small)
    if not variables and not may_cast and not ends_small:
        return NO_HEADS
    if is_one_layer and variables and casts_inside(layer):
        return Heads([layer])
    if not is_large_together(variables):
        call = value_below(layer, "call")
        inside = _keras.flatten_layers(layer)
        if is_whole and not variables:
            # What layers made inside hand to a layer in float32 are the same numbers, wider.
            inside = [inner for inner in inside if inner.compute_dtype in SIXTEEN_BIT_DTYPES]
        given = _given_to(inside, layer, call, args, kwargs)
        ways = [Heads([layer])] if may_cast or casts_inside(layer) else []
        ways += [Heads(reading=[layer])] if (variables or ends_small) and not casts_inside(layer) else []

        def run_as(way):
            def run(*args, **kwargs):
                _read_in_float32(variables)
                with _in_float32(way.layers):
                    return _reading_float32(call)(*args, **kwargs)

            return run

        for way in ways:
            if given is not None and given == _given_to(inside, layer, run_as(way), args, kwargs):
                return way
    return Heads([layer]) if is_one_layer and variables else NO_HEADS


def _ends_in_16_bits(layer, args, kwargs) -> bool:
    """Whether the `call` casts what the layers inside return, now that heads among them compute in float32."""
    with in_silence():
        returned = dtypes_returned(layer, taking_inner_results(layer, value_below(layer, "call")), args, kwargs)
    return any(dtype in SIXTEEN_BIT_DTYPES for dtype in returned or ())


def _uses_given(used) -> bool:
    # A variable that is compared by `==` compares its numbers.
    return any(part is GIVEN for part in used)


def _given_to(inside, layer, call, args, kwargs) -> list | None:
    """Returns the dtypes of what `inside`, layers in `layer`, cast in its `call`; `None` where that does not run."""
    given: list = []

    def note(tensor, _):
        given.append(keras.backend.standardize_dtype(tensor.dtype))

    with in_silence(), contextlib.ExitStack() as stack:
        for inner in inside:
            stack.enter_context(noting_casts(inner, note))
        runs = can_run(layer, taking_inner_results(layer, call), args, kwargs)
    return given if runs else None


def _runs(layer, args, kwargs) -> bool:
    """Whether the `call` of `layer` can be traced as its layers compute now."""
    call = value_below(layer, "call")
    call = _reading_float32(call) if layer.compute_dtype == "float32" else call
    with in_silence():
        return can_run(layer, taking_inner_results(layer, call), args, kwargs)


def let_heads_tell(model, *args, **kwargs):
    """Lets the layers of `model` that wait for their first call tell their heads, by a call for shapes alone.

    By then layers of the user's know, too, which of the layers inside return 16 bits to them. Where a call with these
    dtypes has told all that it can, there is none.

    `args` and `kwargs` are what the model takes: arrays or tensors, symbolic ones included.
    """

    def as_tensor(value):
        return value if isinstance(value, keras.KerasTensor) else keras.ops.convert_to_tensor(value)

    def open_questions():
        waiting = [layer for layer in layers if is_replaced(layer, "call", "heads") or is_to_tell(layer)]
        return [(id(layer), layer.built) for layer in waiting], changes_asked_about(layers)

    layers = _keras.flatten_layers(model, include_self=True)
    if open_questions() == ([], None):
        return
    args, kwargs = keras.tree.map_structure(as_tensor, (args, kwargs))
    dtypes = [keras.backend.standardize_dtype(leaf.dtype) for leaf in keras.tree.flatten((args, kwargs))]
    # A layer that is given integers alone never tells whether it hands on floats.
    if _unanswered.get(model) != (dtypes, open_questions()):
        with in_silence():
            _backend.trace(model, model, args, kwargs)
        _unanswered[model] = dtypes, open_questions()


def _flow_in_float32(layer, call, args, kwargs) -> Flow | None:
    """Returns what a trace of the `call` of `layer` shows; `None` where it cannot be traced.

    All of it is in float32, where a head mixes no dtypes: it may do so in 16 bits, in which it will not compute.
    """
    inside = _keras.flatten_layers(layer, include_self=True)
    try:
        with _keras.kept_losses(inside), _in_float32(inside), in_silence(), _keras.computing_in_float32():
            return _flow(layer, call, *keras.tree.map_structure(widen, (args, kwargs)))
    except Exception:  # The call itself says if something is wrong with it; or quantized layers mix with float32.
        return None


def _flow(layer, call, args, kwargs) -> Flow:
    flows: list = []

    def run(*args, **kwargs):
        trace = _backend.FlowTrace()

        def noted(inner, replacement):
            inner_call = inner.call if replacement is None else replacement

            @functools.wraps(inner_call)
            def call_and_note(*args, **kwargs):
                return mark(inner_call(*args, **kwargs), inner)

            return call_and_note

        def mark(structure, made_by):
            def marked(value):
                is_marked = keras.ops.is_tensor(value) and (made_by is not GIVEN or _is_float(value))
                if not is_marked:
                    return value
                new = trace.mark(value, made_by)
                _keras.copy_mask(value, new)
                return new

            return keras.tree.map_structure(marked, structure)

        def call_with_marks(*args, **kwargs):
            _read_in_float32(layer.variables, trace.mark)
            args, kwargs = mark((args, kwargs), GIVEN)
            return call(*args, **kwargs)

        with replaced_on_all(_keras.flatten_layers(layer), "call", noted):
            # Keras traces it twice where a size is not known.
            flows[:] = [trace.run(call_with_marks, args, kwargs)]

    _backend.trace(layer, run, args, kwargs)
    return flows[0]


def _read_in_float32(variables, mark=lambda value, variable: value):
    """Lets `variables` be read in float32, and marked, in the trace that is being made.

    On torch, where Keras asks for dtypes alone, what stands for them has that of no scope.
    """
    scope = _keras.stateless_scope()
    for variable in filter(_keras.follows_autocast, variables):
        scope.add_update((variable, mark(keras.ops.cast(variable.value, "float32"), variable)))


def _is_float(tensor) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype))


@contextlib.contextmanager
def _in_float32(layers):
    """Context manager: of `layers`, those in 16 bits compute in float32; what is quantized stays as it is."""
    policies = [
        (layer, layer.dtype_policy)
        for layer in layers
        if layer.compute_dtype in SIXTEEN_BIT_DTYPES and not is_quantized(layer)
    ]
    try:
        for layer, _ in policies:
            layer.dtype_policy = "float32"
        yield
    finally:
        for layer, policy in policies:
            layer.dtype_policy = policy


def end_in_float32(model, in_file: bool = False):
    """Casts 16-bit outputs of a Functional or Sequential model to float32; takes out casts that are not needed.

    With `in_file` the casts are layers, which files of all formats can hold.
    """
    graph = _keras.graph_of(model)
    if graph is None:
        return
    restore(graph, "get_config", kind="converted")
    structure = _keras.output_structure(graph)
    old_outputs = keras.tree.flatten(structure)
    plain_outputs = [without_cast(output) for output in old_outputs]
    cast = _cast_by_layer if in_file else _keras.cast_to_float32
    outputs = [cast(output, i) if _is_in_16_bits(output) else output for i, output in enumerate(plain_outputs)]
    if any(new is not old for new, old in zip(outputs, old_outputs, strict=True)):
        # The names that Keras gives outputs are those of what made them.
        names = [_keras.made_by(output)[0].name for output in (outputs if in_file else plain_outputs)]
        _keras.replace_outputs(graph, keras.tree.pack_sequence_as(structure, outputs), names)
        if graph is not model:
            _keras.replace_last_layers(model, _cast_layers(old_outputs), _cast_layers(outputs))
    cast_outputs = [plain for plain, new in zip(plain_outputs, outputs, strict=True) if new is not plain]
    if not in_file and any(map(_loses_in_file, cast_outputs)):
        _save_without_casts(graph, keras.tree.pack_sequence_as(structure, plain_outputs))


def _is_in_16_bits(tensor) -> bool:
    """Whether a symbolic tensor is in 16 bits. Keras 3.15.1 says float32 of one that `ops.normalize` made of them."""
    waiting, met = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        # Each once, as `x * x` is given one tensor twice.
        if id(tensor) in met or tensor.dtype in SIXTEEN_BIT_DTYPES:
            continue
        met.add(id(tensor))
        operation, node_index = _keras.made_by(tensor)
        says_what_it_is = isinstance(operation, keras.layers.Layer) or _keras.is_cast(operation)
        given = [] if says_what_it_is else list(filter(_is_float, _keras.inputs_of_call(operation, node_index)))
        if tensor.dtype != "float32" or not given:
            return False
        waiting += given
    return True


def _loses_in_file(output) -> bool:
    """Whether an output would lose something of its user's by a cast behind it in plain Keras: its name, or a mask."""
    maker = _keras.made_by(output)[0]
    named_by_keras = re.sub(r"_\d+$", "", maker.name).replace("_", "") == type(maker).__name__.lower()
    return not named_by_keras or _keras.has_mask(output)


def _save_without_casts(graph, plain_outputs):
    get_config = graph.get_config

    @functools.wraps(get_config)
    def get_config_without_casts():
        with _keras.replaced_outputs(graph, plain_outputs):
            return get_config()

    replace(graph, "get_config", get_config_without_casts, kind="converted")


def _cast_layers(outputs) -> list:
    layers = [_keras.made_by(output)[0] for output in outputs]
    return [layer for layer in layers if layer.name.startswith(CAST_NAME)]


def _cast_by_layer(output, index: int):
    return keras.layers.Activation("linear", dtype="float32", name=f"{CAST_NAME}_{index}")(output)


def without_cast(output):
    """Returns what the cast of an earlier conversion was given; any other output as it is."""
    layer, node_index = _keras.made_by(output)
    if layer.name.startswith(CAST_NAME) or _keras.is_float32_cast(output):
        return _keras.inputs_of_call(layer, node_index)[0]
    return output
