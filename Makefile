# make demo        the main job on the embedded server: needs Python 3.11 or newer and nothing else
# make demo-real   the main job on a real server, llama.cpp's, with a small model of random weights: needs 40 MB more
# make test        lint, types, import contracts and the test suite, but for what the stages below are for
# make gate        what must pass before a change lands (.ci/run): make test, make test-python, and an eighth of each slow
#                  stage below by the commit's hash; SAMPLE=N names the eighth, also of one stage: make test-runs SAMPLE=3
# make test-all    everything, stage by stage, each at most 20 minutes
# make test-faults  a server that misbehaves in every way, bad command lines as processes, kills at random times
# make test-runs   whole runs and sweeps with stand-ins, also stopped
# make test-llamacpp  real runs on llama.cpp's own server, out of a Python package: a minute
# make test-vllm   the same against a real vLLM for the CPU (installs it into .venv-vllm: 3.4 GB, some minutes)
# make test-train  training_probe's real engines on the CPU (installs them into .venv-train: 2.5 GB, some minutes)
# make test-docker  the Docker launcher and the client's image in a real engine (installs and starts one on Debian when
#                  none answers; the image, also of Debian, takes 2 GB)
# make test-vllm-docker  the Docker launcher and a compose file with that vLLM in an image of its own (Debian: 4 GB more)
# make test-prometheus  dashboards and rules asked of a real Prometheus (unpacks Debian's package when none is there)
# make test-cluster  a real Ray cluster of three network namespaces (Linux, root; installs Ray into .venv-cluster: 0.8 GB)
# make test-browser  pages in a real Chromium (installs Debian's where there is none, and unpacks axe-core into build/)
# make test-clients  other people's clients ask the embedded server, through nginx, LiteLLM and routers too (installs them into
#                  .venv-clients: 0.9 GB), and a Dynamo whose engines are mocks (.venv-dynamo: 0.5 GB)
# make test-peers  vllm bench serve, aiperf and guidellm measure the embedded server (installs them into .venv-peers: 6 GB)
# make fuzz        a coverage-guided fuzzer (atheris) over all that reads foreign bytes, SECONDS=60 of CPU for each reader
#                  -> tests/fuzz/results.jsonl, where parts add up
# make audit       known vulnerabilities (pip-audit) and licences of what llm-dissect stands on
# make docs        the site of the documents -> build/site, every link checked (installs mkdocs into .venv-docs)
# make bench       what clients cost, ours beside others' (installs them into .venv-peers) -> docs/lab/client_overhead.md;
#                  what a trace costs beside fixed lengths -> docs/lab/trace_overhead.md
# make figures     the pictures of the documents, drawn again from results/ (some minutes; pages of runs in a Chromium)
# make compose     writes compose/*.yaml, for a machine without GPUs and models of its own, and the dashboards anew
# make up          Prometheus and Grafana in Docker, on 127.0.0.1 (Linux); make down stops them
# make test-python  lint and each command once on a second Python (SECOND=3.13), which lies beside the first
# make test-bounds  the test suite on the lowest and on the newest releases that pyproject.toml allows
# make dist        the sdist and the wheel -> dist/
# make lock        renews what all of this installs (requirements-dev.txt), and says what changed
PYTHON ?= python3
SECOND := 3.13
SECONDS := 60
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check
INSTALL_FAILED = { echo "make: pip could not install this, for the reason above; it needs a network, and files for this platform." >&2; exit 1; }
COMPOSE = $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose) -p llm-dissect -f compose/docker-compose.yml
DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)

SAMPLED := $(if $(SAMPLE),--sample $(SAMPLE))
SLOW := test-faults test-runs test-llamacpp test-train test-docker test-prometheus test-browser test-cluster test-clients test-vllm test-vllm-docker test-peers

.PHONY: demo demo-real test lint unit smoke test-python test-bounds gate test-all test-faults test-runs test-llamacpp test-train test-vllm test-docker test-vllm-docker test-prometheus test-cluster test-browser test-clients test-peers fuzz audit docs bench figures dist lock compose up down clean

demo: $(VENV)/installed
	$(BIN)/loadgen run --out $(DEMO)

demo-real: $(VENV)/installed-llamacpp
	$(BIN)/loadgen run --launch process --backend llamacpp --model benchmarks/models/llama-34m --dummy-weights \
	    --concurrency 4 --requests 100 --input-tokens 128 --output-tokens 64 --max-model-len 512 --out $(DEMO)

test: lint unit

# What the second Python must do in minutes: lint, import everything, run each command once.
test-python:
	python=$$(.ci/python $(SECOND)) && $(MAKE) VENV=.venv-$(SECOND) PYTHON="$$python" lint smoke

smoke: $(VENV)/installed-dev
	$(BIN)/python -m pytest tests/test_every_command.py tests/test_house.py tests/loadgen/test_option_types.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m 'not processes and not prometheus and not cluster and not browser and not llamacpp and not clients and not peers' --numprocesses auto --dist loadfile

