# Everything a fresh machine needs is Python 3.11 and make: each target sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
export PROMPT
PYTEST := $(BIN)/python -m pytest --durations=10

.PHONY: help venv demo check test test-e2e test-gpu proto bench-steps bench-attention bench-links bench-fabric bench-stopped-peer soak clean

help:  ## What there is.
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

venv: $(STAMP)  ## Make .venv and install pdserve into it.

$(STAMP): pyproject.toml scripts/install.py
	$(PYTHON) scripts/install.py $(VENV)
	@touch $(STAMP)

demo: $(STAMP)  ## Ask a real model, prefilled in one process and decoded in another. PROMPT="..." asks your own.
	@$(BIN)/pdserve demo $${PROMPT:+-- "$$PROMPT"}

check: $(STAMP)  ## Format, lint, types, floors, schemas, README commands, one NCCL.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy scripts benchmarks
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/python scripts/proto.py --check
	$(BIN)/python scripts/check_readme.py
	$(BIN)/python scripts/check_nccl.py

test: $(STAMP)  ## All tests but the slow ones.
	$(PYTEST) -m "not slow"

test-e2e: $(STAMP)  ## The slow end-to-end tests.
	$(PYTEST) -m slow

test-gpu: $(STAMP)  ## The tests that need a CUDA GPU, or two.
	$(PYTEST) -m gpu tests/gpu

proto: $(STAMP)  ## Generate shared/pdserve/v1 from protos/.
	$(BIN)/python scripts/proto.py

bench-steps: $(STAMP)  ## Does serving disturb the engine's steps?
	$(BIN)/python benchmarks/steps.py

bench-attention: $(STAMP)  ## Ways to attend over pages on a CPU.
	$(BIN)/python benchmarks/attention.py

bench-links: $(STAMP)  ## How fast KV moves between two workers, by frame size.
	$(BIN)/python benchmarks/fabric.py --links

bench-stopped-peer: $(STAMP)  ## Does a peer that stops or dies disturb anybody but its own tickets?
	$(BIN)/python benchmarks/stopped_peer.py

soak: $(STAMP)  ## 10,000 request lifecycles while links, engines and clients fail.
	PDSERVE_LIFECYCLES=10000 $(PYTEST) -s tests/chaos/test_lifecycles.py

bench-fabric: $(STAMP)  ## A KV link against a bare group; exposed transfer; hand-off; int8 agreement.
	$(BIN)/python benchmarks/fabric.py

clean:  ## Remove what was built; the model cache stays.
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
