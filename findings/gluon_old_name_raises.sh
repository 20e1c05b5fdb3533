#!/usr/bin/env bash
# One would guess: Gluon's functions differ from release to release, so a kernel that is to work with several asks which name is there (hasattr, or try and except
#   AttributeError where it is imported).
# In fact: the copy engine's load is `async_copy_global_to_shared` in Triton 3.7 and `async_load` in 3.9, and 3.8 takes both. But 3.9 still has the old name, as a function
#   that says when a kernel is compiled, at its first launch, that it has been removed. Only the new name tells the releases apart.
# Who is hurt: kernels in Gluon that were written for 3.7, or that ask for the old name first: they import, pass the tests that compile nothing, and fail in a user's first
#   call.
# Versions: triton 3.7.1, 3.8.0 and 3.9.0. Compiled ahead for sm_90; needs no GPU. Seen on 2026-11-29.
# Output:
#     triton 3.7.1: the old name is there, and compiles; the new name is not there
#     triton 3.8.0: the old name is there, and compiles; the new name is there, and compiles
#     triton 3.9.0: the old name is there, and raises when compiled; the new name is there, and compiles
# Decided here: burst_rt/kernels/triton/producer.py asks for the new name, and the kernels in Gluon are compiled with 3.6, 3.7, 3.8 and 3.9.
set -euo pipefail
source "$(dirname "$0")/common.sh"
cat > "$work/program.py" <<'EOF'
import triton
from finding import expect
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

OLD, NEW = "async_copy_global_to_shared", "async_load"


def loads(load):
    @gluon.jit
    def rows(p_x, p_out):
        """Sixty-four rows of sixty-four, through shared memory."""
        here: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
        spread: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        x = tma.make_tensor_descriptor(p_x, [64, 64], [64, 1], [64, 64], here)
        block = gl.allocate_shared_memory(gl.float16, [64, 64], here)
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=1)
        mbarrier.expect(ready, x.block_type.nbytes)
        load(x, [0, 0], ready, block)
        mbarrier.wait(ready, 0)
        row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, spread)), 1)
        column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, spread)), 0)
        gl.store(p_out + row * 64 + column, block.load(spread))

    return rows


def said(name):
    if not hasattr(tma, name):
        return "not there"
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(2)}
    source = GluonASTSource(loads(getattr(tma, name)), {"p_x": "*fp16", "p_out": "*fp16"}, {}, aligned)
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    except triton.compiler.errors.CompilationError as error:
        expect("removed" in str(error), error)
        return "there, and raises when compiled"
    return "there, and compiles"


found = said(OLD), said(NEW)
print(f"triton {triton.__version__}: the old name is {found[0]}; the new name is {found[1]}", flush=True)
wanted = {
    "3.7.1": ("there, and compiles", "not there"),
    "3.8.0": ("there, and compiles", "there, and compiles"),
    "3.9.0": ("there, and raises when compiled", "there, and compiles"),
}
expect(found == wanted[triton.__version__], found)
EOF
for version in 3.7.1 3.8.0 3.9.0; do
    environment "triton==$version" numpy==2.4.6
    "$python" "$work/program.py"
done
