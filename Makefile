# hetkit: one command for everything. `make` alone lists the commands.
#
# Each command sets up what it needs in .venv; setting up twice costs nothing.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp

# The pins decide what is installed, whatever a person's own pip settings say; where packages come
# from is left to those settings.
PIP := env -u PIP_CONSTRAINT -u PIP_TARGET -u PIP_PREFIX -u PYTHONPATH -u PYTHONHOME \
	$(BIN)/python -m pip install --quiet --no-input --no-user --disable-pip-version-check \
	--constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo lab test check browser bench pins

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP)  ## set up .venv (PYTHON=python3.12 picks an interpreter)

# The build backend comes first, so that no isolated build environment is downloaded.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "hetkit needs Python 3.11 or newer, and '$(PYTHON)' is not." >&2; \
		echo "Name one that is: make setup PYTHON=python3.12" >&2; \
		exit 1; \
	}
	@echo "Setting up $(VENV): PyTorch is large, so the first time takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[dev,lab]'
	@touch $@

demo: setup  ## train on emulated devices, in this terminal
	$(BIN)/hetkit demo

lab: setup  ## open JupyterLab on the notebooks
	$(BIN)/jupyter lab notebooks/

# Two files at a time: most tests wait for processes. More at once would disturb what is timed.
test: check  ## check everything, then run every test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

check: setup  ## style, types, and who may import whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

browser: setup  ## run the tests that drive JupyterLab in Chromium, alone
	$(BIN)/python -m pytest -m browser tests/browser

bench: setup  ## run the benchmarks; each prints its figures beside their yardstick
	@set -e; for bench in tests/benchmarks/bench_*.py; do \
		echo "== $$bench"; $(BIN)/python "$$bench"; \
	done

pins: setup  ## write constraints.txt anew from what .venv holds
	@{ sed -n '/^#/p' constraints.txt; \
		$(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | sed 's/+[a-z0-9.]*$$//'; \
	} > constraints.txt.new
	@mv constraints.txt.new constraints.txt
