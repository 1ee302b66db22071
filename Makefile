# What a newcomer types. Every target does all of its own set-up, and is quick when that is already done.
#
#   make demo         watch a real transformer engine prefill a long text once, then never again
#   make demo-rag     ask about a few documents in different orders: their KV is reused wherever they stand, and repaired
#   make test         the test suite, one of each class; test-all: every matrix, program and kill whole
#   make quick        tiers, connectors, state machines and the architecture: what one runs after every change
#   make coverage     the whole suite, and which lines of the product it ran, by folder
#   make test-vllm    a real vLLM over kvtier's tiers; its packages are kept in your cache directory
#   make test-dynamo  NVIDIA Dynamo's KV indexer reads our events; test-routers: vllm-router does
#   make test-ray     our application on a real Ray cluster of several nodes' processes
#   make test-compose the cluster of docker-compose.yml in real containers: killed, filled, rolled; root, Debian
#   make test-sglang  a real SGLang, likewise; test-vllm-0.33: vLLM's next release on this one's CPU kernels;
#                     test-vllm-newest: likewise, the newest that the package index has, as test-sglang-newest, -ray-,
#                     -dynamo- and -routers-newest; test-vllm-peer: what vLLM's own tests say of a connector, whole
#   make compiled     build the extension modules anew, after a change of one's source
#   make lint         ruff, the architecture test, rules of pages, figures and deployment files, whether the site builds
#   make types        strict mypy on the product, and the types of tests, benchmarks and .ci by pyrefly
#   make check        lint and types
#   make docs         the pages as a site, in site/
#   make dist         wheel and sdist, in dist/, and how to install them
#   make bench        every benchmark in its quick form
#   make gpu          on a machine with a GPU: its tests and benchmarks, in half an hour; PART=tests, sanitizer,
#                     bandwidth, decode or ttft is one of them. gpu-bundle: what such a machine without a network lacks
#   make soak         a whole node under faults for MINUTES=…; likewise kills and crash-images COUNT=…, fuzz MINUTES=…
#   make setup        only the set-up: .venv with the `kvtier` command
#
# On a GPU machine, first:  export TORCH=torch EXTRAS=cuda13,engine,docs,dev  (or cuda12)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.SILENT:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
DIST ?= dist
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvtier
TORCH ?= torch==2.13.0
EXTRAS ?= engine,docs,dev
# Tests wait, too: six workers keep two cores busy. Forks of one process, they share its imports.
WORKERS ?= $(shell echo $$(($$(nproc) * 3)))
PYTEST_ARGS ?= -n $(WORKERS) --dist worksteal --fork-workers
ENGINE_ARGS ?=
DEMO_ARGS ?=

# With bytecode kept, the second run of the tests compiles nothing: some ten seconds of each worker's CPU time.
unexport PYTHONDONTWRITEBYTECODE

# The stamp's name changes with what was asked for and with where it stands: a virtual environment can't be moved.
STAMP := $(VENV)/.kvtier-$(firstword $(shell (cat pyproject.toml hatch_build.py .ci/setup .ci/constraints.txt .ci/venv-with-torch; echo "$(CURDIR) $(VENV) $(TORCH) $(EXTRAS)") | sha256sum))

.PHONY: help setup demo demo-rag beside compiled test test-all quick coverage test-vllm test-vllm-all test-vllm-0.33 test-vllm-newest test-vllm-peer test-sglang test-sglang-newest test-dynamo test-dynamo-newest test-routers-newest test-ray-newest test-routers test-ray test-compose lint types check docs dist format bench gpu gpu-bundle \
	soak kills crash-images fuzz clean

help:
	sed -n '3,25s/^# *//p' Makefile

setup: $(STAMP)

$(STAMP):
	PYTHON="$(PYTHON)" .ci/setup "$(VENV)" "$(TORCH)" "$(EXTRAS)"
	rm -f $(VENV)/.kvtier-*
	touch $@