gate:
	.ci/run

test-all: test audit $(SLOW)

# A file whose tests share one costly fixture goes to a core at once (tests/conftest.py).
IN_FAULTS := tests/bad_commands tests/faults tests/kills
test-faults: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m processes $(SAMPLED) --numprocesses auto --dist loadgroup $(IN_FAULTS)

test-runs: $(VENV)/installed-dev
	benchmarks/proxies.sh
	$(BIN)/python -m pytest -m processes $(SAMPLED) --numprocesses auto --dist loadgroup $(addprefix --ignore=,$(IN_FAULTS))

# As many tests at a time as there are cores, each with one thread.
test-train:
	PYTHON="$(PYTHON)" tests/training_probe/engines/install.sh
	OMP_NUM_THREADS=1 .venv-train/bin/python -m pytest $(SAMPLED) --numprocesses auto --dist loadgroup tests/training_probe/engines

test-llamacpp: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m llamacpp tests/llamacpp

test-vllm: $(VENV)/installed-dev
	tests/vllm/install.sh
	$(BIN)/python -m pytest -m vllm -s $(SAMPLED) tests/vllm

test-docker: $(VENV)/installed-dev
	tests/docker/engine.sh
	$(BIN)/python -m pytest -m docker -rs $(SAMPLED) tests/docker

test-vllm-docker: $(VENV)/installed-dev
	tests/docker/engine.sh
	tests/vllm/install.sh
	$(BIN)/python -m pytest -m vllm_docker $(SAMPLED) tests/docker

test-prometheus: $(VENV)/installed-dev
	tests/observability/prometheus.sh
	$(BIN)/python -m pytest -m prometheus tests/observability

test-cluster:
	PYTHON="$(PYTHON)" tests/cluster/install.sh
	.venv-cluster/bin/python -m pytest -m cluster -rs $(SAMPLED) tests/cluster

test-browser: $(VENV)/installed-dev
	tests/browser/install.sh
	$(BIN)/python -m pytest -m browser $(SAMPLED) tests/browser

test-clients: $(VENV)/installed-dev
	PYTHON="$(PYTHON)" tests/clients/install.sh
	$(BIN)/python -m pytest -m clients tests/clients

test-peers: $(VENV)/installed-dev
	PYTHON="$(PYTHON)" benchmarks/peers.sh
	$(BIN)/python -m pytest -m peers $(SAMPLED) tests/clients

fuzz: $(VENV)/installed-dev
	$(PIP) install atheris==3.0.0
	$(BIN)/python -m tests.fuzz.run $(SECONDS)

audit: $(VENV)/installed-dev
	PYTHON="$(PYTHON)" .ci/audit

docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

bench: $(VENV)/installed-dev
	benchmarks/peers.sh
	$(BIN)/python benchmarks/client_overhead.py
	$(BIN)/python benchmarks/trace_overhead.py

figures: $(VENV)/installed-dev
	$(BIN)/python benchmarks/figures.py
	tests/browser/install.sh
	$(BIN)/python -m tests.browser.pictures

compose: $(VENV)/installed-dev
	for name in vllm lightllm tgi; do \
	    env -i HOME=/nonexistent CUDA_VISIBLE_DEVICES= \
	        $(BIN)/loadgen compose --backend $$name --model 7b --tp 1 >compose/$$name.yaml || exit 1; \
	done
	$(BIN)/python compose/dashboards

up:
	$(COMPOSE) up --detach
	@echo "Grafana: http://127.0.0.1:3000   Prometheus: http://127.0.0.1:9090   What they show: $(BIN)/loadgen export --runs runs"

down:
	$(COMPOSE) --profile gpu down

# uv alone can ask for the lowest releases.
test-bounds: $(VENV)/installed-dev
	set -e; for bound in lowest-direct highest; do \
	    $(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-$$bound; \
	    $(BIN)/uv pip install --quiet --python .venv-$$bound/bin/python --resolution $$bound --editable '.[dev]'; \
	    touch .venv-$$bound/installed-dev; \
	    $(MAKE) VENV=.venv-$$bound unit; \
	done

dist: $(VENV)/installed-dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist

lock: $(VENV)/installed-dev
	.ci/lock

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "llm-dissect needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	"$(PYTHON)" -m venv $(VENV)

# As users install it, within the bounds of pyproject.toml.
$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(PIP) install --editable . || $(INSTALL_FAILED)
	touch $@

$(VENV)/installed-llamacpp: pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[llamacpp]' || $(INSTALL_FAILED)
	touch $@ $(VENV)/installed

$(VENV)/installed-dev: pyproject.toml requirements-dev.txt | $(BIN)/python
	$(PIP) install --require-hashes --requirement requirements-dev.txt || $(INSTALL_FAILED)
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $@ $(VENV)/installed

.venv-docs/installed: .ci/site/requirements.txt
	"$(PYTHON)" -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $<
	touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
