# Everything a fresh machine needs is Python 3.11 and make: each target sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
export PROMPT
PYTEST := $(BIN)/python -m pytest --durations=10
BASELINE := sdk/baseline.binpb

# Compose v2 where it is here, else docker-compose 1.29.
COMPOSE = $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.PHONY: help venv up down demo check audit test test-e2e test-gpu proto proto-baseline metrics-reference dashboards sdk sdk-toolchains bench-engine bench-peer bench-steps bench-attention bench-links bench-fabric bench-stopped-peer bench-gateway bench-simulator bench-router bench-overload chaos soak soak-memory clean

help:  ## What there is.
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

venv: $(STAMP)  ## Make .venv and install pdserve into it.

$(STAMP): pyproject.toml scripts/install.py
	$(PYTHON) scripts/install.py $(VENV)
	@touch $(STAMP)

demo: $(STAMP)  ## Ask a real model, prefilled in one process and decoded in another. PROMPT="..." asks your own.
	@$(BIN)/pdserve demo $${PROMPT:+-- "$$PROMPT"}

up:  ## Start the suite in containers and ask it something; needs Docker alone. COMPOSE_PROFILES=gpu: on GPUs.
	$(COMPOSE) up --build --detach
	@$(COMPOSE) exec -T router pdserve generate --chat --temperature 0 --max-tokens 64 -- \
		"$${PROMPT:-What is the capital of France? Answer in one sentence.}"
	@$(COMPOSE) exec -T gateway python -m pdserve.rpc.healthcheck http://127.0.0.1:8000/health --wait 60
	@echo "gRPC at $$($(COMPOSE) port router 50051), OpenAI's HTTP API and a web page at http://$$($(COMPOSE) port gateway 8000)"

down:  ## Stop what `make up` started. The model stays in its volume.
	COMPOSE_PROFILES=cpu,gpu,observability $(COMPOSE) down --remove-orphans

check: $(STAMP)  ## Format, lint, types, floors, schemas, settings, what the docs name, one NCCL, known vulnerabilities.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy scripts benchmarks sdk/plugins
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against $(BASELINE)
	$(BIN)/python scripts/proto.py --check
	$(BIN)/python scripts/api_reference.py --check
	$(BIN)/python scripts/config_reference.py --check
	$(BIN)/python scripts/metrics_reference.py --check
	$(BIN)/python scripts/dashboards.py --check
	$(BIN)/python -m scripts.check_docs
	$(BIN)/python scripts/check_nccl.py
	$(BIN)/python -m scripts.audit

audit: $(STAMP)  ## Has anything that the images install a known vulnerability? Says so where nobody can be asked.
	$(BIN)/python -m scripts.audit

test: $(STAMP)  ## All tests but the slow ones.
	$(PYTEST) -m "not slow"

test-e2e: $(STAMP)  ## The slow end-to-end tests.
	$(PYTEST) -m slow

test-gpu: $(STAMP)  ## The tests that need a CUDA GPU, or two.
	$(PYTEST) -m gpu tests/gpu

proto: $(STAMP)  ## Generate shared/pdserve/v1 and docs/api.md from protos/.
	$(BIN)/python scripts/proto.py
	$(BIN)/python scripts/api_reference.py

metrics-reference: $(STAMP)  ## Write docs/metrics.md from the services' own metrics.
	$(BIN)/python scripts/metrics_reference.py

dashboards: $(STAMP)  ## Make Grafana's dashboards of docker/grafana/dashboards.yaml.
	$(BIN)/python scripts/dashboards.py

proto-baseline: $(STAMP)  ## Promise today's public API: `make check` fails where a later one would break its clients.
	$(BIN)/buf build protos --type pdserve.v1.InferenceService --exclude-source-info --output $(BASELINE)

sdk: $(STAMP)  ## Generate clients in six languages into build/sdk; sdk/README.md shows them in use.
	$(BIN)/python scripts/sdk.py

sdk-toolchains: $(STAMP)  ## Install what `make sdk` and the examples need; as root on Debian.
	$(BIN)/python scripts/sdk.py --install

bench-peer: $(STAMP)  ## pdserve beside vLLM's CPU build on the same cores; hours, QUICK=1 less.
	$(PYTHON) scripts/peer.py build/peer
	$(BIN)/python benchmarks/peer.py --venv build/peer

bench-steps: $(STAMP)  ## Does serving disturb the engine's steps?
	$(BIN)/python benchmarks/steps.py

bench-engine: $(STAMP)  ## How near are decode steps and prefills to what a core can do? QUICK=1.
	$(BIN)/python benchmarks/engine.py

bench-attention: $(STAMP)  ## Ways to attend over pages on a CPU.
	$(BIN)/python benchmarks/attention.py

bench-links: $(STAMP)  ## How fast KV moves between two workers, by frame size.
	$(BIN)/python benchmarks/fabric.py --links

bench-stopped-peer: $(STAMP)  ## Does a peer that stops or dies disturb anybody but its own tickets?
	$(BIN)/python benchmarks/stopped_peer.py

bench-gateway: $(STAMP)  ## What of the gRPC API's tokens/s does the gateway keep?
	$(BIN)/python benchmarks/gateway.py

bench-simulator: $(STAMP)  ## How fast is the simulator, and do policies rank as published? PDSERVE_TEST_TRACES=FOLDER, QUICK=1.
	$(BIN)/python benchmarks/simulator.py

bench-router: $(STAMP)  ## What does the router cost: decisions, first tokens, gaps, relaying?
	$(BIN)/python benchmarks/router.py

bench-overload: $(STAMP)  ## What is left of the goodput at three times capacity? Shorter with QUICK=1.
	$(BIN)/python benchmarks/overload.py $(if $(QUICK),--rounds 1 --seconds 20 --probe 8)

soak-memory: $(STAMP)  ## Does memory grow in MINUTES (60) of mixed load at speed? 5 minutes with QUICK=1.
	$(BIN)/python benchmarks/memory.py $(if $(QUICK),--minutes 5 --settle 60,--minutes $(or $(MINUTES),60))

soak: $(STAMP)  ## 10,000 request lifecycles while links, engines and clients fail; as many simulated fleets; 100,000 fuzzed messages.
	PDSERVE_SIM_SEEDS=10000 $(PYTEST) tests/sim
	PDSERVE_LIFECYCLES=10000 $(PYTEST) -s tests/chaos/test_lifecycles.py
	PDSERVE_FUZZ=100000 $(PYTEST) -s -m slow tests/chaos/test_fuzz.py

chaos: $(STAMP)  ## Ten minutes of killed, stopped and terminated processes under load; 90 seconds with QUICK=1.
	$(BIN)/python benchmarks/chaos.py $(if $(QUICK),--seconds 90)

bench-fabric: $(STAMP)  ## A KV link against a bare group; exposed transfer; hand-off; int8 agreement.
	$(BIN)/python benchmarks/fabric.py

clean:  ## Remove what was built; the model cache stays.
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
