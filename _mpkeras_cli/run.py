"""The subcommand `run`: a program with every `compile` followed by `prepare`, in a Python of its own.

That Python starts with this file as its script. Nothing of Keras or mpkeras is imported here before the program imports
Keras: on which backend, the program itself may say, in KERAS_BACKEND.
"""

import argparse
import importlib.abc
import importlib.util
import os
import runpy
import sys


def add_run(subparsers):
    from _mpkeras_cli.command import add_command

    option = add_command(
        subparsers,
        "run",
        _run,
        help="run a program in mixed precision, unmodified",
        description="""\
Runs an unmodified Keras program as `python SCRIPT ARGUMENTS` would, with every `compile` followed by
`mpkeras.prepare`: it trains under the policy, guarded and with loss scaling. A program that may be changed
needs one line instead, before its models are built: `mpkeras.set_global_policy("mixed_float16")`.
""",
    )
    option(
        "--policy",
        metavar="NAME",
        help="what the models of the program compute in; by default the global policy, which the program sets by "
        "`mpkeras.set_global_policy` or `keras.config.set_dtype_policy`, or MPKERAS_POLICY",
    )
    option("script", metavar="SCRIPT", help="a Python file")
    arguments = option(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="what the program finds in `sys.argv`"
    )
    # `argparse` takes an empty rest for enough, and yet names it beside a script that is missing.
    arguments.required = False


def _run(args) -> int:
    """Starts the program in the place of this process; bad input ends the command by `args.error`."""
    from _mpkeras_cli.command import import_mpkeras

    if not os.path.isfile(args.script):
        args.error(f"expected a Python file, received {args.script!r}: there is no such file")
    if args.policy is not None:
        missing: list = []
        import_mpkeras(missing.append)
        # Without the backend: the program may choose another one, and is told of the policy where it imports Keras.
        if not missing:
            from mpkeras import get_policy

            try:
                get_policy(args.policy)
            except ValueError as error:
                args.error(f"argument --policy: {error}")
    command = [sys.executable, __file__, args.policy or "", args.script, *args.arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    # In the place of this process, which may have imported Keras on some backend: the program may ask for another one.
    # Its signals and its exit status are its own.
    os.execv(sys.executable, command)


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


def run_program(policy: str, script: str, arguments: list):
    """Runs `script` as `python script arguments` would; `policy` is a name, or `""` for the global one."""
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
            _end_with(f"argument --policy: {error}")

    finder = _ActsAfterImport(act)
    sys.meta_path.insert(0, finder)
    try:
        runpy.run_path(script, run_name="__main__")
    except ModuleNotFoundError as error:
        # What the program imports by itself is missing for reasons of its own: it shows its traceback.
        if error not in finder.failures:
            raise
        from _mpkeras_cli.command import import_mpkeras

        # It knows what to say of a missing backend, and raises or comes back for any other module.
        import_mpkeras(_end_with)
        raise


def _end_with(message):
    """Ends the process as other commands end on bad input."""
    from _mpkeras_cli.words import in_options

    one_line = " ".join(in_options(str(message)).split())
    print(f"mpkeras run: error: {one_line}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    run_program(sys.argv[1], sys.argv[2], sys.argv[3:])
