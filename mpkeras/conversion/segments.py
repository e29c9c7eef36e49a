"""The graph of a Functional model in segments: calls that follow one another, and are computed again together."""

import collections
import functools

import keras

from mpkeras import _keras


class Segments:
    """A graph that is cut behind some of its calls.

    The tensors that a segment takes from those before it are kept for the backward pass, and nothing else of it; but
    the last segment keeps all, as the backward pass begins there.

    Args:
        graph: A Functional model.
        ends: Numbers of calls, in the order in which Keras runs them: behind each the graph is cut.
        within: Function of a layer that returns it and the layers below it.
    """

    def __init__(self, graph, ends, within):
        self._graph = graph
        self._ends = ends
        self._within = within
        self._made_for: list = []
        self._parts: list = []

    def run(self, inputs, again, *args, **kwargs):
        """Returns the outputs of the graph for a flat list of tensors; `again` as the backends' `compute_again`."""
        values = dict(zip(map(id, self._graph.inputs), inputs, strict=True))
        parts = self._present()
        for function, layers in parts:
            run = functools.partial(_run_part, function, args, kwargs)
            tensors = [values[id(tensor)] for tensor in function.inputs]
            outputs = run(tensors) if function is parts[-1][0] else again(run, tensors, layers)
            values.update(zip(map(id, function.outputs), outputs, strict=True))
        return _keras.packed_outputs(self._graph, [values[id(tensor)] for tensor in self._graph.outputs])

    def _present(self) -> list:
        """Returns the segments of the graph as it is now: a conversion may have given it other outputs."""
        outputs = list(map(id, self._graph.outputs))
        if self._made_for != outputs:
            self._parts = self._made()
            self._made_for = outputs
        return self._parts

    def _made(self) -> list:
        groups = calls_between(self._graph, self._ends)
        parts = []
        known = set(map(id, self._graph.inputs))
        last_use = {id(x): number for number, group in enumerate(groups) for call in group for x in call.input_tensors}
        last_use |= {id(x): len(groups) for x in self._graph.outputs}
        for number, group in enumerate(groups):
            made = {id(tensor): tensor for call in group for tensor in call.outputs}
            taken = {id(x): x for call in group for x in call.input_tensors if id(x) in known}
            leaving = [tensor for key, tensor in made.items() if last_use.get(key, -1) > number]
            known |= made.keys()
            if leaving:
                operations = {id(call.operation): call.operation for call in group}
                layers = [x for x in operations.values() if isinstance(x, keras.layers.Layer)]
                inner = {id(each): each for layer in layers for each in self._within(layer)}
                parts.append((keras.Function(list(taken.values()), leaving), list(inner.values())))
        return parts


def _run_part(function, args, kwargs, tensors) -> list:
    return getattr(function, _keras.RUN_GRAPH)(tensors, *args, **kwargs)


def calls_between(graph, ends) -> list[list]:
    """Returns the calls in a graph that is cut behind those with the numbers `ends`: a list for each part."""
    groups: list = [[]]
    for number, call in enumerate(_keras.calls_in_order(graph)):
        groups[-1].append(call)
        if number in ends:
            groups.append([])
    return [group for group in groups if group]


def ends_behind(graph, layers) -> set:
    """Returns the numbers of the calls in a graph that run one of `layers`."""
    identities = {id(layer) for layer in layers}
    return {number for number, call in enumerate(_keras.calls_in_order(graph)) if id(call.operation) in identities}


def ends_of_blocks(graph) -> set:
    """Returns the numbers of the calls that end the repeated blocks of a graph; empty where there are none.

    A block lies between two places at which a single tensor that depends on weights is handed on. Several such parts
    that follow each other again and again (attention and the dense layers behind it) are one block.
    """
    calls = _keras.calls_in_order(graph)
    # The first block may stand on the inputs themselves. What is kept of inputs costs nothing: they count where more
    # blocks are found with them, and not where one leads past all blocks.
    of_floats = [x for x in graph.inputs if keras.backend.is_float_dtype(x.dtype)]
    choices = [_repeated_units(graph, calls, _weighted(calls, inputs)) for inputs in ((), of_floats)]
    units, (start, period, length) = max(choices, key=lambda repeated: repeated[1][2])
    if length < 2 * period:
        return set()
    ends = {end - 1 for _, end in units[start + period - 1 : start + length : period]}
    # The calls before the first block are no part of it. Behind the last call of all there is nothing to cut off.
    return (ends | ({units[start][0] - 1} if units[start][0] else set())) - {len(calls) - 1}


