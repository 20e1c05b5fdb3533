"""The package as a user gets it: sdist and wheel, what each import brings along, which way imports
point, and documented names.
"""

from __future__ import annotations

import ast
import fcntl
import importlib
import importlib.metadata
import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.metadata import Metadata

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = {
    "burst_rt": _ROOT / "burst_rt",
    "burst_rt.scheduler": _ROOT / "scheduler",
    "burst_rt.transport": _ROOT / "transport",
    "burst_rt.launch": _ROOT / "launch",
}
_COMMAND_DEADLINE_S = 300.0


def _modules() -> Iterator[tuple[str, Path]]:
    """Every module of the work tree as (import name, file)."""
    for package, folder in _FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


_MODULES = dict(_modules())
_PACKAGES = sorted(name for name, path in _MODULES.items() if path.name == "__init__.py")


def _run(*command: str, cwd: Path, python_path: str | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if python_path is not None:
        environment["PYTHONPATH"] = python_path
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_COMMAND_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and a wheel made from that sdist."""
    # All workers of a run share the folder above theirs; the first makes what the others take.
    worker = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp().parent if worker else tmp_path_factory.getbasetemp()
    folder = base / "distributions"
    with (base / "distributions.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("*.whl")):
            _build(folder)
    return folder


def _build(folder: Path) -> None:
    # An sdist is put together in the tree, where others are at work.
    tree = folder / "tree"
    shutil.copytree(_ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "runs"))
    # Whatever the sdist lacks the wheel lacks too.
    _run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(tree),
        cwd=folder,
    )


# The wheel is made from the sdist, by what pip would do with the sdist.
_INSTALLED = [
    pytest.param("*.whl", id="wheel"),
    pytest.param("*.tar.gz", id="sdist", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def installed(
    request: pytest.FixtureRequest, distributions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with the package installed from a wheel or an sdist, without its dependencies."""
    (archive,) = distributions.glob(request.param)
    folder = tmp_path_factory.mktemp("installed")
    options = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(folder),
    ]
    _run(sys.executable, "-m", "pip", "install", *options, str(archive), cwd=folder)
    return folder


def test_nothing_stands_behind_a_programs_start() -> None:
    """What is defined there is missing where the module is run as a program."""
    for name, path in _MODULES.items():
        text = path.read_text()
        if "__main__" not in text:  # taking apart and together again takes time
            continue
        body = ast.parse(text).body
        starts = [at for at, part in enumerate(body) if "'__main__'" in ast.unparse(part)[:40]]
        assert starts in ([], [len(body) - 1]), name


@pytest.mark.parametrize("installed", _INSTALLED, indirect=True)
def test_an_installed_copy_is_complete_and_shadows_nothing(installed: Path, tmp_path: Path) -> None:
    source = """
import burst_rt, burst_rt.launch, burst_rt.scheduler, burst_rt.transport
print(burst_rt.__path__[0])
import importlib.util
print([name for name in ("scheduler", "transport", "launch") if importlib.util.find_spec(name)])
print(importlib.util.find_spec("burst_rt.examples.finetune").origin)
"""
    # The installed copy goes before the editable one of this environment; its dependencies come
    # from here.
    out = _run(sys.executable, "-P", "-c", source, cwd=tmp_path, python_path=str(installed))
    package = installed / "burst_rt"
    assert out.splitlines() == [str(package), "[]", str(package / "examples" / "finetune.py")]


