"""What a command prints, for the tests of all commands."""

from _mpkeras_cli import main


def failing_line(capsys, *arguments):
    """Runs a command that must fail before it does anything, and returns its one line."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def lines_of(command):
    """Returns `(printed, failing_line)`, functions of `capsys` and the arguments of one command."""

    def printed(capsys, *arguments):
        assert main([command, *map(str, arguments)]) == 0
        return capsys.readouterr().out

    def failing(capsys, *arguments):
        line = failing_line(capsys, command, *arguments)
        assert line.startswith(f"mpkeras {command}: error: ")
        return line

    return printed, failing
