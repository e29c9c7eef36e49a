"""The symbolic dtypes of Functional and Sequential models, after their layers have changed."""

import importlib
import weakref

import keras

from mpkeras import _keras
from mpkeras._replaced import replaced_attributes
from mpkeras.conversion.raw_inputs import casts_by_itself
from mpkeras.policies.survey import Survey

# The part of the active backend: only that may be imported.
_backend = importlib.import_module(f"mpkeras.conversion._{keras.backend.backend()}")

# Graph -> how its layers computed when its symbolic dtypes were brought up to date last.
_refreshed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def refresh_graphs(model):
    """Brings the symbolic dtypes of every Functional and Sequential model in `model` up to date, inner ones first.

    Keras runs each layer for it, and what a layer raises comes out: within `converting(model, refreshes=True)` the
    model is then as before. It costs a trace, so a graph whose layers are as they were the last time is left alone.
    """
    if any(map(_keras.is_purged, model.variables)):
        # In a step of `fit` on JAX no layer can be run so.
        return
    survey = Survey(model)
    for layer in reversed(survey.layers):
        graph = _keras.graph_of(layer)
        if graph is None:
            continue
        present = [_how_computed(inner) for inner in survey.within(layer)]
        if _refreshed.get(graph) != present:
            # What a layer raises on the way leaves no note.
            _refreshed.pop(graph, None)
            with _backend.buffers_put_back(survey.layers):
                _keras.refresh_symbolic_dtypes(graph, casts_by_itself)
            _refreshed[graph] = present


def _how_computed(layer) -> tuple:
    replaced = {(entry.name, entry.kind) for entry in replaced_attributes(layer)}
    return id(layer), layer.compute_dtype, layer.variable_dtype, replaced