demo: setup
	$(VENV)/bin/kvtier demo $(DEMO_ARGS)

demo-rag: setup
	$(VENV)/bin/kvtier demo rag $(DEMO_ARGS)

# Programs that some stories start; without them those are skipped.
beside: setup
	.ci/debian-package redis-server redis-server || echo "stories that need a real Redis will be skipped" >&2
	.ci/debian-package docker-compose docker-compose || echo "a rule of docker-compose.yml will be skipped" >&2
	.ci/debian-package promtool prometheus || echo "rules of Prometheus's files will be skipped" >&2
	.ci/debian-package chromedriver chromium-driver || echo "stories of the live page will be skipped" >&2
	$(VENV)/bin/python hatch_build.py

compiled: setup
	$(VENV)/bin/python hatch_build.py

# One torch thread each: the tests run side by side. The architecture is `make lint`'s.
test: beside
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS) --ignore tests/test_architecture.py

# Every matrix, program and kill whole, what takes the network, and the extension modules under sanitizers. Engines: test-vllm-all, test-sglang, test-ray, test-dynamo.
test-all: export TEST_ALL = 1
test-all: test
	.ci/sanitize $(VENV)

quick: setup
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS) -m "not slow" \
		tests/tiers tests/connector tests/stateful tests/test_architecture.py

# Child processes are followed, too. Tests take about twice as long. A thread that starts while another installs its tracer
# dies in Python 3.11: so a test may run twice.
coverage: export COVERAGE_ROOT = $(CURDIR)
coverage: beside
	rm -f .coverage .coverage.*
	OMP_NUM_THREADS=1 $(VENV)/bin/coverage run -m pytest --reruns 1 $(PYTEST_ARGS) || failed=1
	$(VENV)/bin/coverage combine --quiet
	$(VENV)/bin/coverage json --quiet -o - | .ci/coverage-by-folder 90
	exit $${failed:-0}

# Their libraries warn of much: here a warning is no error. vLLM's stories run three at a time, SGLang's want the machine.
# test-vllm has one of each class, as `make test` does; the others run whole.
test-vllm test-vllm-0.33 test-vllm-newest: ENGINE_ARGS = -n 3 --dist worksteal
test-vllm-all test-vllm-peer test-vllm-0.33 test-vllm-newest test-sglang test-sglang-newest test-ray test-ray-newest: export TEST_ALL = 1
test-vllm-all test-vllm-peer: test-vllm
# What vLLM's own tests say of a connector: failed loads, several connectors, preemption, prefixes, a tiering manager's jobs.
test-vllm-peer: STORIES = $(addprefix tests/interop/test_vllm_,$(addsuffix .py,peer faults multi multi_kinds async scripted \
	hits partial requests lora tier_manager))
# The newest release on the package index, in place of the one that the stories were written with.
test-vllm-newest test-sglang-newest test-ray-newest: test-%: tests/interop/requirements-%.txt
test-dynamo-newest test-routers-newest: NEW = -newest
test-dynamo-newest test-routers-newest: test-%-newest: tests/interop/requirements-%-newest.txt test-%
tests/interop/requirements-vllm-newest.txt: NAMED = vllm-0.33
tests/interop/requirements-dynamo-newest.txt: PACKAGE = ai-dynamo-runtime
tests/interop/requirements-routers-newest.txt: PACKAGE = vllm-router
tests/interop/requirements-%-newest.txt: setup
	package=$(or $(PACKAGE),$*)
	newest=$$($(VENV)/bin/python -m pip index versions $$package 2>/dev/null | sed -n '1s/.*(\(.*\))/\1/p')
	test -n "$$newest"
	sed -E "1i # $$package $$newest, written by make test-$*-newest
	s/(^| )$$package(\[.*\])?==.*/\1$$package\2==$$newest/" tests/interop/requirements-$(or $(NAMED),$*).txt > $@
