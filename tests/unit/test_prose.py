"""The language of comments, docstrings and pages: two habits that a reader trips over stay out."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("burst_rt", "scheduler", "transport", "launch", "benchmarks")
# All pages but benchmarks/LOG.md, which has measurements in the words of their day.
_PAGES = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "findings/**/*.md") for path in _ROOT.glob(pattern)
)


def _modules() -> list[Path]:
    return sorted(path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.py"))


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of the module, its classes and its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments; lines of comments that follow each other are one text."""
    first, last, column, words = 0, 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        (line, at), text = token.start, token.string.lstrip("#").strip()
        if words and (line, at) == (last + 1, column) and token.line.lstrip().startswith("#"):
            words, last = f"{words} {text}", line
            continue
        if words:
            yield first, words
        first, last, column, words = line, line, at, text
    if words:
        yield first, words


def _paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """(line, text) of a page's paragraphs, items and cells of tables; code is left out."""
    page = re.sub(
        r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), page, flags=re.DOTALL | re.MULTILINE
    )
    line = 1
    for text in re.split(r"(\n\s*\n|\n(?=\s*(?:[-*#>|]|\d+\.) ?))", page):
        for cell in text.split("|"):
            if cell.strip():
                yield line + (len(text) - len(text.lstrip("\n"))), cell.strip().lstrip("#-*> ")
        line += text.count("\n")


def _sentences(text: str) -> Iterator[str]:
    text = " ".join(re.sub(r"`[^`]*`", "`code`", text).split("\n"))
    yield from filter(None, re.split(r"(?<=[.:;!?])[\s*_]+(?=[A-Z(`])", text))


def _wrong(text: str) -> Iterator[str]:
    """Sentences that begin with a genitive, which names its subject last, or that say "stands"
    where "is" or "means" is meant.
    """
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*|] )", text):
        for sentence in _sentences(paragraph):
            if re.search(r"^of\b|\bstands\b", sentence, re.IGNORECASE):
                yield sentence


def _found(path: Path, texts: Iterator[tuple[int, str]]) -> list[str]:
    name = path.relative_to(_ROOT).as_posix()
    return [f"{name}:{line}: {sentence}" for line, text in texts for sentence in _wrong(text)]


def test_code_names_its_subject_first() -> None:
    found = []
    for path in _modules():
        source = path.read_text(encoding="utf-8")
        found += _found(path, _docstrings(source)) + _found(path, _comments(source))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.relative_to(_ROOT).as_posix())
def test_pages_name_their_subject_first(page: Path) -> None:
    found = _found(page, _paragraphs(page.read_text(encoding="utf-8")))
    assert not found, "\n".join(found)


def test_wrong_sentences_are_found() -> None:
    source = '''
"""A module.

Of two tasks the first runs. It ends."""

x = 1  # of the task
# Tasks run. Of two
# the first stands in front.
def f():
    """Gives `a. Of b`; keeps "Offer" and "standing"."""
'''
    found = [
        sentence
        for texts in (_docstrings(source), _comments(source))
        for _, text in texts
        for sentence in _wrong(text)
    ]
    assert found == [
        "Of two tasks the first runs.",
        "of the task",
        "Of two the first stands in front.",
    ]
    page = "A.\n\n| name | of the task |\n|---|---|\n\n- **Bold.** Of two.\n\n```\nOf code.\n```\n"
    assert [s for _, text in _paragraphs(page) for s in _wrong(text)] == ["of the task", "Of two."]
