#!/usr/bin/env bash
# One would guess: with a context axis, whose processes get the same rows, gather_for_metrics returns each row once, and drops what the last
#   batch repeats.
# In fact: it gathers from all processes, so each row comes as often as a context has processes. It cuts the last batch to the rows that are left
#   over of the data axis: of the repeated rows it keeps the first ones, and drops others that came once.
# Who is hurt: metrics under ParallelismConfig(cp_size=...): means weigh rows unequally, counts are wrong, and rows of the last batch are missing.
# Versions: accelerate 1.15.0, torch 2.13.0 (CPU, gloo). accelerate takes ParallelismConfig only where it sees GPUs, so the program tells it that
#   it does. Seen on 2026-11-28.
# Output:
#     7 rows, 2 a batch, dp_shard 2 x cp 2: gathered [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4]
#     from one process of each context, as objects: [0, 1, 2, 3, 4, 5, 6]
# Decided here: examples/accelerated.py, where rank 0 of each context gives its rows and the others give none; docs/plain.md.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'PROGRAM'
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from finding import expect
from torch.utils.data import DataLoader

PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
accelerator = Accelerator(
    cpu=True,
    parallelism_config=ParallelismConfig(dp_shard_size=2, cp_size=2),
    fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
)
loader = accelerator.prepare(DataLoader(torch.arange(7), batch_size=2))
first = accelerator.torch_device_mesh["cp"].get_local_rank() == 0
gathered, once = [], []
for batch in loader:
    gathered += accelerator.gather_for_metrics(batch).tolist()
    once += accelerator.gather_for_metrics(batch.tolist() if first else [], use_gather_object=True)
if accelerator.is_main_process:
    print(f"7 rows, 2 a batch, dp_shard 2 x cp 2: gathered {gathered}")
    print(f"from one process of each context, as objects: {once}", flush=True)
expect(gathered == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4], "what is gathered")
expect(once == list(range(7)), "what one process of each context gives")
dist.destroy_process_group()
PROGRAM
export CUDA_VISIBLE_DEVICES=
"$bin/torchrun" --standalone --nproc-per-node 4 "$work/program.py" 2> "$work/errors" || { tail -n 25 "$work/errors" >&2; exit 1; }
