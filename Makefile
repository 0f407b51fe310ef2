# Every target sets up what it needs in .venv from the pinned, hashed requirements; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
API ?= shared/topoalign/kubelet/grpc/api
# Byte code is kept, whatever the environment says: the tests start some hundred processes, and none is to compile all anew.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/byte-code

.PHONY: demo test test-faults test-gpu simulate soak check lint types imports docs bench bench-compare proto event-documents lock up down clean

$(READY): requirements/dev.txt pyproject.toml tools/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("topoalign needs Python 3.11 or later") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . --editable tools
	@touch $@

demo: $(READY)  ## the main job on a described machine, or on this one if it has an NVIDIA driver
	$(BIN)/topoalign demo

# Two more than there are cores: many tests wait for processes, and leave a core idle meanwhile.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)

test: $(READY)  ## all tests; neighbours run in one process and share what they set up
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-faults: $(READY)  ## all tests, with every step and every seed of the faults; half an hour and more
	TOPOALIGN_FAULTS=all $(BIN)/python -m pytest -n auto -o timeout=0

test-gpu: $(READY)  ## the drivers' contract on this machine's GPUs; its shape goes into the catalogue. Needs NVIDIA's driver
	$(BIN)/python -m topoalign.tools.capture
	TOPOALIGN_TEST_GPU=1 $(BIN)/python -m pytest tests/contract/test_drivers.py -k real
	$(BIN)/python -m topoalign.tools.capture shared/topoalign/machines/catalogue/captured

simulate: $(READY)  ## replays a seed of the simulation: SEED=123 [PLANT=name], or runs many: SEEDS=0:100000 [WORLDS=instances|cluster]
	PYTHONPATH=tests:tests/support $(BIN)/python -m simulation $(or $(SEED),$(SEEDS)) $(if $(PLANT),--plant $(PLANT)) $(if $(WORLDS),--worlds $(WORLDS))

soak: $(READY)  ## an hour of full load while NATS, the agent and the kubelet are killed: MINUTES=60
	PYTHONPATH=tests:tests/support $(BIN)/python tests/e2e/soak.py --minutes $(or $(MINUTES),60)

check: lint types imports docs test  ## what must pass on main

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

docs: $(READY)  ## the site in site/; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)  ## all benchmarks
	$(BIN)/topoalign bench

bench-compare: $(READY)  ## benchmarks of this tree and of BASE in turn, three rounds; NAMES for some of them
	$(BIN)/python -m topoalign.tools.bench_compare --rounds $(or $(ROUNDS),3) $(BASE) $(NAMES)

proto: $(READY)  ## generates the protocols anew from proto/
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto \
	  --python_betterproto2_out=$(API) \
	  --python_betterproto2_opt=client_generation=async --python_betterproto2_opt=server_generation=async \
	  proto/deviceplugin.proto proto/display.proto proto/podresources.proto proto/vcuda.proto

event-documents: $(READY)  ## generates docs/asyncapi.json and the tables of events.md, errors.md and metrics.md from the code
	$(BIN)/python docs/event_documents.py docs
	$(BIN)/python docs/error_documents.py docs
	$(BIN)/python docs/metric_documents.py docs

lock: $(READY)  ## pins the dependencies anew, by hash and without index lines
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	for set in "pyproject.toml requirements/tools.in --extra kubernetes -o requirements/runtime.txt" \
	           "pyproject.toml requirements/tools.in --extra kubernetes --extra local --group dev -o requirements/dev.txt" \
	           "requirements/build.in -o requirements/build.txt"; do \
	  $(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
	    --quiet $$set || exit; \
	done

up:  ## four services and NATS in containers, on a described machine
	docker compose up --build --detach

down:
	docker compose down

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
