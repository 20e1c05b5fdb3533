"""transformers' Trainer and TRL's SFTTrainer over ranks do what they do on one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import Launcher, run_job
from tolerances import LOSSES_16BIT, LOSSES_OF_TRAINERS

from burst_rt.telemetry.messages import JobReport
from burst_rt.telemetry.read.record import Record
from burst_rt.telemetry.read.tape import replay

_PROGRAM = Path(__file__).parent / "programs" / "trainer.py"
# What the message of each refusal says.
_SAID = {
    "label_smoothing_factor": "expected 0, got 0.1",
    "average_tokens_across_devices": "expected True, got False",
    "neftune_noise_alpha": "expected None, got 5",
    "use_liger_kernel": "expected False, got True",
    "auto_find_batch_size": "expected False, got True",
    "train_sampling_strategy": "expected another than 'batch_rebalance'",
    "accelerator_config": "dispatch_batches: expected None or False, got True",
    "compute_loss_func": "override compute_loss",
    "compute_metrics": "prediction_loss_only=True",
    "predict": "prediction_loss_only=True",
    "labels": "expected labels in a batch, got none",
    "labels of a step": "expected labels in a batch, got input_ids, attention_mask",
    "batch": "expected the same batch on all ranks of a context",
}

# What is reported of Trainer's log, and by which name.
_REPORTED = {
    "loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate",
    "eval_loss": "heldout_loss",
}  # fmt: skip

Found = dict[str, Any]


def _run(folder: Path, num_ranks: int, *names: str, by: Launcher = "torchrun") -> dict[str, Found]:
    job = run_job(_PROGRAM, num_ranks, [str(folder), *names], by=by, timeout_s=300.0, warm="models")
    assert job.exit_code == 0, job.text
    files = [folder / f"{num_ranks}-{name.replace(':', '-')}.json" for name in names]
    return {name: json.loads(file.read_text()) for name, file in zip(names, files, strict=True)}


def _check(found: Found, expected: Found, tolerance: float = LOSSES_OF_TRAINERS) -> None:
    """Losses, gradient norms, counts and metrics of all steps, and those of evaluations."""
    assert found.keys() <= expected.keys()
    for name, values in found.items():
        if name == "eval":
            for metric, value in values.items():
                assert value == pytest.approx(expected["eval"][metric], rel=tolerance), metric
        elif name == "num_input_tokens_seen":
            assert values == expected[name]
        else:
            assert values == pytest.approx(expected[name], rel=tolerance), name


def test_trainers_do_what_they_do_on_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On some CPUs the last bits of MKL's products depend on where in memory the matrices begin
    # (oneMKL Developer Guide, Conditional Numerical Reproducibility).
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    four = _run(
        tmp_path, 4, "2:saved", "2:resumed", "2:packed", "1:tuned", "2:balanced", "2:mixed",
        "2:uneven", "2:whole", "2:branching",
    )  # fmt: skip
    # Beside torch.distributed, which Trainer starts by itself, the ranks of a context are MPI's.
    two = _run(
        tmp_path, 2, "1:plain", "1:resumed", "1:bf16", "1:streamed", "1:refused", "1:mixed",
        "1:balanced", "1:unbalanced", by="burst-rt run",
    )  # fmt: skip
    alone = _run(
        tmp_path, 1, "1:plain", "1:packed", "1:tuned", "1:bf16", "1:streamed", "1:loaded",
        "1:mixed", "1:balanced", "1:unbalanced", "1:branching", by="burst-rt run",
    )  # fmt: skip
    plain = alone["1:plain"]
    assert plain["loss"][-1] < 0.95 * plain["loss"][0], "a training that learns little hides errors"
    for name in ("2:saved", "2:resumed"):
        flops = four[name].pop("flops")  # batches of fewer rows have less padding
        assert 0.5 * plain["flops"] < flops < plain["flops"]
    _check(four["2:saved"], plain)
    # Steps 11 to 20 from what four ranks have saved: bit for bit those of the same ranks.
    assert four["2:resumed"]["loss"] == four["2:saved"]["loss"]
    two["1:resumed"].pop("flops")
    _check(two["1:resumed"], plain)
    assert alone["1:loaded"]["eval"] == pytest.approx(plain["eval"], rel=LOSSES_OF_TRAINERS)
    _check(two["1:plain"], plain)
    _check(two["1:streamed"], alone["1:streamed"])
    _check(two["1:bf16"], alone["1:bf16"], LOSSES_16BIT)
    _check(four["1:tuned"], alone["1:tuned"])
    for name in ("packed", "whole"):
        _check(four[f"2:{name}"], alone["1:packed"])
    _check(four["2:branching"], alone["1:branching"])
    for name in ("mixed", "balanced", "unbalanced"):
        _check(two[f"1:{name}"], alone[f"1:{name}"])
    for name in ("mixed", "balanced"):
        # Flops count padding, of which batches of fewer rows have less; and Trainer's eval_loss is
        # the mean of what each process makes of its own rows.
        others = ("flops", "eval_losses")
        found = {what: x for what, x in four[f"2:{name}"].items() if what not in others}
        _check(found, alone[f"1:{name}"])
    for rank, said in enumerate(four["2:uneven"]["said"]):
        got = f"got {3 if rank else 1} ranks here and [1, 3] processes by context"
        assert got in said
    said = two["1:refused"]["said"]
    assert said.keys() == _SAID.keys()
    for name, words in _SAID.items():
        assert words in said[name], said[name]
    assert len(two["1:refused"]["loss"]) == 2  # two steps after all of these


def test_a_training_after_an_evaluation_is_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that train apart have other gradients from the first step on."""
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    found_by_run = _run(tmp_path, 2, "1:evaluated_first", "1:compiled")
    expected = _run(tmp_path, 1, "1:evaluated_first", by="burst-rt run")["1:evaluated_first"]
    for run, found in found_by_run.items():
        assert found.keys() == expected.keys()
        for name, values in found.items():
            assert values == pytest.approx(expected[name], rel=LOSSES_OF_TRAINERS), (run, name)


