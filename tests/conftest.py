"""What all tests share: poisoned memory, one torch thread, modules of the source tree."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Tests import modules of this folder (spec, tolerances, worlds, jobs), which pytest's import mode
# does not put on the path. The folder above must stay off the path: `scheduler` would be
# importable by that name.
sys.path.insert(0, str(Path(__file__).parent))
import source_tree  # noqa: F401  (makes `benchmarks` importable)
import standin

# Fresh outputs and receive slots hold NaN: memory that is used before it is written shows. MPI jobs
# inherit the variable.
os.environ["BURST_RT_POISON"] = "1"
# A machine file of this machine must not decide what tests do.
os.environ["BURST_RT_HARDWARE"] = "none"
# Without files of bytecode each process would compile the package again, and pytest all tests. MPI
# jobs and other children inherit the variable.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Ranks are threads or processes on few cores. `make other-cpus` tries more.
torch.set_num_threads(int(os.environ.get("BURST_RT_TEST_THREADS", "1")))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "mpi: starts MPI jobs")
    starts_others = bool(config.getoption("numprocesses", None))  # which run the tests (-n)
    if "EMULATED_GPUS" in os.environ and not starts_others:
        # Pythons of jobs have GPUs; this one, whose results theirs are compared with, has none.
        folder = Path(tempfile.mkdtemp(prefix="burst-rt-emulated-"))
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ.update(standin.emulated_gpus(folder, int(os.environ["EMULATED_GPUS"])))


# Files whose tests build something: pages of the guide, kernels, a job for a GPU.
_BUILDING_FILES = {"test_aot.py", "test_gpu_check.py", "test_guide.py", "test_tune.py"}
# Files that take minutes, or (the page) longer than all others of their folder.
_LONG_FILES = {
    "test_emulated_gpus.py", "test_faults.py", "test_leaving.py", "test_models.py", "test_page.py",
    "test_serve.py", "test_train.py", "test_train_model.py", "test_trainer.py",
}  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests under tests/mpi, so that `-m 'not mpi'` leaves them out, and those that
    build something.

    Leaves out tests marked `long` (see `covering`), unless -m names that mark.
    """
    for item in items:
        if item.path.parent.name == "mpi":
            item.add_marker("mpi")
        if item.path.name in _BUILDING_FILES or "installed_copy" in item.name:
            item.add_marker("builds")
    if "long" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if _is_long(item)])
        items[:] = [item for item in items if not _is_long(item)]
    # A file is run by one process: a long file that began last would keep the others waiting.
    items.sort(key=lambda item: item.path.name not in _LONG_FILES)


def _is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None


@pytest.fixture(autouse=True)
def _kernels_of_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks of these processes choose by measuring would be another kernel on some CPUs,
    now and then. `unit/test_cpu_bf16.py` has that kernel.
    """
    monkeypatch.setattr("burst_rt.kernels.cpu_bf16.cpu_capabilities", dict)


@pytest.fixture(scope="module")
def no_parts_left() -> Iterator[None]:
    """After the module's tests: lets go of parts of batches that nobody attended by.

    What a test catches holds them in cycles. A part that goes later would warn in another test.
    """
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
