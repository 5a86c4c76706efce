# Two commands do everything: `make demo` runs the main job, `make test` runs the checks.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
GPU_EXTRA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda12,)

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	$(BIN)/jzero train configs/gpt2_demo.toml

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(GPU_EXTRA)plot]'
	touch $@

$(VENV)/.test: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(GPU_EXTRA)test]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build *.egg-info
