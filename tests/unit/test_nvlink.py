"""NVLink domains: what NVML says of them, against a library with its symbols, and which ranks are
on one node.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from standin import build_standin, with_standin

from burst_rt.launch import checks
from burst_rt.planning.machines import load_hardware
from burst_rt.runtime.calibrated import fit_to_job
from burst_rt.runtime.joining import ranks_per_node

_DEADLINE_S = 60.0
_ASK = """
import sys
from burst_rt.runtime.nvlink import nvlink_domain
print(nvlink_domain(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_standin(tmp_path_factory.mktemp("nvml"))


def _run(source: str, environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-P", "-c", source, *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("settings", "uuid", "domain"),
    [
        ({"STANDIN_CLUSTER": "171", "STANDIN_CLIQUE": "7"}, "0000-1", "ab" * 16 + ".7"),
        ({"STANDIN_CLUSTER": "171"}, "GPU-0000-0", "ab" * 16 + ".0"),
        ({}, "0000-0", ""),  # NVLink joins the GPUs of one host: no number
        ({"STANDIN_CLUSTER": "171", "STANDIN_FABRIC_STATE": "2"}, "0000-0", ""),  # in progress
        ({"STANDIN_CLUSTER": "171", "STANDIN_FABRIC_STATUS": "10"}, "0000-0", ""),  # timed out
        ({"STANDIN_CLUSTER": "171", "STANDIN_OLD": "1"}, "0000-0", ""),
        ({"STANDIN_CLUSTER": "171", "STANDIN_FAIL_AFTER": "1"}, "0000-0", ""),
        ({"STANDIN_CLUSTER": "171"}, "another", ""),
    ],
)
def test_a_gpu_has_the_domain_that_nvml_says(
    settings: dict[str, str], uuid: str, domain: str, library: Path
) -> None:
    assert _run(_ASK, with_standin(library, **settings), uuid) == domain


def test_nobody_waits_for_nvml_for_long(library: Path) -> None:
    began_s = time.monotonic()
    settings = {"STANDIN_CLUSTER": "171", "STANDIN_HANG_AFTER": "1"}
    assert _run(_ASK, with_standin(library, **settings), "0000-0") == ""
    assert time.monotonic() - began_s < 25  # NVML takes 30 s


def test_the_doctor_says_that_nvlink_goes_beyond_the_host(library: Path) -> None:
    said = _run(checks._NVML, with_standin(library, STANDIN_CLUSTER="1", STANDIN_CLIQUE="2"))
    assert said == f"driver 999.1, 2 devices, NVLink beyond this host (domain {'01' * 16}.2)"
    assert _run(checks._NVML, with_standin(library)) == "driver 999.1, 2 devices"


@pytest.mark.parametrize(
    ("ranks", "per_node"),
    [
        (["a", "a", "b", "b"], 2),
        (["a1", "a1", "b1", "b1"], 4),  # one domain of two hosts
        (["a1", "b1", "c2", "d2"], 2),
        (["a1", "a1", "b1", "b1", "c2", "c2"], 2),  # unequal domains: hosts count
        (["a1", "b2", "a1", "b2"], 1),  # neither is consecutive
        (["a1", "a1", "b2", "b2"], 2),
        (["a", "a", "b"], 1),
    ],
)
def test_a_node_is_a_domain_or_a_host(ranks: list[str], per_node: int) -> None:
    """Ranks by host and domain, as "a1"; "a": no domain."""
    assert ranks_per_node([rank[0] for rank in ranks], [rank[1:] for rank in ranks]) == per_node


@pytest.mark.parametrize(
    ("of_file", "per_node", "hosts", "cards"),
    [
        (8, 32, 4, 32),  # a file of one host
        (32, 32, 4, 8),  # a file of the whole domain
        (8, 8, 1, 8),
        (8, 16, 1, 8),  # more ranks on a host than in the file
    ],
)
def test_a_domain_has_the_cards_of_its_hosts(
    of_file: int, per_node: int, hosts: int, cards: int
) -> None:
    machine = load_hardware("h100-sxm")
    machine = replace(machine, node=replace(machine.node, ranks=of_file))
    fitted = fit_to_job(machine, per_node, 64, hosts)
    assert fitted is not None
    assert fitted.nics is not None
    assert (fitted.node.ranks, fitted.nics.count) == (per_node, cards)
