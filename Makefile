# Every target makes its own environment in .venv; constraints.txt holds the versions tested.
PYTHON ?= python3
BIN := .venv/bin
# -t online: links to the documentation of other projects, whose inventories come by network.
SPHINXOPTS ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo lint test gpu bench docs notebooks clean

.venv/base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

.venv/%: pyproject.toml constraints.txt .venv/base
	$(PIP) -e '.[$*]'
	touch $@

demo: .venv/base
	$(BIN)/python -m tutorials.digits

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

gpu: .venv/test
	$(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "expected a GPU, got none"'
	$(BIN)/python -m pytest tests/test_devices.py

bench: .venv/bench
	$(BIN)/python -m benchmarks --list
	$(BIN)/python -m benchmarks oilflow --quick

docs: .venv/docs
	$(BIN)/sphinx-build -W --keep-going -b html $(SPHINXOPTS) docs docs/_build/html

notebooks: .venv/notebooks
	$(BIN)/sphinx-build -W --keep-going -b html -D run_notebooks=1 $(SPHINXOPTS) docs docs/_build/html

clean:
	rm -rf .venv out docs/_build
