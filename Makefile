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
	@$(MAKE) --keep-going lint unit packaging contract engines

.PHONY: env engine-env
env:
	@$(ENVS) contract $(RELEASE)
engine-env:
	@$(ENVS) engine $(RELEASE)

.PHONY: lint unit packaging contract engines
lint:
	@dev=$$($(ENVS) dev) && set -x && \
	$$dev -m ruff check . && $$dev -m ruff format --check . && $$dev -m mypy
unit:
	@dev=$$($(ENVS) dev) && set -x && $$dev -m pytest tests/unit
packaging:
	@dev=$$($(ENVS) dev) && set -x && $$dev -m pytest tests/packaging
contract:
	@$(PYTHON) tools/contract.py $(CONTRACT_RELEASES)
engines:
	@dev=$$($(ENVS) dev) && \
	export KVFIX_ENGINE_PYTHON_0_19_1=$$($(ENVS) engine 0.19.1) && \
	export KVFIX_ENGINE_PYTHON_0_32_0=$$($(ENVS) engine 0.32.0) && \
	set -x && $$dev -m pytest tests/engine

.PHONY: demo bench
demo bench:
	@dev=$$($(ENVS) dev) && $$dev $@/run.py

# The cached environments stay: remove $KVFIX_CACHE by hand.
.PHONY: clean
clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