def test_a_resumed_run_sees_the_rows_that_it_would_have_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each sampler of Trainer's, inside a first and a later epoch and between them; or the
    sampler, or the stream, is refused by name.
    """
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    found_by_run = _run(tmp_path, 2, "1:sampled", "2:sampled")
    runs = {
        (int(run[0]), name): each
        for run, by_name in found_by_run.items()
        for name, each in by_name.items()
    }
    orders: dict[str, list[Any]] = {}
    for (num_contexts, name), by_step in runs.items():
        rows, losses = by_step.pop("0")
        if num_contexts == 1:
            orders[name] = rows
        for at, found in by_step.items():
            step = int(at)
            if name == "own, by chance":
                assert "sampler: expected one whose order can be made again, got Shuffled" in found
            elif name == "a stream of no length" and step > 5:
                assert "train_dataset: expected one that has a length, " in found
                assert ", got Stream: " in found
            else:
                seen, resumed_losses = found
                assert seen == rows[len(rows) - len(seen) :], (num_contexts, name, step)
                assert resumed_losses == losses, (num_contexts, name, step)
                assert len(seen) >= 2 * (9 - step) - 1, (num_contexts, name, step)
    # Without chance all of that would hold, too.
    for name in (
        "random",
        "random, not seedable",
        "group_by_length",
        "weighted",
        "a stream by epoch",
    ):
        first, second = orders[name][:8], orders[name][11:19]
        assert first != second, name


def test_trainers_report_what_they_log_and_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.record"
    monkeypatch.setenv("BURST_RT_RECORD", str(path))
    log = _run(tmp_path, 2, "1:reported")["1:reported"]["log"]
    expected = [
        (line["step"], {ours: line[theirs] for theirs, ours in _REPORTED.items() if theirs in line})
        for line in log
    ]
    reports = [e.message for e in Record(path) if isinstance(e.message, JobReport)]
    told = [(report.step, dict(report.values)) for report in reports]
    rates = [values.pop("tokens_per_s", None) for _, values in told]
    assert told == expected
    assert [step for step, _ in told] == [1, 2, 2, 3, 1, 2, 2, 3, 4, 4]
    for (_, values), rate in zip(told, rates, strict=True):
        assert ("loss" in values) == (rate is not None and rate > 0)
        assert values.keys() in ({"loss", "grad_norm", "learning_rate"}, {"heldout_loss"})
    model = replay(Record(path))
    for rank in model.snapshot().ranks:
        own = [p for p in model.timeline(0.0).phases if p.rank == rank.rank]
        assert [p.step for p in own if not p.name] == [1, 2, 3, 4, 1, 2, 3, 4]
        assert (rank.steps, rank.dropped) == (7, 0)  # one has failed
        assert 0 < rank.step_call_s < rank.step_s
        # Two micro-batches a step, of which one failed; then one. Evaluations are in no step.
        forward = [(p.depth, p.step) for p in own if p.name == "forward"]
        in_steps = [step for _, step in forward if step >= 0]
        assert in_steps == [1, 1, 2, 2, 3, 3, 4, 1, 2, 3, 4]
        assert {depth for depth, step in forward if step < 0} == {1}  # in an evaluation's span
        assert [p.step for p in own if p.name == "evaluation"] == [-1, -1, -1]
        assert [p.depth for p in own if p.name == "data"] == [0] * 8  # batches of a step at once
        optimizer = [(p.depth, p.step) for p in own if p.name == "optimizer"]
        assert optimizer == [(1, step) for step in (1, 2, 3, 1, 2, 3, 4)]
