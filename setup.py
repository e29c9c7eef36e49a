"""The description of a release: the README, in which a link to a file of the repository becomes its text.

All else is in setup.cfg. There is no public address of the repository yet that such links could lead to.
"""

import re
from pathlib import Path

from setuptools import setup

_PICTURE = re.compile(r"^!\[[^]]*\]\((?!https?://)[^)]*\)\n\n?", flags=re.MULTILINE)
_LINK = re.compile(r"\[([^]]*)\]\((?!https?://)[^)]*\)")


def description(readme: str) -> str:
    """Returns the README without pictures and links that lead to files beside it; the text of links stays."""
    return _LINK.sub(r"\1", _PICTURE.sub("", readme))


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=description(readme), long_description_content_type="text/markdown")
