# make train    train a language model whose state is four times the (simulated) device memory; ARGS="--steps 20 ..." is passed on
# make test     everything CI checks: lint, format, types, tests; PYTEST_ARGS="-k cli" is passed on
# make lint     without the tests
# make format   rewrite the sources in the project's format
#
# Each makes its own virtual environment first. VENV= puts it elsewhere, PYTHON= makes it with another Python,
# TORCH= installs another torch (the default is the version that CI tests; with a GPU take the build for your CUDA).

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell grep "^torch==" constraints.txt)
ARGS ?=
PYTEST_ARGS ?=
# Two cores, two workers with one thread each: intra-operator threads gain little on the small models of the tests.
WORKERS ?= 2

BIN := $(VENV)/bin

.DELETE_ON_ERROR:
.PHONY: train test lint format clean

train: $(VENV)/.train
	$(BIN)/pager train $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: $(VENV)/.develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy pager tests

format: $(VENV)/.develop
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch first and by itself: the second command then keeps the build that is there instead of choosing one.
$(VENV)/.train: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[plot]"
	touch $@

$(VENV)/.develop: $(VENV)/.train
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,plot]"
	touch $@
