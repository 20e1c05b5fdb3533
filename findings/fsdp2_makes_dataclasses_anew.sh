#!/usr/bin/env bash
# One would guess: fully_shard hands a module's arguments on as they are, but for tensors that mixed precision casts; an argument that is a
#   dataclass with no float tensor in it arrives as the caller's own object.
# In fact: with a MixedPrecisionPolicy that has a param_dtype every dataclass among the arguments is replaced by a new one
#   (`dataclasses.replace`), frozen ones too. What was cached on the object is gone, `is` says no, float tensors inside are cast; and a field
#   with init=False ends the call with a ValueError. Without a policy the object arrives itself.
# Who is hurt: libraries that tell layers by a keyword how a batch is cut, masked or packed. It works until somebody turns on bfloat16.
# Versions: torch 2.13.0 (CPU, gloo). Seen on 2026-11-27.
# Output:
#     param_dtype None, Cut(tokens=8): the layer gets the object itself
#     param_dtype None, Counted(tokens=8, calls=0): the layer gets the object itself
#     param_dtype torch.bfloat16, Cut(tokens=8): the layer gets another object
#     param_dtype torch.bfloat16, Counted(tokens=8, calls=0): the layer gets ValueError: field calls is declared with init=False, it cannot be specified with replace()
# Decided here: burst_rt/opaque.py, which takes the marks of a dataclass off layouts, parts of batches and caches.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}"
cat > "$work/program.py" <<'EOF'
import dataclasses

import torch
from finding import expect, over_gloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@dataclasses.dataclass(frozen=True)
class Cut:
    tokens: int


@dataclasses.dataclass
class Counted:
    tokens: int
    calls: int = dataclasses.field(default=0, init=False)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, cut):
        self.got = cut
        return self.linear(x)


def call(rank, world):
    found = []
    for policy in MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16):
        for argument in Cut(8), Counted(8):
            layer = Layer()
            fully_shard(layer, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
            try:
                layer(torch.ones(1, 4), argument)
                found.append("the object itself" if layer.got is argument else "another object")
            except ValueError as error:
                found.append(f"ValueError: {error}")
            print(f"param_dtype {policy.param_dtype}, {argument}: the layer gets {found[-1]}")
    expect(found[:2] == ["the object itself"] * 2, "without mixed precision")
    expect(found[2] == "another object" and "init=False" in found[3], f"with mixed precision: {found[2:]}")


if __name__ == "__main__":
    over_gloo(1, call)
EOF
"$python" "$work/program.py"
