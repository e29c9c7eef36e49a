"""What counts as public, and what its code and its docstring say."""

import ast
import importlib
import inspect
import re
import textwrap

MODULES = ("mpkeras", "mpkeras.layers", "mpkeras.callbacks")
# Named in README.md and docs/, where their modules have no `__all__` for users.
DOCUMENTED = (
    "mpkeras.export.convert.convert",
    "mpkeras.policies.default_rules",
    "mpkeras.policies.describe_rules",
    "mpkeras.training.state.load_state_dict",
    "mpkeras.training.state.state_dict",
)
# What public functions return: read and called by users, and made by nobody else.
RETURNED = (
    "mpkeras.export.convert.ConversionReport",
    "mpkeras.insight.advice.AdviceReport",
    "mpkeras.insight.audit.AuditReport",
    "mpkeras.insight.capsule.Capsule",
    "mpkeras.insight.comparison.Comparison",
    "mpkeras.insight.forecast.Forecast",
    "mpkeras.insight.forecast.MemoryPlan",
    "mpkeras.insight.hardware.HardwareReport",
    "mpkeras.insight.numerics.NumericsReport",
    "mpkeras.training.autoprepare.AutoPrepare",
    "mpkeras.training.step.TrainStep",
)
# Without an underscore as other modules of mpkeras call them; no user does.
INTERNAL = {
    "AdviceReport.add_remark",
    "Forecast.add",
    "Forecast.add_largest_batch",
    "Forecast.room",
    "LossScaleOptimizer.decide",
    "LossScaleOptimizer.rounding",
    "LossScaleOptimizer.store_slots",
    "LossScaleOptimizer.unscale",
    "OutputDtype.cast_output",
    "TrainStep.run_as_made",
    "TrainStep.traced_for",
}

_ENTRY = re.compile(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):", flags=re.MULTILINE)


def _resolve(path: str):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def public_objects() -> dict:
    """Returns the public functions and classes by their shortest name."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            thing = getattr(module, name)
            if callable(thing):
                found.setdefault(thing, f"{module.__name__}.{name}")
    for path in (*DOCUMENTED, *RETURNED):
        found.setdefault(_resolve(path), path)
    return {path: thing for thing, path in found.items()}


def own_classes(cls) -> list:
    """Returns the class and those of its bases that are mpkeras' own."""
    return [base for base in inspect.getmro(cls) if base.__module__.startswith("mpkeras")]


def public_members(cls) -> dict:
    """Returns the public methods and properties that mpkeras itself documents, by `Class.name`.

    One without a docstring does what the documented one of the same name in a base class does: Keras' `call`, or
    `LossScale.next_state`.
    """
    found = {}
    for base in own_classes(cls):
        for name, member in vars(base).items():
            is_member = inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod))
            if name.startswith("_") or not is_member:
                continue
            documented_above = any((getattr(vars(b).get(name), "__doc__", None)) for b in inspect.getmro(base)[1:])
            later = any(name in vars(b) and not b.__module__.startswith("mpkeras") for b in inspect.getmro(cls))
            if member.__doc__ or not (documented_above or later):
                found.setdefault(f"{base.__name__}.{name}", member)
    return found


def section(doc: str, title: str) -> str:
    """Returns what stands indented under `title:`; empty where there is no such section."""
    match = re.search(rf"^{title}:\n((?:(?: {{4}}.*)?\n)*)", inspect.cleandoc(doc) + "\n", flags=re.MULTILINE)
    return match.group(1) if match else ""


def documented_parameters(doc: str, title: str = "Args") -> set:
    """Returns the names that a section explains; `a, b:` explains two."""
    entries = _ENTRY.findall(section(doc, title))
    return {name.strip("* ") for entry in entries for name in entry.split(",")}


def parameters(thing) -> set:
    # Of a class by its constructor: Keras' layers have a `__new__`, which some versions of Python ask first.
    function = thing.__init__ if inspect.isclass(thing) else thing
    if function is object.__init__:
        return set()
    return {name for name in inspect.signature(function).parameters if name not in ("self", "cls")}


def syntax(function) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


def returns_a_value(function) -> bool:
    """Whether the function itself, not one inside it, has `return` with a value."""
    todo = list(syntax(function).body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, ast.Return) and node.value is not None:
            return True
        todo.extend(ast.iter_child_nodes(node))
    return False


def raised(function) -> set:
    """Returns the names of the exceptions that the function raises, itself or through a check that it calls.

    A check is a function of mpkeras, called by its name, whose own name begins with `check`, `checked` or `refuse`, or
    with an underscore, or a method `self._check...`. What is raised further down is documented there.
    """
    names, seen, todo = set(), set(), [function]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        for node in ast.walk(syntax(current)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                names.add(node.exc.func.id)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called = current.__globals__.get(node.func.id)
                is_ours = inspect.isfunction(called) and called.__module__.startswith("mpkeras")
                if is_ours and re.match(r"_|check|refuse", called.__name__):
                    todo.append(called)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if ast.unparse(node.func).startswith("self._check"):
                    owner = current.__globals__[current.__qualname__.partition(".")[0]]
                    todo.append(getattr(owner, node.func.attr))
    return names - {"NotImplementedError"}


def function_of(member):
    """Returns the function behind a method, a class method or a property."""
    if isinstance(member, property):
        return member.fget
    return inspect.unwrap(getattr(member, "__func__", member))


def all_docstrings() -> dict:
    """Returns the docstring of everything public, and of mpkeras' own bases of public classes, by name."""
    public = public_objects()
    found = {path: thing.__doc__ or "" for path, thing in public.items()}
    for cls in filter(inspect.isclass, public.values()):
        for base in own_classes(cls):
            if base not in public.values():
                found.setdefault(base.__name__, base.__doc__ or "")
        for name, member in public_members(cls).items():
            found.setdefault(name, member.__doc__ or "")
    return found
