#!/usr/bin/env bash
# One would guess: where an operand of a product lies at one place in shared memory, for all turns of a loop, telling the compiler so is the best for the
#   loop; an index that is always 0, and that it cannot know, only adds work to each turn.
# In fact: Hopper's wgmma takes an operand in shared memory by a 64-bit descriptor in uniform registers, another one for each step of 16 channels. If the place is
#   constant, the compiler makes all descriptors before the loop, keeps them in the registers of each thread, and moves them to uniform registers in each turn: 50 moves
#   here, and 12 more registers are spilled, in a kernel that needs its registers for sums. With the index it makes them from one number in each turn, in uniform registers.
# Who is hurt: kernels in Gluon whose loops multiply by what does not change, as the backward of attention by a block of keys and values, whose prototype here spilled
#   descriptors only.
# Versions: triton 3.7.1 (Gluon, with ptxas 12.8.93 in its package). Compiled ahead for sm_90; needs no GPU. Seen on 2026-11-29; 3.6.0 does the same. What it costs in time was
#   not measured.
# Output:
#     operands at a constant place: 40 wgmma instructions, 50 moves to uniform registers, 17 loads and 17 stores of spilled registers
#     operands at a place that the compiler does not know: 40 wgmma instructions, 2 moves to uniform registers, 5 loads and 5 stores of spilled registers
# Decided here: the consumers of burst_rt/kernels/triton/backward_hopper.py index k, v and their score gradients by such a 0, and tests/unit/test_aot.py asks that nothing
#   is spilled in their loop.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${triton[@]}"
cat > "$work/program.py" <<'EOF'
import triton
from finding import expect, instructions
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def kernel(p_x, p_weights, p_out, number, HIDDEN: gl.constexpr):
    """Rows of x, 64 at a time, by four matrices that stay; then two sums of products of what comes of it and x."""
    half: gl.constexpr = gl.bfloat16
    some_rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], half)
    matrix: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], half)
    narrow: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wide, k_width=2)
    from_x = tma.make_tensor_descriptor(p_x, [number * 64, 128], [128, 1], [64, 128], some_rows)
    from_weights = tma.make_tensor_descriptor(p_weights, [512, 128], [128, 1], [128, 128], matrix)
    weights = gl.allocate_shared_memory(half, [4, 128, 128], matrix)
    two_x = gl.allocate_shared_memory(half, [2, 64, 128], some_rows)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()
    mbarrier.expect(ready, 4 * from_weights.block_type.nbytes)
    for j in gl.static_range(4):
        tma.async_copy_global_to_shared(from_weights, [j * 128, 0], ready, weights.index(j))
    mbarrier.wait(ready, 0)
    zeros = gl.full([128, 64], 0.0, gl.float32, narrow)
    one = gl.full([128, 128], 0.0, gl.float32, wide)
    other = gl.full([128, 128], 0.0, gl.float32, wide)
    for i in range(number):
        mbarrier.expect(ready, from_x.block_type.nbytes)
        tma.async_copy_global_to_shared(from_x, [i * 64, 0], ready, two_x.index(i % 2))
        mbarrier.wait(ready, (i + 1) & 1)
        first = i >> 30 if HIDDEN else 0  # always 0
        x = two_x.index(i % 2)
        across = x.permute((1, 0))
        a = warpgroup_mma(weights.index(first), across, zeros, use_acc=False, is_async=True)
        b = warpgroup_mma(weights.index(first + 1), across, zeros, use_acc=False, is_async=True)
        c = warpgroup_mma(weights.index(first + 2), across, zeros, use_acc=False, is_async=True)
        d = warpgroup_mma(weights.index(first + 3), across, zeros, use_acc=False, is_async=True)
        a, b, c, d = warpgroup_mma_wait(0, deps=[a, b, c, d])
        a, b = a + c, b + d
        one = warpgroup_mma(gl.convert_layout(gl.exp2(a).to(half), operand), x, one, is_async=True)
        other = warpgroup_mma(gl.convert_layout((a * b).to(half), operand), x, other, is_async=True)
        one, other = warpgroup_mma_wait(0, deps=[one, other])
    rows = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, wide)), 1)
    columns = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, wide)), 0)
    gl.store(p_out + rows * 128 + columns, one + other)


def compiled(hidden):
    types = {"p_x": "*bf16", "p_weights": "*bf16", "p_out": "*fp32", "number": "i32", "HIDDEN": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    source = GluonASTSource(kernel, types, {"HIDDEN": hidden}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})


for hidden, moves, spilled in (False, 50, 17), (True, 2, 5):
    code = instructions(compiled(hidden))
    found = [sum(name in line for line in code) for name in ("HGMMA.", "R2UR", "LDL", "STL")]
    print(
        f"operands at a {'place that the compiler does not know' if hidden else 'constant place'}: {found[0]} wgmma instructions, "
        f"{found[1]} moves to uniform registers, {found[2]} loads and {found[3]} stores of spilled registers",
        flush=True,
    )
    expect(found == [40, moves, spilled, spilled], f"hidden {hidden}: {found}")
EOF
"$python" "$work/program.py"
