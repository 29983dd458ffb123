# `make` lists the targets. Each sets up the virtual environment that it needs.
PYTHON ?= python3
VENV := .venv
VENV_TRL := .venv-trl
VENV_VERL := .venv-verl
VENV_TQ := .venv-transferqueue
VENV_ENGINES := .venv-engines
VENV_ENGINES_023 := .venv-engines-023
VENV_JOBS := .venv-jobs
VENV_TORCH210 := .venv-torch210
VENV_SITE := .venv-site
BIN := $(VENV)/bin
# Without bytecode files, each process of a run compiles the package again.
export PYTHONDONTWRITEBYTECODE :=
SEED ?= 0
LOAD ?= 0
LENGTHS ?= lognormal
OTHER ?=
WHEELS ?=
HAVE ?=
OUT ?=
KILLS ?= 200
PROGRAMS ?= 5000
DRAWS ?= 100
PROGRAM ?= grpo
NAMES ?=
ENGINES ?=
STACKS ?=
SEEDS ?= 0 1 2
MINDSPEED ?=
OTHER_PYTHON ?= 3.12
VENV_OTHER := .venv-python$(OTHER_PYTHON)
# The interpreters that are tested: of each version in pyproject.toml pyenv's, or the one in PATH.
VERSIONS := $(shell sed -n 's/.*:: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml)
find_python = $(or $(lastword $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/$(1).*/bin/python)),$(shell command -v python$(1)))
PYTHONS ?= $(foreach version,$(VERSIONS),$(call find_python,$(version)))

# A target's help is in its rule: `##` for the short list (make), `#:` for the rest (make help-all).
TARGETS := $(shell sed -n 's/^\([a-z0-9-]*\):.* \(\#\#\|\#:\) .*/\1/p' $(lastword $(MAKEFILE_LIST)))
.PHONY: $(TARGETS)
.DEFAULT_GOAL := help