def test_a_wheel_holds_modules_examples_the_type_marker_the_machines_and_the_page(
    distributions: Path,
) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{name.replace('.', '/')}/__init__.py"
        if name in _PACKAGES
        else f"{name.replace('.', '/')}.py"
        for name in _MODULES
    }
    expected |= {f"burst_rt/examples/{path.name}" for path in (_ROOT / "examples").glob("*.py")}
    assert "burst_rt/examples/finetune.py" in expected
    assert {name for name in names if name.endswith(".py")} == expected
    configured = {"alerts.yml", "grafana.json", "prometheus.yml"}
    assert {f"burst_rt/dashboard/{name}" for name in configured} < names
    assert "burst_rt/py.typed" in names
    machines = {
        f"burst_rt/planning/machines/{path.name}"
        for path in (_ROOT / "burst_rt" / "planning" / "machines").glob("*.toml")
    }
    assert machines
    assert {name for name in names if name.endswith(".toml")} == machines
    page = {
        f"burst_rt/dashboard/assets/{path.name}"
        for path in (_ROOT / "burst_rt" / "dashboard" / "assets").iterdir()
    }
    assert "burst_rt/dashboard/assets/index.html" in page
    assert {name for name in names if "/assets/" in name} == page


@pytest.mark.parametrize("installed", _INSTALLED, indirect=True)
def test_the_benchmarks_of_users_work_in_an_installed_copy(installed: Path, tmp_path: Path) -> None:
    source = "import importlib.util; print(importlib.util.find_spec('benchmarks'))"
    python = (sys.executable, "-P")
    out = _run(*python, "-c", source, cwd=tmp_path, python_path=str(installed))
    assert out.strip() == "None"
    bench = (*python, "-m", "burst_rt.launch.main", "bench")
    words = ["--part", "speed", "--max-tokens", "2048", "--repeats", "1", "--out", "speed.json"]
    _run(*bench, "attention", *words, cwd=tmp_path, python_path=str(installed))
    results = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))
    assert "cpu" in results.pop("machine")
    ((title, rows),) = results.items()
    assert title.endswith("2 ranks x 1 thread")
    assert [(row["tokens"], row["mask"]) for row in rows] == [(2048, "full"), (2048, "causal")]
    assert (tmp_path / "speed.speed.png").read_bytes().startswith(b"\x89PNG")
    assert "--limit-s" in _run(*bench, "tune", "--help", cwd=tmp_path, python_path=str(installed))


def test_an_sdist_has_the_benchmarks_and_their_results(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        files = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = ["__main__.py", "LOG.md", "page.toml", "attention.svg", "results/exposed-epyc.json"]
    assert {f"benchmarks/{name}" for name in wanted} <= files


def test_an_index_takes_the_metadata(distributions: Path) -> None:
    """Core metadata is valid in every field, and its links are those that the project has."""
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(name), validate=True)
    assert metadata.project_urls
    read = "".join(path.read_text(encoding="utf-8") for path in (_ROOT / "docs").rglob("*.md"))
    assert all(url in read for url in metadata.project_urls.values())
    assert metadata.description_content_type == "text/markdown"


def test_the_images_take_extras_and_files_that_there_are() -> None:
    text = (_ROOT / "examples" / "Containerfile").read_text(encoding="utf-8")
    extras = {
        extra for found in re.findall(r"/src\[([\w,]+)\]", text) for extra in found.split(",")
    }
    has = importlib.metadata.metadata("burst-rt").get_all("Provides-Extra") or []
    assert extras == {"openmpi", "hf", "cuda13"}
    assert extras <= set(has)
    assert "-c /src/constraints.txt" in text
    assert (_ROOT / "constraints.txt").exists()
    targets = set(re.findall(r"^FROM base AS (\w+)$", text, re.MULTILINE))
    assert targets == set(re.findall(r"--target (\w+)", text))


