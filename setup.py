"""Only what cannot stand in setup.cfg: README.md as the description that an index shows."""

import re
from pathlib import Path

from setuptools import setup

# An index has none of the files that the README shows or links to. Their names stay.
_PICTURE = re.compile(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n\n", re.MULTILINE)
_LINK = re.compile(r"\[([^]]*)\]\((?!https?:)([^)#]*)[^)]*\)")
_FILES = "Files that are named here are in the source distribution.\n"

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
plain = _LINK.sub(
    lambda link: f"`{link[2]}`" if link[1] == link[2] else f"{link[1]} (`{link[2]}`)",
    _PICTURE.sub("", readme),
)
setup(long_description=f"{plain}\n{_FILES}")
