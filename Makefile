# Each target makes the virtual environment if it is missing; a change of pyproject.toml renews it. ARGS goes to
# the command: make quickstart ARGS="--seeds 3", make test ARGS="tests/method -x".
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# uv installs where it is there: with a cache it takes seconds. It does not read pip's settings (mirrors, constraints);
# make quickstart UV= takes pip.
UV ?= $(shell command -v uv 2>/dev/null)
# pip would compile all modules of all packages, most of which no command imports. Python compiles a module when
# it is first imported, and keeps the result only while this variable is empty.
export PYTHONDONTWRITEBYTECODE =
PIP = $(BIN)/python -m pip install --no-compile
INSTALL = $(if $(UV),$(UV) pip install --python $(BIN)/python,$(PIP)) --editable
SAY = echo "installing into $(VENV) by $(if $(UV),uv,pip): torch with its CUDA libraries takes about 6 GB on Linux, and minutes"

# What was installed into an environment that is gone, or whose Python is, is not there any more.
GONE := $(shell test -x $(VENV)/bin/python || rm -f $(VENV)/.ready $(VENV)/.ready-test $(VENV)/.ready-dev)

.PHONY: quickstart test soak docs check wheel-check clean

quickstart: $(VENV)/.ready
	$(BIN)/hddm quickstart $(ARGS)

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

soak: $(VENV)/.ready-test
	$(BIN)/python -m tests.soak $(ARGS)

docs: $(VENV)/.ready-dev
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html

check: $(VENV)/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(MAKE) docs VENV=$(VENV)
	$(MAKE) test VENV=$(VENV) ARGS="-m 'not slow and not gpu'"

wheel-check: $(VENV)/.ready-test
	sh tests/wheel.sh $(abspath $(BIN)/python)

clean:
	rm -rf docs/_build $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(VENV)/.ready: pyproject.toml | $(VENV)/bin/python
	@$(SAY)
	$(INSTALL) '.[train]'
	touch $@

$(VENV)/.ready-test: pyproject.toml | $(VENV)/bin/python
	@$(SAY)
	$(INSTALL) '.[test]'
	touch $@ $(VENV)/.ready

$(VENV)/.ready-dev: pyproject.toml | $(VENV)/bin/python
	@$(SAY)
	$(INSTALL) '.[dev]'
	touch $@ $(VENV)/.ready $(VENV)/.ready-test

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hddm needs Python 3.11 or newer: make quickstart PYTHON=python3.12")'
	$(if $(UV),$(UV) venv --quiet --seed --allow-existing --python $(PYTHON),$(PYTHON) -m venv) $(VENV) || { rm -rf $(VENV); exit 1; }
