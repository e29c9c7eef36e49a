"""An extension of Griffe: gives it docstrings in Keras' form as Markdown.

Doctests become code, which Markdown would take for quotations. `Returns`, `Yields`, `References` and `Example` become
paragraphs: Griffe would look for the type of a result that the text only describes, and put the others into boxes.
"""

import re
import textwrap

import griffe

_DOCTEST = re.compile(r"(?:^ *>>> .*\n?)(?:^ *\S.*\n?)*", flags=re.MULTILINE)
_SECTION = re.compile(r"^(Returns|Yields|References):\n((?:(?: {4}.*)?\n)*)", flags=re.MULTILINE)
_EXAMPLE = re.compile(r"^Example:$", flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            text = _DOCTEST.sub(_fenced, obj.docstring.value + "\n")
            text = _SECTION.sub(_paragraph, text)
            obj.docstring.value = _EXAMPLE.sub("**Example:**", text)


def _fenced(match) -> str:
    indent = match[0][: len(match[0]) - len(match[0].lstrip(" "))]
    return f"{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"


def _paragraph(match) -> str:
    return f"**{match[1]}:**\n\n{textwrap.dedent(match[2])}\n"
