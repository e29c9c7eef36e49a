"""Public names that are imported when somebody asks for them: a training needs no tool, and starts without them."""

import importlib
import sys
from collections.abc import Callable


def importing_when_asked(package: str, modules: dict[str, str]) -> tuple[Callable, Callable]:
    """Returns the `__getattr__` and the `__dir__` of a package some of whose names are imported later.

    Args:
        package: Name of the package.
        modules: By public name, the module that defines it.

    References:
        PEP 562, https://peps.python.org/pep-0562/.
    """

    def get_attribute(name: str):
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        value = getattr(importlib.import_module(modules[name]), name)
        # From now on Python finds it by itself.
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get_attribute, list_names
