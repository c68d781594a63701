# `make demo` and `make test` are all one needs: each makes .venv first, once.
# Python 3.11 or newer and pip must be there. Another interpreter: make test PYTHON=/path/to/python3.12

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach name,python3 python3.11 python3.12 python3.13,\
	$(if $(shell $(name) -c '$(NEW_ENOUGH)' 2>/dev/null && echo yes),$(name))))
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: demo test test-deploy check install dist docs

demo: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/fedpara run quickstart

# One thread: the demo's layers are too small for two. In the tests, the workers' threads fight over the cores.
test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal -m 'not deploy'

# Federations of real processes on loopback: a few minutes, most of it waiting for one thing at a time.
test-deploy: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m deploy

check: $(READY)
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/mypy --no-error-summary
	@echo $(BIN)/lint-imports; found=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$found"; exit 1; }

install: $(READY)

# The wheel and the sdist, without network; tests/test_dist.py checks what they contain.
dist: $(READY)
	$(BIN)/hatchling build -d dist

# The site, in site/. The first line runs the tutorials and draws their pictures again.
docs: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python docs/hooks/pictures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# torch first and by its exact version: a looser request may fetch gigabytes of CUDA packages.
$(READY): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo 'fedpara needs Python 3.11 or newer and found none. Name one: make PYTHON=/path/to/python3.11'; exit 2; }
	@$(PYTHON) -c '$(NEW_ENOUGH)' || { echo "fedpara needs Python 3.11 or newer: $(PYTHON) is $$($(PYTHON) --version 2>&1)."; exit 2; }
	@echo 'Installing into $(VENV): a few minutes, once.'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==2.13.0
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@
