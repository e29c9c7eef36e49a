"""Runs a program with every `compile` followed by `prepare`: what `mpkeras run` starts, in a Python of its own.

Nothing of Keras or mpkeras is imported here before the program imports Keras: on which backend, the program itself may
say, in KERAS_BACKEND.
"""

import importlib.abc
import importlib.util
import os
import runpy
import sys


class _ActsAfterImport(importlib.abc.MetaPathFinder):
    """Calls `act` once Keras is imported; where mpkeras imports it, once mpkeras is.

    Attributes:
        failures: What imports of Keras and mpkeras raised for want of a module, as the program got it.
    """

    def __init__(self, act):
        self._act = act
        self.failures = []

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in ("keras", "mpkeras"):
            return None
        # The other finders know where it is.
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                try:
                    execute(module)
                except ModuleNotFoundError as error:
                    self.failures.append(error)
                    raise
                if fullname == "mpkeras" or "mpkeras" not in sys.modules:
                    self._finish()

            # This loader was made for this import alone.
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _finish(self):
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._act()


def main(policy: str, script: str, arguments: list):
    """Runs `script` as `python script arguments` would.

    Args:
        policy: Name of the policy, as in `mpkeras.autoprepare`; `""` for the global one.
        script: Path of a Python file.
        arguments: What it finds in `sys.argv` after its own name.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # As Python does it: the folder of the program comes first. Ours is at the end, where it is not installed.
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    if package not in sys.path:
        sys.path.append(package)
    sys.argv = [script, *arguments]

    def act():
        import mpkeras

        try:
            mpkeras.autoprepare(policy or None)
        except ValueError as error:
            end_with(f"argument --policy: {error}")

    finder = _ActsAfterImport(act)
    sys.meta_path.insert(0, finder)
    try:
        runpy.run_path(script, run_name="__main__")
    except ModuleNotFoundError as error:
        # What the program imports by itself is missing for reasons of its own: it shows its traceback.
        if error not in finder.failures:
            raise
        from _mpkeras_cli.quiet import import_mpkeras

        # It knows what to say of a missing backend, and raises or comes back for any other module.
        import_mpkeras(end_with)
        raise


def end_with(message):
    """Ends the process as other commands end on bad input: one line on standard error, status 2."""
    one_line = " ".join(str(message).split())
    print(f"mpkeras run: error: {one_line}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
