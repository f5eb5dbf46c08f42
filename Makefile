PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow check docs bench install
install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

demo: install  ## five methods on ten heterogeneous clients: a table and pictures
	$(BIN)/pfedla compare -a local,fedavg,pfedla,heurpfedla,pfedla-heldout -d digits --partition dominant --clients 10 --rounds 20

check: install  ## lint, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check  ## what must pass before a change lands
	$(BIN)/pytest -m "not slow" -n 2

test-slow: install  ## the longer tests: real data, convergence
	$(BIN)/pytest -m slow

docs: install  ## the site, into site/; every warning is an error
	$(BIN)/mkdocs build --strict

$(VENV)/bench-installed: $(VENV)/installed
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install -q --disable-pip-version-check -e '.[bench]'
	touch $@

bench: $(VENV)/bench-installed  ## how fast: a round beside a textbook loop and Flower, a run by phase; best on an idle machine
	$(BIN)/python benchmarks/bench_round.py
	$(BIN)/python benchmarks/bench_phases.py
	$(BIN)/python benchmarks/bench_choice.py
	$(BIN)/python benchmarks/bench_server.py