test-vllm test-vllm-0.33 test-vllm-newest test-sglang test-sglang-newest test-ray test-ray-newest: test-%:
	.ci/beside-engine $*
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-$*/bin/python -m pytest -W default \
		$(or $(STORIES),tests/interop/test_pins.py $(wildcard tests/interop/test_$(firstword $(subst -, ,$*))*.py)) $(ENGINE_ARGS)

test-dynamo test-routers: test-%: setup
	test -x .venv-$*/bin/python || $(VENV)/bin/python -m venv --clear .venv-$*
	.venv-$*/bin/pip install -qq --requirement tests/interop/requirements-$*$(NEW).txt
	$(VENV)/bin/python -m pytest tests/interop/test_$*.py -n 0

# An engine of its own, without a registry (.ci/container-engine). Some minutes, and some gigabytes of the cache directory.
test-compose: setup
	TORCH=$(TORCH) .ci/container-engine $(VENV)/bin/python -m pytest tests/deploy/test_containers.py -n 0

# All that a program can check without running kvtier. `python .ci/lint --list` says what the rules ask for.
lint: setup
	.ci/debian-package docker-compose docker-compose || echo "a rule of docker-compose.yml will be skipped" >&2
	.ci/debian-package promtool prometheus || echo "rules of Prometheus's files will be skipped" >&2
	.ci/in-time ruff $(VENV)/bin/ruff check .
	.ci/in-time "ruff format" $(VENV)/bin/ruff format --check .
	.ci/in-time architecture $(VENV)/bin/python -m pytest tests/test_architecture.py -q -s
	.ci/in-time rules $(VENV)/bin/python .ci/lint
	.ci/in-time "the site" $(VENV)/bin/mkdocs build --quiet

# The product by strict mypy, whose cache all checkouts share. The path is absolute: by a relative one mypy would take
# another checkout's file, of the same size and time, for this one's.
types: setup
	mkdir -p $(CACHE)
	status=0
	.ci/in-time "types of tests, benchmarks and .ci" $(VENV)/bin/pyrefly check --python-interpreter-path $(VENV)/bin/python || status=1
	.ci/in-time "types of the product" flock $(CACHE)/mypy.lock $(VENV)/bin/mypy --cache-dir $(CACHE)/mypy "$(CURDIR)/kvtier" || status=1
	exit $$status

check: lint types

docs: setup
	$(VENV)/bin/mkdocs build
	echo "open $(CURDIR)/site/index.html" >&2

# No set-up: whoever only wants the wheel needs neither torch nor the other extras.
dist:
	VENV=$(VENV) PYTHON=$(PYTHON) .ci/dist $(DIST)

# The theme names its successor at each start.
lint docs: export NO_MKDOCS_2_WARNING = 1

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: setup
	.ci/debian-package fio fio
	.ci/debian-package redis-server redis-server
	for program in benchmarks/[!_]*.py; do
		echo "== $$program"
		dry=; [[ $$program != */gpu_* ]] || nvidia-smi -L >/dev/null 2>&1 || dry=--dry
		$(VENV)/bin/python $$program --quick $$dry
	done

# No set-up: such a machine may have no network (docs/gpu.md).
gpu:
	.ci/gpu-proof $(PART)

gpu-bundle: setup
	VENV=$(VENV) .ci/gpu-bundle

# Runs at length (docs/faults.md): SEED=… repeats the choices of a run, JSON=FILE keeps its figures.
soak kills crash-images fuzz: setup
	[ $@ != soak ] || .ci/debian-package redis-server redis-server
	OMP_NUM_THREADS=1 $(VENV)/bin/python tests/endurance/$(subst -,_,$@).py $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED)) $(if $(JSON),--json $(JSON))

clean:
	rm -rf $(VENV) .venv-vllm .venv-vllm-0.33 .venv-sglang .venv-dynamo .venv-routers .venv-*-newest .venv-dist dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
