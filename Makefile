# Needs Python >= 3.11 with pip and venv. Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS := torch,tokenizers,notebooks,test,dev

# More words for pytest, as in: make test PYTEST_ARGS="-n 2 -k planner"
PYTEST_ARGS ?=
PYTEST := $(BIN)/python -m pytest
# Folders of tests/ that have targets of their own.
SLOW := faults programs endurance

.DEFAULT_GOAL := help
.PHONY: help demo test programs growth test-wheel check examples faults soak bench bench-quick notebooks format clean $(VENV)

help:
	@sed -n 's/^\([a-z][a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

$(VENV): $(INSTALLED)

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

demo: $(INSTALLED) ## train a small model on a local cluster, end to end
	$(BIN)/python -m megadask demo

# Two files at a time: many tests wait for processes more than they compute.
test: $(INSTALLED) ## run the tests and notebooks; `make programs` and `make faults` have the slow ones
	$(PYTEST) -n 2 --dist loadfile --nbmake tests $(wildcard notebooks) $(SLOW:%=--ignore=tests/%) $(PYTEST_ARGS)

test-wheel: $(INSTALLED) ## run the tests against the built wheel, outside the checkout
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w build/wheel .
	$(BIN)/python -m pip install --quiet --no-deps --target build/site build/wheel/*.whl
	mkdir build/run && cp -r tests setup.cfg build/run
	rm -r build/run/tests/endurance build/run/tests/programs/test_install.py
	rm $(addprefix build/run/tests/test_,architecture.py benchmarks.py throughput.py)
	cd build/run && PYTHONPATH=$(CURDIR)/build/site $(CURDIR)/$(PYTEST) $(PYTEST_ARGS)

check: $(INSTALLED) ## lint, format, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p megadask
	$(PYTEST) -q tests/test_architecture.py

examples: $(INSTALLED) ## train the examples: on photographs, and as a SLURM job would
	$(BIN)/python examples/vlm/train.py
	$(BIN)/python examples/slurm/train.py

programs: $(INSTALLED) ## run the tests of whole programs: installing, the demo, the example, verify-resume
	$(PYTEST) tests/programs $(PYTEST_ARGS)

faults: $(INSTALLED) ## run the tests that kill and stop processes
	$(PYTEST) tests/faults $(PYTEST_ARGS)

growth: $(INSTALLED) ## weigh all processes at two points of 10,000 steps
	$(PYTEST) tests/endurance $(PYTEST_ARGS)

# MINUTES=10 unless told otherwise; SEED=7 repeats a schedule.
soak: $(INSTALLED) ## train under random faults: make soak MINUTES=10
	$(BIN)/python benchmarks/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

bench: $(INSTALLED) ## run every benchmark; reports go to benchmarks/reports
	set -e; for file in benchmarks/bench_*.py; do $(BIN)/python $$file; done

bench-quick: $(INSTALLED) ## run every benchmark at small sizes; reports go to build/bench
	set -e; for file in benchmarks/bench_*.py; do timeout 120 $(BIN)/python $$file --quick; done

notebooks: $(INSTALLED) ## execute every notebook
	$(PYTEST) --nbmake notebooks $(PYTEST_ARGS)

format: $(INSTALLED) ## rewrite imports and layout
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
