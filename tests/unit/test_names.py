"""Names: one meaning a word across the house, nouns and verbs, and no riddles that live long."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("burst_rt", "scheduler", "transport", "launch")

# What modules of the command line have: click commands, and the function that a process runs.
_IN_EVERY_ROOM = {"command", "main", "simulate"}
# A collective of a context, and the tasks in a graph that do the same.
_CALLS_AND_TASKS = {"all_gather", "all_reduce"}
# Participles that are nouns, or that say a state in the field or in records of telemetry.
_FIELD_WORDS = {
    "Agreed", "Binding", "Chunked", "Encoding", "Finding", "Need", "Opening", "Pending", "Ping",
    "Ranking", "Recorded", "Ring", "Rotated", "Simulated", "Stalled", "Stopping", "exposed",
    "structured",
}  # fmt: skip
# Words that had several meanings each, and that the glossary's words have replaced.
_RETIRED = {
    "Ends", "ScoreTerms", "Setup", "came_home", "home_sums", "own_sums", "score_terms",
}  # fmt: skip
_RIDDLES = {"found", "own", "each", "some", "here", "there"}
_LINES = 3  # maximum number of lines from a riddle's first use to its last


@cache
def _modules() -> list[tuple[str, ast.Module]]:
    paths = [path for folder in _FOLDERS for path in sorted((_ROOT / folder).rglob("*.py"))]
    return [
        (path.relative_to(_ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in paths
    ]


def _public(tree: ast.Module) -> Iterator[str]:
    """Names of the functions and classes that a module makes and offers."""
    offered: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            offered = set(ast.literal_eval(node.value))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in offered:
            yield node.name


def test_a_public_name_means_one_thing_in_the_whole_house() -> None:
    places = defaultdict(set)
    for module, tree in _modules():
        for name in _public(tree):
            places[name].add(module)
    assert len(places) > 500
    doubles = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert doubles.keys() <= _IN_EVERY_ROOM | _CALLS_AND_TASKS, doubles


def test_no_public_name_is_a_participle_alone() -> None:
    participle = re.compile(r"[A-Za-z][a-z]+(ed|ing)")
    names = {name for _, tree in _modules() for name in _public(tree)}
    assert {name for name in names if participle.fullmatch(name)} <= _FIELD_WORDS


def test_words_that_were_replaced_stay_away() -> None:
    words = {
        getattr(node, field)
        for _, tree in _modules()
        for node in ast.walk(tree)
        for field in ("id", "attr", "arg", "name")
        if isinstance(getattr(node, field, None), str)
    }
    assert len(words) > 3000
    assert words & _RETIRED == set()


def test_no_riddle_lives_longer_than_three_lines() -> None:
    lasting = []
    for module, tree in _modules():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = defaultdict(list)
            for node in ast.walk(function):
                name = getattr(node, "id", None) or getattr(node, "arg", None)
                if name in _RIDDLES and isinstance(node, ast.expr | ast.arg | ast.keyword):
                    lines[name].append(node.lineno)
            lasting += [
                f"{module}:{min(used)} {function.name}: {name}"
                for name, used in lines.items()
                if max(used) - min(used) > _LINES
            ]
    assert lasting == []


def test_cached_properties_wait_for_nobody() -> None:
    """In Python 3.11 a cached property holds a lock of its class while it is computed, so ranks
    that are threads of one process would wait for each other forever.
    """
    waiting = {"refuse", "_refuse", "agree", "all_gather", "all_reduce", "collective", "wait_for"}
    found, looked = [], 0
    for module, tree in _modules():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            if "cached_property" not in map(ast.unparse, function.decorator_list):
                continue
            looked += 1
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            names = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
            found += [f"{module}:{function.name}: {name}" for name in names & waiting]
    assert looked > 50
    assert found == []
