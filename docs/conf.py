"""How Sphinx builds the guide (`make docs`), from Markdown files and docstrings."""

import re
import runpy
from pathlib import Path

from sphinx.util import logging

from burst_rt.version import __version__

project = "burst_rt"
version = release = __version__
html_title = f"burst_rt {__version__}"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
# Sources lie where GitHub shows them, so a link works there and here.
root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/decisions/*.md", "*.md", "findings/*.md", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "runs", "**/__pycache__"]
myst_heading_anchors = 3
# The theme that comes with Sphinx loads no font and no script from elsewhere.
html_theme = "alabaster"
html_theme_options = {
    "page_width": "1420px", "body_max_width": "1140px", "sidebar_width": "240px",
    "fixed_sidebar": True, "code_font_size": "0.8em",
}  # fmt: skip
html_copy_source = False
html_show_copyright = False
pygments_style = "default"
# In docstrings `x` is code.
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"

_FIELD = re.compile(r"(\w+(?:(?:,| and) \w+)*): (?=\S)")


def _to_rest(app: object, what: str, name: str, obj: object, options: object, lines: list[str]):
    """Docstrings are plain text: `q: queries` becomes a definition, an indented paragraph code."""
    text = "\n".join(lines).strip("\n")
    lines.clear()
    for paragraph in (part.splitlines() for part in re.split(r"\n(?:\s*\n)+", text)):
        if all(line.startswith(" ") for line in paragraph):
            lines += [".. code-block:: python", "", *paragraph, ""]
            continue
        text_lines = [_escaped(line) for line in paragraph]
        if all(line.startswith(" ") or _FIELD.match(line) for line in text_lines):
            for line in text_lines:
                field = _FIELD.match(line)
                lines += [f"`{field[1]}`"] if field else []
                lines.append(f"    {line[field.end() :] if field else line.strip()}")
        else:
            lines += text_lines
        lines.append("")


def _escaped(line: str) -> str:
    """The line with `*` and `|` as themselves, but for a list's mark and inside of code."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"(?<!^)\*|\|", r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts)


def _add_modules(app: object, name: str, source: list[str]):
    """Puts the list of modules at the end of its page."""
    if name == "docs/modules":
        source[0] += "\n" + runpy.run_path(str(Path(__file__).with_name("modules.py")))["page"]()


_LOADED = re.compile(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"')


def _check_loaded(app, error: object):
    """Warns of pages that load something from elsewhere; a link may lead there."""
    for page in sorted(Path(app.outdir).rglob("*.html")) if error is None else []:
        for loaded in _LOADED.findall(page.read_text("utf-8")):
            logging.getLogger(__name__).warning("%s loads %s", page.name, loaded)


def setup(app):
    """Called by Sphinx."""
    app.connect("build-finished", _check_loaded)
    app.connect("source-read", _add_modules)
    app.connect("autodoc-process-docstring", _to_rest)
