#!/usr/bin/env bash
# One would guess: under torchrun with two processes, Accelerator() is one of two processes; on a machine without a GPU, on the CPU.
# In fact: without a GPU each Accelerator() takes itself for the only process (num_processes 1) and says nothing, though it makes the process
#   group of both. Only Accelerator(cpu=True) is one of two there. `accelerate launch --multi_gpu` does not change it.
# Who is hurt: who starts a training of several processes without GPUs: each trains by itself on all rows, and every loss looks right.
# Versions: accelerate 1.15.0, torch 2.13.0 (CPU, gloo). Seen on 2026-11-28.
# Output:
#     Accelerator() is one of 1 processes of 2, DistributedType.NO, and torch.distributed has 2
#     Accelerator(cpu=True) is one of 2 processes of 2, DistributedType.MULTI_CPU, and torch.distributed has 2
# Decided here: examples/accelerated.py passes cpu=True where torch sees no GPU; docs/plain.md says so.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'PROGRAM'
import os
import sys

import torch.distributed as dist
from accelerate import Accelerator
from finding import expect

options = {"cpu": True} if sys.argv[1:] else {}
accelerator = Accelerator(**options)
world = int(os.environ["WORLD_SIZE"])
if os.environ["RANK"] == "0":
    name = "Accelerator(cpu=True)" if options else "Accelerator()"
    print(
        f"{name} is one of {accelerator.num_processes} processes of {world}, {accelerator.distributed_type}, "
        f"and torch.distributed has {dist.get_world_size()}",
        flush=True,
    )
expect(accelerator.num_processes == (world if options else 1) and dist.get_world_size() == world, f"with {options}")
dist.destroy_process_group()
PROGRAM
export CUDA_VISIBLE_DEVICES=
for argument in "" cpu; do
    "$bin/torchrun" --standalone --nproc-per-node 2 "$work/program.py" $argument 2> "$work/errors" || { tail -n 5 "$work/errors" >&2; exit 1; }
done