def end_before_last_weights(graph) -> set:
    """Returns the number of the call before the last one with weights; empty where fewer than three have some."""
    calls = _keras.calls_in_order(graph)
    numbers = [number for number, call in enumerate(calls) if getattr(call.operation, "weights", ())]
    return {numbers[-1] - 1} if len(numbers) > 2 else set()


def _repeated_units(graph, calls, weighted) -> tuple[list, tuple]:
    """Returns the `_units` of a graph, and which of them repeat, as `_longest_run`."""
    units = _units(graph, calls, weighted)
    # Without what computes masks, which Keras does somewhere between.
    parts = [[call for call in calls[begin:end] if id(call.outputs[0]) in weighted] for begin, end in units]
    return units, _longest_run([frozenset(type(call.operation).__name__ for call in part) for part in parts])


def _units(graph, calls, weighted) -> list[tuple[int, int]]:
    """Returns `(begin, end)` of the parts of a graph between its narrow places, but what leads to the outputs."""
    last_use = {id(x): number for number, call in enumerate(calls) for x in call.input_tensors}
    last_use |= {id(x): len(calls) for x in graph.outputs}
    branching, begin = [], 0
    ending = collections.Counter(last_use[id(x)] for x in graph.inputs if id(x) in weighted and id(x) in last_use)
    alive = widest = ending.total()
    for number, call in enumerate(calls):
        lasting = [last_use[id(x)] for x in call.outputs if id(x) in weighted and last_use.get(id(x), -1) > number]
        ending.update(lasting)
        alive += len(lasting) - ending.pop(number, 0)
        widest = max(widest, alive)
        if alive == 1:
            branching.append((begin, number + 1, widest > 1))
            begin, widest = number + 1, 1
    if any(is_wide for *_, is_wide in branching):
        starts = [(begin, end) for begin, end, is_wide in branching if is_wide]
    else:
        starts = [(number, number + 1) for number, call in enumerate(calls) if getattr(call.operation, "weights", ())]
    # Calls between two such parts belong to the first; behind the last, those that an earlier one ends in, too.
    nexts = [begin for begin, _ in starts[1:]]
    units = [(begin, following) for (begin, _), following in zip(starts, nexts, strict=False)]
    return units + [(begin, end + _length_of_tail(calls, starts, units, end)) for begin, end in starts[-1:]]


def _length_of_tail(calls, starts, units, end) -> int:
    """Returns how many calls from number `end` on are as those behind the last earlier part that is as the last one."""
    types = [type(call.operation) for call in calls]
    for (begin, end_of_part), (_, end_of_unit) in zip(reversed(starts[:-1]), reversed(units), strict=True):
        if types[begin:end_of_part] == types[starts[-1][0] : end]:
            tail = types[end_of_part:end_of_unit]
            return len(tail) if types[end : end + len(tail)] == tail else 0
    return 0


def _weighted(calls, inputs) -> set:
    """Returns ids of `inputs`, and of the tensors that depend on them or on weights.

    These are not masks, positions and the like, which cost nothing.
    """
    tensors: set = set(map(id, inputs))
    for call in calls:
        if getattr(call.operation, "weights", ()) or any(id(x) in tensors for x in call.input_tensors):
            tensors.update(map(id, call.outputs))
    return tensors


def _longest_run(names: list) -> tuple[int, int, int]:
    """Returns `(start, period, length)` of the longest part of a list that repeats; the shortest period wins."""
    best = (0, 1, 0)
    for period in range(1, 5):
        start = 0
        while start + 2 * period <= len(names):
            end = start + period
            while end < len(names) and names[end] == names[end - period]:
                end += 1
            length = (end - start) // period * period
            if length >= 2 * period and length > best[2]:
                best = (start, period, length)
            # A run from a place before this one ends where this one does, and is shorter.
            start = end - period + 1
    return best
