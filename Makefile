# Both targets make .venv, install into it, and run. TORCH names the build to install first.
TORCH ?= torch==2.13.0
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test clean

demo: .venv/installed
	$(BIN)/kevolve demo

test: .venv/installed
	PYTHON=$(BIN)/python scripts/check

.venv/installed: setup.py pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[test,check]"
	touch $@

clean:
	rm -rf .venv build