def test_an_index_shows_the_readme_without_links_that_lead_nowhere(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields, _, shown = archive.read(name).decode().partition("\n\n")
    assert "\nProject-URL: Paper, https://arxiv.org/abs/2403.09347\n" in fields
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert len(links) > 1
    assert [link for link in links if not link.startswith("https://")] == []
    assert "![" not in shown
    # All else is the README's, and the files that it names are in the sdist.
    pages = re.findall(r"^\| (.*) \(`(docs/\w+\.md)`\) \|", shown, re.MULTILINE)
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    assert len(pages) > 10
    assert [page for page in pages if "[{}]({})".format(*page) not in readme] == []
    assert len(shown.splitlines()) >= len(readme.splitlines()) - 2
    (archive_path,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive_path) as sdist:
        files = {name.partition("/")[2] for name in sdist.getnames()}
    named = set(re.findall(r"`((?:\w+/)?\w+\.md)`", shown))
    assert {"ARCHITECTURE.md", "docs/index.md", "findings/README.md"} <= named <= files


def test_the_editable_install_maps_the_folders(tmp_path: Path) -> None:
    source = (
        "import burst_rt, burst_rt.scheduler as s, burst_rt.transport as t, burst_rt.launch as l\n"
    )
    source += "for p in (burst_rt, s, t, l): print(p.__path__[0])"
    assert _run(sys.executable, "-P", "-c", source, cwd=tmp_path).splitlines() == [
        str(folder) for folder in _FOLDERS.values()
    ]


@pytest.mark.parametrize("name", ["scheduler", "transport", "launch"])
def test_the_folders_cannot_be_imported_by_their_own_names(name: str, tmp_path: Path) -> None:
    source = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
    assert _run(sys.executable, "-c", source, cwd=tmp_path).strip() == "None"


def test_the_command_is_installed() -> None:
    (script,) = (
        point
        for point in importlib.metadata.entry_points(group="console_scripts")
        if point.name == "burst-rt"
    )
    assert script.value == "burst_rt.launch.main:main"


@pytest.mark.parametrize(
    "statement",
    [
        "import burst_rt",
        "import burst_rt.scheduler",
        "import burst_rt.scheduler.simulator",
        "from burst_rt.launch.main import cli",
        "import burst_rt.launch.child",
        "import burst_rt.conformance",
    ],
)
def test_a_light_import_stays_light(statement: str, tmp_path: Path) -> None:
    source = (
        f"import sys; {statement}; print(sorted({{'torch', 'mpi4py', 'numpy', 'triton'}} & "
        "set(sys.modules)))"
    )
    assert _run(sys.executable, "-P", "-c", source, cwd=tmp_path).strip() == "[]"


def test_a_job_may_report_before_init(tmp_path: Path) -> None:
    source = (
        "import burst_rt; burst_rt.telemetry.report(1, loss=2.0); print({'TYPE_CHECKING', "
        "'import_module'} & set(dir(burst_rt)))"
    )
    assert _run(sys.executable, "-P", "-c", source, cwd=tmp_path).strip() == "set()"


def test_importing_the_library_does_not_start_mpi(tmp_path: Path) -> None:
    source = "import burst_rt.transport, sys; print('mpi4py.MPI' in sys.modules)"
    assert _run(sys.executable, "-P", "-c", source, cwd=tmp_path).strip() == "False"


@cache
def _imports(name: str) -> set[str]:
    """Full names of all modules that a module imports, anywhere in its text; types-only imports
    count too.
    """
    path = _MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                start = ".".join(
                    [
                        *package.split(".")[: len(package.split(".")) - node.level + 1],
                        *filter(None, [node.module]),
                    ]
                )
            # `from a import b` may import the module a.b.
            found |= {
                f"{start}.{alias.name}" if f"{start}.{alias.name}" in _MODULES else start
                for alias in node.names
            }
    return found


def _within(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _is_standard_library(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


# A module imports from floors below its own, or from rooms named before its own on the same floor.
_FLOORS = (
    ("errors", "version", "rotary", "regular", "remembered", "opaque", "eager", "arguments", "job"),
    ("scheduler",),
    ("transport", "planning"),
    ("kernels", "drivers"),
    ("runtime",),
    ("attention", "serving", "recurrence"),
    ("telemetry",),
    ("dashboard",),
    (
        "context",
        "batches",
        "losses",
        "loss_kernels",
        "linear_loss",
        "trees",
        "over_ranks",
        "hf",
        "local",
        "",
    ),
    ("launch", "conformance"),
)
_HEIGHT = {
    f"burst_rt.{room}".rstrip("."): (floor, place)
    for floor, rooms in enumerate(_FLOORS, start=1)
    for place, room in enumerate(rooms)
}
# All that a module of the scheduler imports: no clock, no thread, no file, no chance. The core
# knows nothing of the simulator. `errors` is all that they share with others.
_CORE = "burst_rt.scheduler"
_SIMULATOR = "burst_rt.scheduler.simulator"
_PURE = {
    "burst_rt.errors": {"collections.abc"},
    f"{_CORE}.graph": {
        "burst_rt.errors", "collections.abc", "dataclasses", "functools", "itertools", "typing",
    },
    f"{_CORE}.policy": {f"{_CORE}.graph", "collections.abc", "typing"},
    f"{_CORE}.engine": {
        "burst_rt.errors", f"{_CORE}.graph", f"{_CORE}.policy",
        "array", "collections.abc", "dataclasses", "enum", "functools", "heapq", "typing",
    },
    f"{_CORE}.loop": {f"{_CORE}.engine", f"{_CORE}.graph", "collections.abc", "typing"},
    f"{_CORE}.verify": {
        "burst_rt.errors", f"{_CORE}.graph",
        "collections", "collections.abc", "itertools", "typing",
    },
    f"{_CORE}.trace": {
        "burst_rt.errors", f"{_CORE}.graph", f"{_CORE}.verify",
        "bisect", "collections", "collections.abc", "operator", "typing",
    },
    _CORE: {f"{_CORE}.{name}" for name in ("engine", "graph", "loop", "policy", "trace", "verify")},
    f"{_SIMULATOR}.hardware": {
        f"{_CORE}.graph", "collections.abc", "dataclasses", "typing",
    },
    f"{_SIMULATOR}.network": {
        "burst_rt.errors", f"{_SIMULATOR}.hardware", "collections.abc", "typing",
    },
    f"{_SIMULATOR}.progress": {
        f"{_CORE}.engine", f"{_CORE}.graph", f"{_SIMULATOR}.network",
        "collections", "collections.abc", "dataclasses", "enum", "typing",
    },
    f"{_SIMULATOR}.simulate": {
        "burst_rt.errors", f"{_CORE}.engine", f"{_CORE}.graph", f"{_CORE}.trace",
        f"{_SIMULATOR}.hardware", f"{_SIMULATOR}.network", f"{_SIMULATOR}.progress",
        "collections", "collections.abc", "dataclasses", "heapq",
    },
    _SIMULATOR: {f"{_SIMULATOR}.{name}" for name in ("hardware", "progress", "simulate")},
}  # fmt: skip
# What reaches out of a module without an import.
_REACHES_OUT = {"__import__", "breakpoint", "compile", "eval", "exec", "input", "open", "print"}
# Planning, and what serving plans with.
_PLANNING = (
    "burst_rt.planning",
    "burst_rt.serving.bruck",
    "burst_rt.serving.chunks",
    "burst_rt.serving.decode_graph",
)
_NEEDS_NO_TORCH = (
    "burst_rt.planning.choose",
    "burst_rt.planning.forecast",
    "burst_rt.planning.layouts",
    "burst_rt.planning.machines",
    "burst_rt.planning.masks",
    "burst_rt.planning.strategies",
    "burst_rt.serving.chunks",
    "burst_rt.serving.decode_graph",
)


def _room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _column(heading: str, number: int) -> list[set[str]]:
    """The names in code that each row of a table of ARCHITECTURE.md has in one column."""
    text = (_ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = text[text.index(heading) :].partition("\n\n")[0].splitlines()[2:]
    cells = [row.strip("|").split(" | ")[number] for row in rows]
    return [set(re.findall(r"`[^`]*?(\w+)(?:\.py|\(\))?`", cell)) for cell in cells]


def test_the_floors_are_those_of_the_page() -> None:
    shown = reversed(_column("| floor | rooms |", 1))
    rooms = [{name.replace("__init__", "") for name in names} for names in shown]
    assert rooms == [set(floor) for floor in _FLOORS]


@pytest.mark.parametrize("name", sorted(_MODULES))
def test_imports_point_down(name: str) -> None:
    """Imports for types count. `burst_rt` itself names what it hands on in `_HOME`, as text."""
    rooms = {_room(module) for module in _imports(name) if _within(module, "burst_rt")}
    here = _HEIGHT[_room(name)]
    upward = {room for room in rooms - {_room(name)} if _HEIGHT[room] >= here}
    assert not upward, f"{name} is on floor {here[0]}; above it or beside it: {sorted(upward)}"


# Folders of telemetry, from below: each imports only from those before it.
_TELEMETRY = ("model", "read", "hub", "rank")


def test_the_folders_of_telemetry_are_those_of_the_page() -> None:
    text = (_ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert f"Folders of telemetry, from below: {', '.join(_TELEMETRY)} |" in text
    folders = {name.split(".")[2] for name in _PACKAGES if name.startswith("burst_rt.telemetry.")}
    assert folders == set(_TELEMETRY)


@pytest.mark.parametrize("folder", ["", *_TELEMETRY])
def test_folders_of_telemetry_import_from_those_before_them(folder: str) -> None:
    """What lies in no folder is spoken by all: it imports from none of them."""
    above = _TELEMETRY[_TELEMETRY.index(folder) + 1 if folder else 0 :]
    upward = {
        (name, module)
        for name in _MODULES
        if (parts := name.split("."))[:2] == ["burst_rt", "telemetry"]
        and (parts[2] if len(parts) > 2 and parts[2] in _TELEMETRY else "") == folder
        # The face of the room hands on what runs in a rank.
        and len(parts) > 2
        for module in _imports(name)
        if _within(module, *(f"burst_rt.telemetry.{other}" for other in above))
    }
    assert not upward


def test_telemetry_knows_nothing_of_attention() -> None:
    """It reads what plans say of themselves (`runtime.observer.Subject`)."""
    modules = [name for name in _MODULES if _within(name, "burst_rt.telemetry")]
    rooms = {_room(imported) for name in modules for imported in _imports(name)}
    assert not rooms & {"burst_rt.attention", "burst_rt.serving", "burst_rt.planning"}


def test_no_files_form_a_circle() -> None:
    """Imports count wherever they are in a file: imports for types, and imports of functions."""
    circle: list[str] = []
    try:
        TopologicalSorter({name: _imports(name) & _MODULES.keys() for name in _MODULES}).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert circle == [], " is imported by ".join(circle)


def test_no_module_sets_a_name_of_another() -> None:
    """It would be an arrow upward that no import shows."""
    found = []
    for name, path in _MODULES.items():
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        modules = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if f"{node.module}.{alias.name}" in _MODULES
        }
        found += [
            f"{name}:{node.lineno}: {ast.unparse(node)}"
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, (ast.Store, ast.Del))
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
        ]
    assert found == []


@pytest.mark.parametrize(
    "name", ["burst_rt.errors", *sorted(n for n in _MODULES if _within(n, _CORE))]
)
def test_the_scheduler_is_pure(name: str) -> None:
    assert _imports(name) - {"__future__"} == _PURE[name]
    tree = ast.walk(ast.parse(_MODULES[name].read_text(encoding="utf-8")))
    assert not _REACHES_OUT & {node.id for node in tree if isinstance(node, ast.Name)}


_MAKERS = [
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
]


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    """torch.set_default_device and `with torch.device(...)` are for the program's own tensors."""
    made = [
        f"{path}:{node.lineno}"
        for path in _MODULES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in [f"torch.{maker}" for maker in _MAKERS]
        and not {"device", None} & {word.arg for word in node.keywords}
    ]
    assert made == []


@pytest.mark.parametrize("name", sorted(n for n in _MODULES if _within(n, *_PLANNING)))
def test_planning_imports_no_torch(name: str) -> None:
    own = {module for module in _imports(name) if _within(module, "burst_rt")}
    # Machine files are TOML, which the standard library reads and does not write.
    more = {"tomli_w"} if name == "burst_rt.planning.machines" else set()
    # What masks let through is counted for whole shards at once, and listed for whole tiles.
    counting = (
        "burst_rt.planning.balance", "burst_rt.planning.intervals", "burst_rt.planning.masks",
        "burst_rt.planning.fit", "burst_rt.planning.needs", "burst_rt.planning.sides",
        "burst_rt.planning.whole", "burst_rt.planning.worklist", "burst_rt.serving.chunks",
    )  # fmt: skip
    more |= {"numpy"} if _within(name, *counting) else set()
    assert all(map(_is_standard_library, _imports(name) - own - more))


@pytest.mark.parametrize("name", _NEEDS_NO_TORCH)
def test_planning_needs_no_torch(name: str, tmp_path: Path) -> None:
    source = f"import sys, {name}; print(sorted({{'torch', 'mpi4py'}} & set(sys.modules)))"
    assert _run(sys.executable, "-P", "-c", source, cwd=tmp_path).strip() == "[]"


@pytest.mark.parametrize("name", _PACKAGES)
def test_every_public_name_of_a_package_is_documented(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__doc__, f"{name} has no docstring"
    public = {name: getattr(package, name) for name in getattr(package, "__all__", [])}
    # Constants and type aliases cannot carry a docstring; a class must not live on an inherited
    # one.
    documentable = {
        name: value
        for name, value in public.items()
        if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
    }
    assert [name for name, value in documentable.items() if not _own_docstring(value)] == []


def _own_docstring(value: object) -> str:
    docstring = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
    return docstring or ""


# The list of modules in the guide is made of these lines.
_LISTED: list[tuple[Path, str]] = list(
    runpy.run_path(str(_ROOT / "docs" / "modules.py"))["modules"]()
)


@pytest.mark.parametrize(("path", "line"), _LISTED, ids=[str(path) for path, _ in _LISTED])
def test_every_module_says_in_one_line_what_it_is(path: Path, line: str) -> None:
    assert re.fullmatch(r"[\w`/].*[\w`)'\"]\.", line), (
        f"{path}: not a sentence on one line: {line!r}"
    )
    assert len(line.split()) > 3, f"{path}: {line!r} says too little"
    assert not line.startswith("Of "), path


def test_the_list_of_modules_has_every_module() -> None:
    listed = {_ROOT / path for path, _ in _LISTED}
    assert set(_MODULES.values()) - listed == set()
    page = _run(sys.executable, str(_ROOT / "docs" / "modules.py"), cwd=_ROOT)
    assert [path for path, line in _LISTED if f"| `{path.name}` | {line} |" not in page] == []


def test_the_list_of_who_raises_is_what_docstrings_say() -> None:
    listed = _run(sys.executable, str(_ROOT / "docs" / "who_raises.py"), cwd=_ROOT).strip()
    page = (_ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- who raises: begin -->")[2].partition("<!-- who raises: end -->")[0]
    assert shown.strip() == listed


def test_long_modules_and_wide_functions_are_few() -> None:
    """A module is one idea; what needs many arguments is a public signature or a kernel."""
    trees = {name: path.read_text(encoding="utf-8") for name, path in _MODULES.items()}
    long = {name for name, text in trees.items() if text.count("\n") > 450}
    assert len(long) <= 3, long
    wide = set()
    for name, text in trees.items():
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            marks = " ".join(map(ast.unparse, node.decorator_list))
            if "jit" in marks or "overload" in marks:
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if len([x for x in arguments if x.arg not in ("self", "cls")]) > 6:
                wide.add(f"{name}.{node.name}")
    assert len(wide) <= 21, wide
