"""An extension of Griffe: sets the doctests of docstrings as code, which Markdown would take for quotations."""

import re

import griffe

_DOCTEST = re.compile(r"(?:^ *>>> .*\n?)(?:^ *\S.*\n?)*", flags=re.MULTILINE)


class Doctests(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = _DOCTEST.sub(_fenced, obj.docstring.value)


def _fenced(match) -> str:
    indent = match[0][: len(match[0]) - len(match[0].lstrip(" "))]
    return f"{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"
