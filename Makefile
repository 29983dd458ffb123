# `make demo` trains the example, `make test` checks everything; both set up .venv first.
PYTHON ?= python3
VENV := .venv
VENV_TRL := .venv-trl
VENV_VERL := .venv-verl
VENV_ENGINES := .venv-engines
BIN := $(VENV)/bin
SEED ?= 0
LOAD ?= 0
KILLS ?= 200
PROGRAMS ?= 5000
PROGRAM ?= grpo
NAMES ?=
SEEDS ?= 0 1 2

.PHONY: demo control curves test test-engines lint chaos dry invariance programs bench-compile bench-memory bench-memory-engines bench-phases bench-seconds bench-simulate bench-trl bench-trl-curves paper peer-values docs clean

# torch first and by itself: else pip takes a newer build with gigabytes of CUDA packages.
$(VENV)/ready: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints/cpu.txt torch
	$(BIN)/pip install --quiet --constraint constraints/cpu.txt --editable '.[run,dev]'
	touch $@

demo: $(VENV)/ready
	$(BIN)/msrl-compile examples/arithmetic/grpo.rlg
	$(BIN)/msrl-run examples/arithmetic/grpo.rlg --seed $(SEED)

# The same run with shuffled rewards: accuracy must not rise.
control: $(VENV)/ready
	$(BIN)/msrl-run examples/arithmetic/control.rlg --seed $(SEED)

# What each example learns, with three seeds, about an hour: make curves NAMES="dapo rloo" SEEDS="0 1"
curves: $(VENV)/ready
	$(BIN)/python examples/curves.py $(NAMES) --seeds $(SEEDS)

lint: $(VENV)/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Tests that start runs are two at a time: each waits for its processes most of the time.
test: lint
	$(BIN)/pytest -n auto -m "not slow"
	$(BIN)/pytest -n 2 --dist loadgroup -m slow

$(VENV_ENGINES)/ready: pyproject.toml constraints/engines.txt
	$(PYTHON) -m venv $(VENV_ENGINES)
	$(VENV_ENGINES)/bin/pip install --quiet --constraint constraints/engines.txt torch
	$(VENV_ENGINES)/bin/pip install --quiet --no-deps --requirement constraints/engines.txt
	$(VENV_ENGINES)/bin/pip install --quiet --no-deps --editable .
	touch $@

# vLLM and Megatron in the ranks: some 4 GB of packages, in an environment of their own; about 8 minutes when they are there.
test-engines: $(VENV_ENGINES)/ready
	$(VENV_ENGINES)/bin/pytest tests/with_engines

# Kills processes of runs (PROGRAM=grpo, dapo or pf_ppo) and counts what that costs: at random, 200 take about an hour, and then each process
# on two hosts at each point of its work, about as long.
chaos: $(VENV)/ready
	$(BIN)/python bench/chaos.py --kills $(KILLS) --program $(PROGRAM)
	$(BIN)/python bench/points.py --program $(PROGRAM)

bench-compile: $(VENV)/ready
	$(BIN)/python bench/compile.py

# Predicted against measured on 1 to 4 ranks, about 5 minutes.
bench-memory: $(VENV)/ready
	$(BIN)/python bench/memory.py

# The same of Megatron and vLLM, about 5 minutes.
bench-memory-engines: $(VENV_ENGINES)/ready
	$(VENV_ENGINES)/bin/python bench/memory.py --engines "megatron vllm"

bench-planner: $(VENV)/ready
	$(BIN)/python bench/planner.py

bench-phases: $(VENV)/ready
	$(BIN)/python bench/phases.py

# Seconds, predicted against measured; measures this machine first. About 16 minutes.
bench-seconds: $(VENV)/ready
	$(BIN)/python bench/seconds.py

bench-simulate: $(VENV)/ready
	$(BIN)/python bench/simulate.py

$(VENV_TRL)/ready: constraints/trl.txt
	$(PYTHON) -m venv $(VENV_TRL)
	$(VENV_TRL)/bin/pip install --quiet --constraint constraints/trl.txt torch
	$(VENV_TRL)/bin/pip install --quiet --constraint constraints/trl.txt trl
	touch $@

# LOAD=2: with so many busy processes beside.
bench-trl: $(VENV)/ready $(VENV_TRL)/ready
	$(BIN)/python bench/trl.py --load $(LOAD)

bench-trl-curves: $(VENV)/ready $(VENV_TRL)/ready
	$(BIN)/python bench/trl.py --curves

# What no layout, dock or order changes: the same numbers but for rounding, about 10 minutes.
invariance: $(VENV)/ready
	$(BIN)/python bench/invariance.py

# Random programs, compiled and run dry in random orders: none waits for nothing. 5,000 take about 15 minutes.
dry: $(VENV)/ready
	$(BIN)/python bench/dry.py --programs $(PROGRAMS) --seed $(SEED)

# Every program of tests/programs, two iterations of each, about 5 minutes.
programs: $(VENV)/ready
	$(BIN)/python bench/programs.py

# The figures of the MindSpeed RL paper beside the planner's, some minutes.
paper: $(VENV)/ready
	$(BIN)/python bench/paper.py

$(VENV_VERL)/ready: constraints/verl.txt
	$(PYTHON) -m venv $(VENV_VERL)
	$(VENV_VERL)/bin/pip install --quiet --constraint constraints/verl.txt torch
	$(VENV_VERL)/bin/pip install --quiet --no-deps --requirement constraints/verl.txt
	touch $@

# What trl and verl compute, to which tests/test_peers.py holds the mathematics; the same numbers each time, but for rounding.
peer-values: $(VENV_TRL)/ready $(VENV_VERL)/ready
	$(VENV_TRL)/bin/python tests/peers/from_trl.py
	$(VENV_VERL)/bin/python -W ignore tests/peers/from_verl.py

# Pages that are written from sources.
docs: $(VENV)/ready
	$(BIN)/python -m msrl_graph.codes > docs/codes.md
	$(BIN)/python -m msrl_graph.reference > docs/language.md

clean:
	rm -rf $(VENV) $(VENV_TRL) $(VENV_VERL) $(VENV_ENGINES)
