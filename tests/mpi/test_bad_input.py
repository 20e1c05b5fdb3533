"""Bad input, on any rank: the same typed error on every rank, soon, with nothing sent, and the job
goes on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bad_masks import DIFFERENT, MISFITS, UNMADE
from jobs import Launcher, run_job

_PROGRAM = Path(__file__).parent / "programs" / "attention_bad_input.py"
# What is promised from one rank's bad call to the error on every rank.
_DEADLINE_S = 5.0


@pytest.mark.parametrize(("num_ranks", "by"), [(4, "burst-rt run"), (2, "torchrun")])
def test_every_rank_gets_the_odd_ranks_error(num_ranks: int, by: Launcher, tmp_path: Path) -> None:
    job = run_job(_PROGRAM, num_ranks, [str(tmp_path)], by=by, warm="torch")
    assert job.exit_code == 0, job.text
    by_rank = [
        json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        for rank in range(num_ranks)
    ]
    cases = {entry["case"] for entry in by_rank[0]}
    assert len(cases) >= 40
    assert len(cases & (MISFITS.keys() | DIFFERENT.keys())) >= 40
    assert {(entry["case"], entry["odd"]) for entry in by_rank[0]} == {
        (case, odd) for case in cases for odd in ([None] if case in UNMADE else range(num_ranks))
    }
    for rank, entries in enumerate(by_rank):
        for entry in entries:
            about = f"rank {rank} of {num_ranks}: {entry}"
            odd = entry["odd"]
            assert entry["error"] == entry["expected"], about
            if odd is None:
                assert entry["peer"] is None, about
            elif entry["expected"] == "InputError":
                assert entry["peer"] == odd, about
                assert f"rank {odd}: " in entry["message"], about
            else:
                # Of two ranks that differ neither is the odd one: both values are told, with the
                # rank of one.
                assert num_ranks == 2 or entry["peer"] == odd, about
                assert f"on rank {odd if num_ranks > 2 else entry['peer']}" in entry["message"], (
                    about
                )
            assert entry["words"] in entry["message"], about
            assert entry["elapsed_s"] < _DEADLINE_S, about
            assert entry["bytes"] == [0, 0], about
            assert entry["usable"], about
    # All ranks raise in the same words.
    for same in zip(*by_rank, strict=True):
        assert len({entry["message"] for entry in same}) == 1, same


@pytest.mark.parametrize(("num_ranks", "by"), [(2, "burst-rt run"), (3, "torchrun")])
def test_a_wrong_argument_is_refused_as_the_list_says(
    num_ranks: int, by: Launcher, tmp_path: Path
) -> None:
    program = _PROGRAM.parent / "refused_alike.py"
    job = run_job(program, num_ranks, [str(tmp_path)], by=by, warm="torch")
    assert job.exit_code == 0, job.text
    said = [(tmp_path / f"{rank}.json").read_text(encoding="utf-8") for rank in range(num_ranks)]
    assert len(set(said)) == 1
    seen = json.loads(said[0])
    assert len({(entry["call"], entry["argument"]) for entry in seen}) > 150
    wrong = []
    for entry in seen:
        alone = entry["kind"].startswith("local; only") and entry["odd"] is not None
        raising = [not alone or rank == entry["odd"] for rank in range(num_ranks)]
        if entry["outcomes"] != ["InputError" if raises else "fine" for raises in raising]:
            wrong.append(entry)
    assert not wrong, wrong


_OF_INIT = """
import json, os, sys
from pathlib import Path
import burst_rt
from burst_rt.errors import BurstError
rank = int(os.environ["RANK"])
seen = {}
for name, wrong in (("kernel", "x"), ("telemetry", "on"), ("stall_s", None), ("group", 3)):
    for odd in (1, None):
        try:
            burst_rt.init(join_s=2.0, **({name: wrong} if odd in (rank, None) else {})).close()
            outcome = "fine"
        except BurstError as error:
            outcome = type(error).__name__
        seen[f"{name} on {odd}"] = outcome
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
"""


def test_a_wrong_option_of_init_is_refused_by_all_but_a_group_that_is_none(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_OF_INIT, encoding="utf-8")
    job = run_job(program, 2, [str(tmp_path)], by="torchrun", warm="torch")
    assert job.exit_code == 0, job.text
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert second == dict.fromkeys(second, "InputError")
    assert first.pop("group on 1") == "Stalled"  # there is no group in which to tell it
    assert first == dict.fromkeys(first, "InputError")
