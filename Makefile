# One word a job. Needs make and Python 3.11 or newer; all else goes into .venv.

PYTHON ?= python3
URL ?= http://127.0.0.1:8000
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCHES := $(filter-out benchmarks/report.py benchmarks/_% benchmarks/vllm_%,$(wildcard benchmarks/*.py))
UNIT := --ignore=tests/vllm --ignore=tests/browser -n auto --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-slow test-browser test-vllm bench bench-vllm load clean

help: ## list these words
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## .venv with all that product and tests need

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("kvroute needs Python 3.11 or newer, and " \
	  "$(PYTHON) is %d.%d. Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV): a minute, or some where the network is slow"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,load]'
	@touch $@

demo: $(READY) ## a router before four simulated replicas, with traffic, and the hit rate it reaches
	$(BIN)/kvroute demo

check: $(READY) ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check ## check, then the unit tests in parallel
	$(BIN)/pytest $(UNIT) -m "not slow"

test-slow: $(READY) ## the tests that take longer than unit tests may
	$(BIN)/pytest $(UNIT) -m slow

test-browser: $(READY) ## the router's page in a real browser (installs Chromium first where there is none)
	tests/browser/setup.sh
	$(BIN)/pytest tests/browser

test-vllm: $(READY) ## kvroute before two real vLLM engines on the CPU (installs them first: 3 GB, once)
	tests/vllm/setup.sh
	$(BIN)/pytest tests/vllm

bench: $(READY) ## every benchmark against its bars; FULL=1 takes longer; PAGE=docs/performance.md keeps the figures
	$(BIN)/python benchmarks/_page.py $(if $(FULL),--full) $(if $(PAGE),--page $(PAGE)) $(BENCHES)

bench-vllm: $(READY) ## agents on two real engines, more of them than fit, under several policies; FULL=1 takes two hours
	tests/vllm/setup.sh
	$(BIN)/python benchmarks/vllm_thrash.py $(if $(FULL),,--quick)

load: $(READY) ## Locust against URL=http://host:port
	$(BIN)/locust -f loadtests/locustfile.py --headless --only-summary -u 20 -r 10 -t 30s --host $(URL)

clean: ## remove all that was installed and cached here
	rm -rf $(VENV) .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist run *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
