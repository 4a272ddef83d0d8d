PYTHON ?= $(shell command -v python3.11 || command -v python3)
WORKERS ?= 2
CONFIG ?= configs/autoregression.yaml
BIN := .venv/bin
READY := .venv/.ready
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all check bench figures clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */|/' | awk -F'|' '{printf "make %-10s %s\n", $$1, $$2}'

setup: $(READY)  ## install the package and all extras into .venv, at the tested versions

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[train,data,lab,dev,bench]'
	@touch $@

train: $(READY)  ## train a flow, test it and draw samples; another one by CONFIG=configs/NAME.yaml
	$(BIN)/python train.py fit --config $(CONFIG) $(ARGS)
	$(BIN)/python train.py test --config $(CONFIG)
	$(BIN)/python train.py sample --config $(CONFIG)

test: $(READY)  ## run the tests and doctests, without the slow ones
	$(PYTEST) $(ARGS)

test-all: $(READY)  ## run every test
	$(PYTEST) -m 'slow or not slow' $(ARGS)

check: $(READY)  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## run every benchmark
	@set -e; for file in $$(grep -l '^def main' benchmarks/*.py); do \
		echo "== $$file"; $(BIN)/python -m benchmarks.$$(basename $$file .py); done

figures: $(READY)  ## make every figure and table
	$(BIN)/python -m flowattn.experiments all

clean:  ## remove caches and build products, keep .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
