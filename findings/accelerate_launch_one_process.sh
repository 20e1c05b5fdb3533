#!/usr/bin/env bash
# One would guess: `accelerate launch --cpu --num_processes 2 script.py` starts two processes, as `--num_processes` says and as
#   `--multi_gpu --num_processes 2` does, or refuses.
# In fact: one process runs, without RANK and WORLD_SIZE, and nothing says so; the exit code is 0. Without --cpu on a machine that has
#   no GPU it is the same.
#   MASTER_ADDR and MASTER_PORT are set all the same, so a script that looks for these takes itself for one of several.
# Who is hurt: who tests a training of several processes without GPUs: everything passes, on one.
# Versions: accelerate 1.15.0, torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     accelerate launch --cpu --num_processes 2: exit code 0, 0 words on stderr; one of 1 processes; the environment has MASTER_ADDR, MASTER_PORT
#     accelerate launch --num_processes 2: exit code 0, 0 words on stderr; one of 1 processes; the environment has MASTER_ADDR, MASTER_PORT
# Decided here: docs/jobs.md, docs/transformers.md and docs/trainer.md start jobs by torchrun, burst-rt run, mpirun and srun, not by accelerate; hf.Trainer
#   compares the ranks of its context with the processes of torch.distributed, and names torchrun where they differ
#   (burst_rt/hf/trainer.py).
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import os

from accelerate import Accelerator

known = [x for x in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if x in os.environ]
print(f"one of {Accelerator(cpu=True).num_processes} processes; the environment has {', '.join(known)}", flush=True)
EOF
export CUDA_VISIBLE_DEVICES=
for options in "--cpu --num_processes 2" "--num_processes 2"; do
    found=$("$bin/accelerate" launch $options --num_machines 1 --mixed_precision no --dynamo_backend no "$work/program.py" 2> "$work/errors")
    echo "accelerate launch $options: exit code 0, $(wc -w < "$work/errors") words on stderr; $found"
    if [ "$found" != "one of 1 processes; the environment has MASTER_ADDR, MASTER_PORT" ]; then
        echo "changed: $options starts something else" >&2
        exit 1
    fi
done
