# `make env RELEASE=0.19.1` and `make engine-env RELEASE=0.19.1` print, as their last line, a Python interpreter
# (from another folder: make -s -C FOLDER env).
# Everything is set up on first use and cached in $KVFIX_CACHE (default ~/.cache/vllm-kvfix); see tools/envs.py.
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := test
.NOTPARALLEL:

PYTHON := $(or $(shell command -v python3.11),$(shell command -v python3),python3.11)
ENVS := $(PYTHON) tools/envs.py
RELEASE ?= 0.19.1
CONTRACT_RELEASES ?= 0.11.0 0.13.0 0.14.0 0.17.1 0.18.1 0.19.1 0.20.0 0.23.0 0.24.0 0.26.0 0.27.0 0.29.0 0.30.0 0.32.0 0.33.0

# The tests of a part are run to the end even if another part fails.
.PHONY: test
test:
	@$(MAKE) --keep-going lint unit packaging contract support engine

.PHONY: env engine-env
env:
	@$(ENVS) contract $(RELEASE)
engine-env:
	@$(ENVS) engine $(RELEASE)

.PHONY: lint unit packaging contract support engine
lint:
	@dev=$$($(ENVS) dev) && set -x && \
	$$dev -m ruff check . && $$dev -m ruff format --check . && $$dev -m mypy
unit:
	@dev=$$($(ENVS) dev) && set -x && $$dev -m pytest tests/unit
packaging:
	@dev=$$($(ENVS) dev) && set -x && $$dev -m pytest tests/packaging
contract:
	@$(PYTHON) tools/contract.py $(CONTRACT_RELEASES)
# The support table against the releases whose tests `contract` doesn't run.
support:
	@$(PYTHON) tools/contract.py --support-of-all-but $(CONTRACT_RELEASES)
# Every release, or RELEASE if it is given: all contract tests, then the table.
.PHONY: matrix
matrix:
	@$(PYTHON) tools/contract.py --write $(if $(filter command,$(origin RELEASE)),$(RELEASE))
engine:
	@dev=$$($(ENVS) dev) && $(ENVS) engine 0.19.1 >/dev/null && $(ENVS) engine 0.32.0 >/dev/null && \
	set -x && $$dev -m pytest tests/engine -k "0.19.1 or 0.32.0"
# Every release that starts engines on a CPU, or RELEASE if it is given; again only where the code changed.
.PHONY: engines
engines:
	@$(PYTHON) tools/sweep.py $(if $(filter command,$(origin RELEASE)),$(RELEASE))

.PHONY: demo bench
demo bench:
	@dev=$$($(ENVS) dev) && $$dev $@/run.py

# The cached environments stay: remove $KVFIX_CACHE by hand.
.PHONY: clean
clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
