"""`/metrics`: names and units, Prometheus' own checks, and a real Prometheus server that scrapes a
run by the example that the package brings.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from dashboards import command, installed, kill_rank, serving
from prometheus_client.parser import text_string_to_metric_families
from telemetry_feed import arrive, beat, call, counters, gpu_sample

from burst_rt.dashboard.exporter import DCGM, exposition
from burst_rt.dashboard.links import LinkStates
from burst_rt.telemetry.messages import Bye, JobReport, SourceInfo, SourceSample
from burst_rt.telemetry.metrics import METRICS
from burst_rt.telemetry.model.job_model import JobModel

_PROGRAM = Path(__file__).parent / "programs" / "ring.py"
_ROOT = Path(__file__).resolve().parents[2]
_DASHBOARD = _ROOT / "burst_rt" / "dashboard"
_DEADLINE_S = 45.0
_TIMES = ((0.0, 0.0, 0.5), (0.0, 0.0, 0.3), (0.5, 0.5, 0.9))


def _full_job() -> JobModel:
    """A job on two ranks that have everything: GPUs, a host, processes, messages, a report."""
    model = JobModel(1e9)
    for rank in range(2):
        for message in arrive(rank, gpu=True):
            model.apply(0.0, rank, message)
        model.apply(
            0.1,
            rank,
            SourceInfo(
                name="host:host", kind="host", host="host", metrics=["cpu_percent"], about={}
            ),
        )
        model.apply(1.0, rank, SourceSample("host:host", 1.0, {"cpu_percent": 12.5}))
        model.apply(
            1.0,
            rank,
            SourceSample(f"rank:{rank}", 1.0, {"process_percent": 80.0, "rss_bytes": 1e9}),
        )
        for i in range(3):
            model.apply(1.0 + i, rank, counters(rank, 1.0 + i, 1 + i))
        model.apply(3.0, rank, gpu_sample(rank, 3.0, 456.0))
        model.apply(3.0, rank, call(rank, 1, 2.0, *_TIMES))
        model.apply(3.0, rank, beat(rank, 3.0))
    model.apply(3.0, 0, JobReport(3.0, 12, {"loss": 2.5, "tokens_per_s": 1e4}))
    return model


def _exposed(model: JobModel) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    links = LinkStates()
    links.look(model.timeline(-5.0))
    text = exposition(model.snapshot(), links.now(model.snapshot())).decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


_SERVING = JobReport(
    4.0,
    57,
    {
        "time_to_first_token_s": 1.5,
        "time_per_token_s": 0.02,
        "mean_time_per_token_s": 0.03,
        "output_tokens_per_s": 33.0,
        "cached_tokens": 900.0,
        "cache_capacity_tokens": 4096.0,
    },
)


def test_gpu_fields_have_the_names_and_units_of_dcgm() -> None:
    found = _exposed(_full_job())
    labels = (
        ("Hostname", "host"),
        ("UUID", "1"),
        ("gpu", ""),
        ("modelName", "a GPU"),
        ("ranks", "1"),
    )
    assert found["DCGM_FI_DEV_POWER_USAGE"][labels] == 456.0
    # What the feed gives is its place in the list: bytes become MiB, percents of GPM become ratios.
    assert found["DCGM_FI_DEV_FB_USED"][labels] == pytest.approx(2 / (1 << 20))
    assert found["DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"][labels] == pytest.approx(0.19)
    assert set(DCGM) <= set(METRICS)
    assert {field.name for field in DCGM.values()} <= set(found)


def test_the_runtime_has_its_own_names() -> None:
    found = _exposed(_full_job())
    assert found["burst_rt_rank_calls_total"][(("rank", "1"),)] == 3
    assert found["burst_rt_rank_status"][(("host", "host"), ("rank", "0"), ("status", "live"))] == 1
    assert found["burst_rt_rank_lane_bytes_total"][(("lane", "network"), ("rank", "0"))] == 3000
    assert found["burst_rt_job_report"][(("name", "loss"),)] == 2.5
    assert found["burst_rt_link_bytes_per_second"][
        (("receiver", "1"), ("sender", "0"))
    ] == pytest.approx(1000)
    assert found["burst_rt_link_state"][(("receiver", "1"), ("sender", "0"), ("state", "ok"))] == 1
    assert found["burst_rt_host_cpu_percent"][(("host", "host"),)] == 12.5


def test_a_job_that_serves_has_times_of_tokens_and_its_cache_with_units() -> None:
    model = _full_job()
    before = set(_exposed(model))
    model.apply(4.0, 0, _SERVING)
    found = _exposed(model)
    assert {name: found[name][()] for name in set(found) - before} == {
        "burst_rt_time_to_first_token_seconds": 1.5,
        "burst_rt_time_per_output_token_seconds": 0.02,
        "burst_rt_time_per_output_token_mean_seconds": 0.03,
        "burst_rt_output_tokens_per_second": 33.0,
        "burst_rt_cache_tokens": 900.0,
        "burst_rt_cache_capacity_tokens": 4096.0,
    }
    assert set(found["burst_rt_job_report"]) == {(("name", "loss"),), (("name", "tokens_per_s"),)}


def test_a_job_that_has_measured_nothing_exposes_no_made_up_figures() -> None:
    found = _exposed(JobModel(1e9))
    assert not [
        name for name in found if name.startswith(("DCGM", "burst_rt_rank", "burst_rt_job_step"))
    ]


def test_grafanas_dashboard_and_the_guide_name_what_there_is() -> None:
    model = _full_job()
    model.apply(4.0, 0, _SERVING)
    for number in range(3):
        for rank in range(2):
            ended = call(rank, 10 + number, 5.0 + number, (0, 0, 0.2), (0, 0, 0.1), (0.2, 0.2, 0.3))
            model.apply(6.0 + number, rank, ended)
    found = set(_exposed(model))
    assert "burst_rt_limit_ratio" in found
    panels = json.loads((_DASHBOARD / "grafana.json").read_text(encoding="utf-8"))["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"\b(?:burst_rt|DCGM)_\w+", target["expr"])
    }
    assert len(asked) > 15
    guide = (_ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
    told = set(re.findall(r"\b(?:burst_rt|DCGM)_[a-zA-Z_]+(?=[`{\[])", guide))
    assert len(told) > 12
    assert asked | told <= found


def test_promtool_accepts_the_names() -> None:
    """But for the labels of DCGM's exporter, whose names GPU metrics share."""
    promtool = installed("promtool", package="prometheus")
    model = _full_job()
    model.apply(4.0, 0, _SERVING)
    done = subprocess.run(
        [promtool, "check", "metrics"], input=exposition(model.snapshot(), []),
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    said = done.stderr.decode().splitlines()
    of_dcgm = "label names should be written in 'snake_case' not 'camelCase'"
    assert [line for line in said if not line.endswith(of_dcgm)] == []
    assert len(said) > 10


def test_alerts_are_right_and_fire_for_a_rank_that_comes_late(tmp_path: Path) -> None:
    promtool = installed("promtool", package="prometheus")
    alerts = (_DASHBOARD / "alerts.yml").read_text(encoding="utf-8")
    asked = set(re.findall(r"\bburst_rt_\w+", alerts))
    model = _full_job()
    model.apply(5.0, 1, Bye(5.0, 1, "MemoryError: none left"))
    assert len(asked) == 4
    assert asked - {"burst_rt_limit_ratio"} <= set(_exposed(model))
    (tmp_path / "alerts.yml").write_text(alerts, encoding="utf-8")
    case = """
rule_files: [alerts.yml]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - {series: 'burst_rt_limit_ratio{kind="late rank",rank="1"}', values: "0.84x20"}
      - {series: 'burst_rt_limit_ratio{kind="outside",rank=""}', values: "0.9x20"}
    alert_rule_test:
      - eval_time: 2m
        alertname: BurstRtJobLimited
        exp_alerts:
          - exp_labels: {severity: warning, kind: late rank, rank: "1"}
            exp_annotations:
              summary: "late rank, rank 1: 84% of the time is lost"
              description: "The job's dashboard and `burst-rt top` say what to do."
"""
    (tmp_path / "case.yml").write_text(case, encoding="utf-8")
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "case.yml"]):
        done = subprocess.run(
            [promtool, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def _prometheus(config: str, folder: Path) -> Iterator[str]:
    """A Prometheus server; its address."""
    path = installed("prometheus", package="prometheus")
    (folder / "prometheus.yml").write_text(config, encoding="utf-8")
    address = f"127.0.0.1:{_free_port()}"
    process = subprocess.Popen(
        [path, "--config.file=prometheus.yml", "--storage.tsdb.path=data",
        f"--web.listen-address={address}", "--log.level=warn"],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(15)


def _expressions() -> set[str]:
    """What Grafana's dashboard asks of all jobs and ranks."""
    panels = json.loads((_DASHBOARD / "grafana.json").read_text(encoding="utf-8"))["panels"]
    asked = {target["expr"] for panel in panels for target in panel["targets"]}
    assert all('{instance=~"$job"' in x or ',instance=~"$job"' in x for x in asked)
    values = {"$job": ".*", "$rank": ".*", "$__rate_interval": "1m"}
    for name, value in values.items():
        asked = {expression.replace(name, value) for expression in asked}
    return asked


def _query(prometheus: str, expression: str, *, at_least: int) -> dict[str, float]:
    """Values by rank or GPU, once there are so many."""
    deadline_s = time.monotonic() + _DEADLINE_S
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    found: list[dict[str, Any]] = []  # Prometheus' own JSON
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                found = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code == 400:  # it does not understand the expression
                raise
        except OSError:
            pass  # it is starting
        if len(found) >= at_least:
            return {
                one["metric"].get("rank", one["metric"].get("UUID", "")): float(one["value"][1])
                for one in found
            }
        time.sleep(0.25)
    raise TimeoutError(f"{expression}: {found}")


def test_prometheus_scrapes_a_run_and_a_dashboard(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with (
        command(
            "run", "-n", "2", "--metrics-port", "0", str(_PROGRAM), "512", str(stop), cwd=tmp_path
        ) as job,
        serving(_full_job()) as shown,
    ):
        at = urllib.parse.urlparse(job.link("metrics")).netloc
        config = (
            (_DASHBOARD / "prometheus.yml")
            .read_text(encoding="utf-8")
            .replace("5s", "1s")
            .replace("127.0.0.1:9470", at)
        )
        config = config.replace("127.0.0.1:8870", f"127.0.0.1:{shown.port}").replace(
            "THE-TOKEN-OF-THE-LINK", shown.served.token
        )
        with _prometheus(config, tmp_path) as prometheus:
            calls = _query(prometheus, 'burst_rt_rank_calls_total{job="burst_rt"} > 3', at_least=2)
            assert set(calls) == {"0", "1"}
            live = _query(
                prometheus, 'burst_rt_rank_status{job="burst_rt",status="live"} == 1', at_least=2
            )
            assert set(live) == {"0", "1"}
            assert _query(prometheus, "DCGM_FI_DEV_POWER_USAGE", at_least=2) == {
                "0": 456.0,
                "1": 456.0,
            }
            assert _query(prometheus, "sum(up)", at_least=1) == {"": 2.0}
            shown_by_grafana = {
                expression: _query(prometheus, expression, at_least=0)
                for expression in _expressions()
            }
        stop.touch()
        assert job.process.wait(30) == 0, "".join(job.said)
    assert len(shown_by_grafana) > 20
    assert sum(map(bool, shown_by_grafana.values())) > 12, shown_by_grafana


def test_prometheus_alerts_of_a_rank_that_was_lost(tmp_path: Path) -> None:
    """The job ends with the rank, and `/metrics` with the job."""
    (tmp_path / "alerts.yml").write_bytes((_DASHBOARD / "alerts.yml").read_bytes())
    words = ["run", "-n", "2", "--metrics-port", "0", str(_PROGRAM), "512", str(tmp_path / "stop")]
    with command(*words, cwd=tmp_path) as job:
        at = urllib.parse.urlparse(job.link("metrics")).netloc
        config = (_DASHBOARD / "prometheus.yml").read_text(encoding="utf-8")
        config = config.replace("127.0.0.1:9470", at) + (
            "rule_files: [alerts.yml]\nglobal: {evaluation_interval: 1s}\n"
        )
        with _prometheus(config, tmp_path) as prometheus:
            live = 'burst_rt_rank_status{job="burst_rt",status="live"} == 1'
            _query(prometheus, live, at_least=2)
            ranks = psutil.Process(job.process.pid).children(recursive=True)
            (last,) = [x for x in ranks if x.environ().get("OMPI_COMM_WORLD_RANK") == "1"]
            kill_rank(job.process, last.pid)
            assert job.process.wait(30) != 0
            alert = 'ALERTS{alertname="BurstRtRankLost",alertstate="firing"}'
            assert _query(prometheus, alert, at_least=1) == {"1": 1.0}
