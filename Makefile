# Two commands do all set-up: `make serve` and `make test`. Both make the environment in .venv when
# it is not there, and change it only when pyproject.toml has changed.
#
#   make serve ARGS="--port 9000"     any option of scripts/serve_local.py
#   make test ARGS="tests/core -x"    any option of pytest
#   make test PYTHON=python3.12       another interpreter (an environment of another version is remade)
#   make test VENV=.venv-other        another environment
#   CUDA=0 make serve                 no CUDA wheels, though there is an NVIDIA GPU

SHELL := /bin/bash
MAKEFLAGS += --no-print-directory
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help serve test test-slow gpu-check lint format bench train fetch env-server env-dev clean

VENV ?= .venv
PYTHON ?=
MODEL ?= smollm2-135m
ARGS ?=
# A process for each core, at most four (each takes up to 3 GB); a file stays in one. In the order
# of the folders, which ends with files that take little: else one process would wait for the other.
SPREAD ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
PY := $(VENV)/bin/python

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

serve: env-server fetch ## serve the default model (or MODEL=) on an OpenAI-compatible address
	@exec $(PY) scripts/serve_local.py --model $(MODEL) $(ARGS)

test: env-dev try-fetch ## run the tests but the slow ones
	@$(PY) -m pytest $(SPREAD) $(ARGS)

test-slow: env-dev try-fetch ## run the slow tests
	@$(PY) -m pytest $(SPREAD) -m slow $(ARGS)

gpu-check: ## compile the GPU kernels for four chips, without a GPU, and judge them
	@PYTHON='$(PYTHON)' CUDA=0 scripts/environment.sh '$(VENV)-gpu' gpu-check
	@$(VENV)-gpu/bin/python scripts/check_gpu_kernels.py $(ARGS)

lint: env-dev ## check style and formatting
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: env-dev ## put style and formatting right
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

bench: env-server fetch ## the four workloads on the real model, float32 and bfloat16
	@$(PY) scripts/bench_offline.py $(ARGS)

train: env-dev ## train a tiny model in about two minutes (runs/tiny)
	@$(PY) scripts/train_tiny.py $(ARGS)

fetch: env-server ## fetch the default model (or MODEL=) and check its checksum
	@$(PY) -c 'import sys; from pagedjax.models import presets; print(presets.resolve_model(sys.argv[1]))' '$(MODEL)'

# Without a network the tests that need the real model are skipped, and say so.
.PHONY: try-fetch
try-fetch: env-dev
	@$(PY) -c 'from pagedjax.models import presets; presets.resolve_model("smollm2-135m")' \
	  || echo 'The real model could not be fetched; tests that need it will be skipped.' >&2

env-server:
	@PYTHON='$(PYTHON)' scripts/environment.sh '$(VENV)' server

env-dev:
	@PYTHON='$(PYTHON)' scripts/environment.sh '$(VENV)' dev

clean: ## remove the environment and caches (fetched models stay)
	@rm -rf '$(VENV)' .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