LIST = @sed -n 's/^\([a-z0-9-]*\):.* $(1) \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24
help: #: list the targets for everyday use
	$(call LIST,\#\#)

help-all: ## list all targets
	$(call LIST,\#[\#:])

# Install torch first, alone: otherwise pip takes a newer build with gigabytes of CUDA packages.
$(VENV)/ready: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints/cpu.txt torch
	$(BIN)/pip install --quiet --constraint constraints/cpu.txt --editable '.[run,dev,track]'
	touch $@

# ENGINES="megatron vllm" or "fsdp vllm" trains and generates with these engines.
EMPTY :=
DEMO = examples/arithmetic/$(subst $(EMPTY) $(EMPTY),_,$(or $(ENGINES),grpo)).rlg
demo: $(if $(ENGINES),$(VENV_ENGINES),$(VENV))/ready ## train a small model to add two-digit numbers: about 5 minutes on 2 cores
	$(<D)/bin/msrl-compile $(DEMO)
	$(<D)/bin/msrl-run $(DEMO) --seed $(SEED)

control: $(VENV)/ready #: train the example with shuffled rewards: its accuracy must not rise
	$(BIN)/msrl-run examples/arithmetic/control.rlg --seed $(SEED)

agent: $(VENV)/ready ## train an agent of pydantic-ai to use a calculator: about 10 minutes
	$(BIN)/msrl-run examples/calculator/agent.rlg --seed $(SEED)

# Some of them: make curves NAMES="dapo rloo" SEEDS="0 1"
curves: $(VENV)/ready ## draw the learning curve of each example: about an hour
	$(BIN)/python examples/curves.py $(NAMES) --seeds $(SEEDS)

curves-engines: $(VENV_ENGINES)/ready #: train the example with other engines, three programs and seeds: about 25 minutes
	$(VENV_ENGINES)/bin/python examples/curves.py --engines --seeds $(SEEDS)

lint: $(VENV)/ready ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Tests that share ranks stay in the worker of their file, until a worker is idle.
QUICK = -n auto --dist worksteal -m "not slow"
# Two tests that start runs go at a time: each of them waits for its processes now and then.
RUNS = -n 2 --dist loadgroup $$(grep -rl mark.slow tests --include='test_*.py' --exclude-dir=with_engines --exclude-dir=on_gpu)
test: lint ## check style and types, and run a sample of the tests: about 10 minutes on 2 cores
	$(BIN)/pytest --sample $(QUICK)
	$(BIN)/pytest --sample -m core $(RUNS)

test-all: lint ## check style and types, and run all tests without engines of their own: about 30 minutes on 2 cores
	$(BIN)/pytest $(QUICK)
	$(BIN)/pytest -m "slow and not long" $(RUNS)

test-long: $(VENV)/ready #: run the slow tests that are close to other tests: about 5 minutes
	$(BIN)/pytest -m long $(RUNS)

$(VENV_ENGINES)/ready: pyproject.toml constraints/engines.txt
	$(PYTHON) -m venv $(VENV_ENGINES)
	$(VENV_ENGINES)/bin/pip install --quiet --constraint constraints/engines.txt torch
	$(VENV_ENGINES)/bin/pip install --quiet --no-deps --requirement constraints/engines.txt
	$(VENV_ENGINES)/bin/pip install --quiet --no-deps --editable .
	touch $@

test-engines: $(VENV_ENGINES)/ready #: test vLLM and Megatron in ranks: about 20 minutes, 4 GB of packages
	$(VENV_ENGINES)/bin/pytest tests/with_engines

$(VENV_ENGINES_023)/ready: pyproject.toml constraints/engines-023.txt
	$(PYTHON) -m venv $(VENV_ENGINES_023)
	$(VENV_ENGINES_023)/bin/pip install --quiet --constraint constraints/engines-023.txt torch
	$(VENV_ENGINES_023)/bin/pip install --quiet --no-deps --requirement constraints/engines-023.txt
	$(VENV_ENGINES_023)/bin/pip install --quiet --no-deps --editable .
	touch $@

test-vllm-023: $(VENV_ENGINES_023)/ready #: test the vLLM version that vllm-ascend is built on: about 7 minutes, 7 GB of packages
	$(VENV_ENGINES_023)/bin/pytest tests/with_engines/test_vllm.py

# Uses PYTHON, which needs the packages: pip install --constraint constraints/cuda.txt '.[run,cuda,dev]'
test-gpu: #: test engines on one idle GPU
	$(PYTHON) -m pytest tests/on_gpu

# On a bare machine without a network: make bench-gpu WHEELS=DIR, with a folder that `make gpu-wheels` filled.
bench-gpu: #: measure speed, memory and predictions on one GPU, next to trl: at most 8 minutes
	$(PYTHON) $(if $(WHEELS),bench/with_wheels.py $(WHEELS)) bench/gpu.py --tests $(if $(OUT),--out $(OUT))

# HAVE=FILE is what `pip list --format=freeze` prints on the machine with the GPU.
gpu-wheels: $(VENV)/ready #: download the wheels that a machine with a GPU and torch lacks for bench-gpu: 45 MB
	$(BIN)/python constraints/wheels.py $(or $(WHEELS),build/wheels) $(if $(HAVE),--have $(HAVE))

# KILLS random kills, then each process at each point of its work. PROGRAM is grpo, dapo, pf_ppo or countdown.
chaos: $(VENV)/ready #: kill processes of runs and count the costs: about 2 hours
	$(BIN)/python bench/chaos.py --kills $(KILLS) --program $(PROGRAM)
	$(BIN)/python bench/points.py --program $(PROGRAM)

$(VENV_JOBS)/ready: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV_JOBS)
	$(VENV_JOBS)/bin/pip install --quiet --constraint constraints/cpu.txt torch
	$(VENV_JOBS)/bin/pip install --quiet --constraint constraints/cpu.txt --editable '.[run,dev,track]' 'ray[default]'
	touch $@

test-jobs: $(VENV_JOBS)/ready #: test runs that are submitted as Ray jobs: about a minute
	$(VENV_JOBS)/bin/pytest tests/scenarios/clusters/test_jobs.py

# The CPU build of torch if pip finds it, otherwise a CUDA build, which runs as well: 5 GB of packages.
$(VENV_OTHER)/ready: pyproject.toml constraints/cpu.txt
	$(call find_python,$(OTHER_PYTHON)) -m venv $(VENV_OTHER)
	$(VENV_OTHER)/bin/pip install --quiet --constraint constraints/cpu.txt torch
	$(VENV_OTHER)/bin/pip install --quiet --constraint constraints/cpu.txt --editable '.[run,dev,track]'
	touch $@

$(VENV_TORCH210)/ready: pyproject.toml constraints/torch210.txt
	$(PYTHON) -m venv $(VENV_TORCH210)
	$(VENV_TORCH210)/bin/pip install --quiet --constraint constraints/torch210.txt torch
	$(VENV_TORCH210)/bin/pip install --quiet --constraint constraints/torch210.txt --editable '.[run,dev]'
	touch $@

test-python: $(VENV_OTHER)/ready #: run the quick tests with another Python: make test-python OTHER_PYTHON=3.13
	$(VENV_OTHER)/bin/pytest $(QUICK)

# Some of them: make test-wheel PYTHONS="python3.12 /opt/python/bin/python3"
test-wheel: $(VENV)/ready #: install a wheel for each Python that is found, and run the README's example: 5 minutes each
	$(BIN)/python tests/wheel/check.py $(PYTHONS)

test-torch210: $(VENV_TORCH210)/ready #: run the quick tests with torch 2.10 and the lowest allowed versions of other packages
	$(VENV_TORCH210)/bin/pytest $(QUICK)

# Some stacks: make resolve STACKS="cuda ascend"
resolve: $(VENV)/ready #: check that the locked versions of each stack can still be resolved; installs nothing
	$(BIN)/python constraints/resolve.py $(STACKS)

lock: $(VENV)/ready #: lock the versions that the package index resolves to now: make lock STACKS=ascend
	$(BIN)/python constraints/resolve.py --write $(STACKS)

lost-hosts: $(VENV)/ready #: break hosts, links and processes of a cluster of four, and count the costs: about 2 hours
	$(BIN)/python bench/lost_hosts.py --faults $(KILLS)

bench-compile: $(VENV)/ready #: measure compile times of large programs
	$(BIN)/python bench/compile.py

bench-engines: $(VENV_ENGINES)/ready #: measure tokens per second of each engine: about 12 minutes
	$(VENV_ENGINES)/bin/python bench/engines.py

bench-driver-memory: $(VENV)/ready #: measure how much the memory of the driver grows in 2,000 iterations: about 15 minutes
	$(BIN)/python bench/driver_memory.py

bench-functions: $(VENV)/ready #: measure user functions one after another, in workers and in an event loop
	$(BIN)/python bench/functions.py

bench-environments: $(VENV)/ready #: run an environment that fails in every way, and hostile code in the sandbox: about 3 minutes
	$(BIN)/python bench/environments.py --prompts 64 --iterations 4

bench-async: $(VENV)/ready #: measure responses per second of synchronous and asynchronous runs: about 10 minutes
	$(BIN)/python bench/asynchrony.py

bench-pipelined: $(VENV)/ready #: measure generation ahead of the update on the same devices: about 12 minutes
	$(BIN)/python bench/pipelined.py

bench-corrected: $(VENV)/ready #: compare learning from stale rows with and without a corrected loss: about 25 minutes
	$(BIN)/python bench/corrected.py

bench-router-replay: $(VENV)/ready #: compare drift on a mixture of experts with and without router replay: about 6 minutes
	$(BIN)/python bench/router_replay.py

bench-proof: $(VENV)/ready #: measure the time that the verification of weights takes: about 2 minutes
	$(BIN)/python bench/proof.py

bench-hosts: $(VENV)/ready #: run the example on 1, 2 and 4 hosts (network namespaces; needs root): about 3 minutes
	$(BIN)/python bench/hosts.py

bench-memory: $(VENV)/ready #: compare predicted and measured memory on 1 to 4 ranks: about 5 minutes
	$(BIN)/python bench/memory.py

bench-memory-engines: $(VENV_ENGINES)/ready #: compare predicted and measured memory with Megatron and vLLM: about 5 minutes
	$(VENV_ENGINES)/bin/python bench/memory.py --engines "megatron vllm"

bench-real-width: $(VENV)/ready #: measure iterations of 0.5 billion parameters on the CPU: about 15 minutes, 14 GB of memory
	$(BIN)/python bench/real_width.py

bench-long-rows: $(VENV)/ready #: plan the memory of rows of 8k to 64k tokens, beside published figures
	$(BIN)/python bench/long_rows.py

bench-public-recipes: $(VENV)/ready #: plan published recipes on their own numbers of devices: about 2 minutes
	$(BIN)/python bench/public_recipes.py

bench-reshard: $(VENV)/ready #: compare resharding with bare collectives and copies of the same bytes: about 2 minutes
	$(BIN)/python bench/reshard.py

conformance: $(VENV_ENGINES)/ready #: compare each engine with transformers for each model family: about 5 minutes
	$(VENV_ENGINES)/bin/python bench/conformance.py

families: $(VENV)/ready #: train a small model of each family for ten iterations, and export it: about 7 minutes
	$(BIN)/python bench/families.py

reshard-engines: $(VENV_ENGINES)/ready #: reshard between real engines with random layouts on 1 to 8 ranks: about 30 minutes
	$(VENV_ENGINES)/bin/python bench/reshard_engines.py --draws $(DRAWS) --seed $(SEED)

usual-plans: $(VENV)/ready #: plan usual models on usual clusters, next to the layouts of public recipes
	$(BIN)/python bench/usual_plans.py

bench-planner: $(VENV)/ready #: measure planning times for 10,000 devices and for the paper's models
	$(BIN)/python bench/planner.py

bench-controller: $(VENV)/ready #: measure decisions per second of a dock controller with up to 100,000 waiting rows
	$(BIN)/python bench/controller.py

bench-phases: $(VENV)/ready #: measure the seconds of an iteration by phase
	$(BIN)/python bench/phases.py

bench-seconds: $(VENV)/ready #: calibrate this machine and compare predicted and measured seconds: about 16 minutes
	$(BIN)/python bench/seconds.py

bench-seconds-engines: $(VENV_ENGINES)/ready #: compare predicted and measured seconds with Megatron and vLLM: about 20 minutes
	$(VENV_ENGINES)/bin/python bench/seconds.py --engines

# Compare with another checkout: make bench-startup OTHER=FOLDER
bench-startup: $(VENV)/ready #: measure the seconds from msrl-run to the first iteration
	$(BIN)/python bench/startup.py --other $(OTHER)

bench-data: $(VENV)/ready #: measure how long a run waits for a million rows, by format: about 2 minutes
	$(BIN)/python bench/data.py

bench-staleness: $(VENV)/ready #: check the age of rows in simulated iterations of random programs
	$(BIN)/python bench/staleness.py

bench-simulate: $(VENV)/ready #: measure simulation times on 384 and 10,000 devices
	$(BIN)/python bench/simulate.py

$(VENV_TRL)/ready: constraints/trl.txt
	$(PYTHON) -m venv $(VENV_TRL)
	$(VENV_TRL)/bin/pip install --quiet --constraint constraints/trl.txt torch
	$(VENV_TRL)/bin/pip install --quiet --constraint constraints/trl.txt trl
	touch $@

# LOAD=2 adds two busy processes.
bench-trl: $(VENV)/ready $(VENV_TRL)/ready #: compare the example with trl's GRPOTrainer
	$(BIN)/python bench/trl.py --load $(LOAD)

bench-trl-curves: $(VENV)/ready $(VENV_TRL)/ready #: compare the learning curves of the example here and in trl
	$(BIN)/python bench/trl.py --curves

invariance: $(VENV)/ready #: check that no layout, dock or order of rows changes results: about 10 minutes
	$(BIN)/python bench/invariance.py

dry: $(VENV)/ready #: compile random programs and run them dry in random orders: about 15 minutes for 5,000
	$(BIN)/python bench/dry.py --programs $(PROGRAMS) --seed $(SEED)

programs: $(VENV)/ready #: run two iterations of every program in tests/programs: about 5 minutes
	$(BIN)/python bench/programs.py

paper: $(VENV)/ready #: compare the planner with the figures of the MindSpeed RL paper: some minutes
	$(BIN)/python bench/paper.py

$(VENV_VERL)/ready: constraints/verl.txt
	$(PYTHON) -m venv $(VENV_VERL)
	$(VENV_VERL)/bin/pip install --quiet --constraint constraints/verl.txt torch
	$(VENV_VERL)/bin/pip install --quiet --no-deps --requirement constraints/verl.txt
	touch $@

$(VENV_TQ)/ready: constraints/transferqueue.txt
	$(PYTHON) -m venv $(VENV_TQ)
	$(VENV_TQ)/bin/pip install --quiet --constraint constraints/transferqueue.txt torch
	$(VENV_TQ)/bin/pip install --quiet --no-deps --requirement constraints/transferqueue.txt
	touch $@

# Writes its tables and picture into docs/guides/performance.md. Nothing else may run on the machine.
bench-dock: $(VENV)/ready $(VENV_TQ)/ready $(VENV_VERL)/ready ## measure rows between 1 to 8 hosts, compared with other systems (needs root): about 25 minutes
	$(BIN)/python bench/dock.py --local --page
	$(BIN)/python bench/dock.py --page

# For the lengths in a file: make bench-dock-lengths LENGTHS=FILE
bench-dock-lengths: $(VENV)/ready #: measure what `balance = tokens` moves
	$(BIN)/python bench/dock.py --page --lengths $(LENGTHS)

# MINDSPEED=FOLDER is a clone of MindSpeed, which is on no index. Without it the recorded calls of MindSpeed stay.
contracts: $(VENV)/ready #: record the calls of packages that cannot run here from their wheels (1.4 GB): about 2 minutes
	$(BIN)/python tests/contracts/write.py $(if $(MINDSPEED),--mindspeed $(MINDSPEED))

peer-values: $(VENV_TRL)/ready $(VENV_VERL)/ready #: compute the values of trl and verl that tests/algorithms/test_peers.py compares with
	$(VENV_TRL)/bin/python tests/peers/from_trl.py
	$(VENV_VERL)/bin/python -W ignore tests/peers/from_verl.py

docs: $(VENV)/ready ## write the pages that are generated from sources
	$(BIN)/python -m msrl_graph.diagnostics.codes > docs/reference/codes.md
	$(BIN)/python -m msrl_graph.reference docs/reference/language
	$(BIN)/python -m msrl_graph.reference.metric_page > docs/reference/metrics.md
	$(BIN)/python -m msrl_graph.reference.option_page > docs/reference/options.md

$(VENV_SITE)/ready: pyproject.toml constraints/site.txt
	$(PYTHON) -m venv $(VENV_SITE)
	$(VENV_SITE)/bin/pip install --quiet --constraint constraints/site.txt --editable '.[site]'
	touch $@

# To read it: python -m http.server --directory site
site: $(VENV_SITE)/ready ## build the documentation as a site with search, in site/; broken links fail
	NO_MKDOCS_2_WARNING=1 $(VENV_SITE)/bin/mkdocs build --strict

clean: ## remove all virtual environments and the site
	rm -rf $(VENV) $(VENV_TRL) $(VENV_VERL) $(VENV_TQ) $(VENV_ENGINES) $(VENV_ENGINES_023) $(VENV_JOBS) .venv-python* $(VENV_TORCH210) $(VENV_SITE) site
