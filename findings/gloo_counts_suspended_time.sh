#!/usr/bin/env bash
# One would guess: a batch system may suspend a job of torch.distributed. SIGSTOP stops all of its ranks, so on their return they wait for each other as before.
# In fact: the timeouts of gloo and of torch's store go on meanwhile. A rank that waited in a collective, or for a key, raises as soon as it goes on, where the job was suspended for longer
#   than the timeout. The rank that it waited for comes a moment later, and loses its connection.
# Who is hurt: jobs that `scontrol suspend`, gang scheduling or preemption stop for longer than the timeout of `init_process_group`, half an hour for gloo by default. A longer timeout is
#   all that helps.
# Versions: torch 2.13.0. Needs no GPU: two processes get SIGSTOP and SIGCONT, as from Slurm. Seen on 2026-12-01.
# Output:
#     torch 2.13.0; timeout 4 s, rank 1 is 1 s late
#     gloo, not suspended: rank 0 got 2.0, rank 1 got 2.0
#     gloo, suspended for 6 s: rank 0 raised RuntimeError, rank 1 raised RuntimeError
#     store, not suspended: rank 0 got it, rank 1 set it
#     store, suspended for 6 s: rank 0 raised DistStoreError, rank 1 set it
# Decided here: burst_rt's deadlines count the time in which a rank runs (burst_rt/job/clock.py), and its own messages have no other deadline.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment torch==2.13.0 numpy==2.4.6
cat > "$work/rank.py" <<'EOF'
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

rank, what, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
store = dist.FileStore(str(folder / "meeting"), 2)
limit = timedelta(seconds=4)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
group = dist.new_group(timeout=limit)
port = torch.tensor([0])
if rank == 0:
    keys = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.fill_(keys.port)
dist.all_reduce(port)
if rank == 1:
    keys = dist.TCPStore("127.0.0.1", port.item(), is_master=False)
dist.barrier()
(folder / f"there-{rank}").touch()
if rank == 1:
    time.sleep(1.0)
try:
    if what == "gloo":
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        end = f"got {x.item()}"
    elif rank == 0:
        keys.set_timeout(limit)
        end = f"got {keys.get('key').decode()}"
    else:
        keys.set("key", "it")
        end = "set it"
        time.sleep(1.0)
except Exception as error:
    end = f"raised {type(error).__name__}"
(folder / f"end-{rank}").write_text(end)
EOF
cat > "$work/program.py" <<'EOF'
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from finding import expect

rank_program = sys.argv[1]


def both(what, suspended):
    """How the two ranks end; rank 1 comes a second late, by its own clock."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            subprocess.Popen([sys.executable, rank_program, str(rank), what, name], stderr=subprocess.DEVNULL)
            for rank in range(2)
        ]
        while not all((folder / f"there-{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        time.sleep(0.3)
        if suspended:
            for number, seconds in ((signal.SIGSTOP, 6.0), (signal.SIGCONT, 0.0)):
                for process in ranks:
                    process.send_signal(number)
                time.sleep(seconds)
        for process in ranks:
            process.wait(60)
        return [(folder / f"end-{rank}").read_text() for rank in range(2)]


print(f"torch {torch.__version__.partition('+')[0]}; timeout 4 s, rank 1 is 1 s late")
found = {}
for what in ("gloo", "store"):
    for suspended in (False, True):
        found[what, suspended] = first, second = both(what, suspended)
        print(f"{what}, {'suspended for 6 s' if suspended else 'not suspended'}: rank 0 {first}, rank 1 {second}")
expect(found["gloo", False] == ["got 2.0", "got 2.0"] and found["store", False] == ["got it", "set it"], found)
expect(found["gloo", True][0] == "raised RuntimeError", f"gloo after a pause: {found['gloo', True]}")
expect(found["store", True] == ["raised DistStoreError", "set it"], f"the store after a pause: {found['store', True]}")
EOF
"$python" "$work/program.py" "$work/rank.py"
