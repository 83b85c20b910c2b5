# `make help` lists the targets. ARGS goes to the command of the target: make test ARGS="-k placement -x"
# PYTHON picks the interpreter for a new .venv: make setup PYTHON=python3.12

BIN := .venv/bin
ARGS ?=
BASE ?=
ROWS ?=
DATA ?= fashion-mnist
FRAMEWORKS ?= tensorflow jax mixed
PYTEST := $(BIN)/python -m pytest -q
PROOF := $(BIN)/python -m pytest -v -rP --timeout=1800 --durations=30 --hypothesis-profile=proof
# So many tests at a time: most of them wait, for processes that start or for deadlines.
JOBS ?= 4

# Bytecode is kept, whatever the machine is set to: tests start hundreds of processes, which would all compile the same.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup data train test check proof soak test-frameworks test-engines test-page screenshots test-serve bench bench-check lint docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: ## .venv with everything that is needed; does nothing when nothing changed
	@PYTHON="$(PYTHON)" sh tools/setup.sh

data: ## Fashion-MNIST, where it is not on this machine yet; DATA="fashion-mnist mnist" for both
	@sh tools/fetch_data.sh $(DATA)

train: setup data ## train LeNet on Fashion-MNIST: two workers, one server, three epochs
	@$(BIN)/syncline run -w 2 -s 1 examples/fashion_mnist.py --epochs 3 $(ARGS)

lint: setup ## ruff, mypy, the layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

check: lint ## lint and the quick tests: before each commit
	@$(PYTEST) -m "not slow and not proof and not soak and not engines and not clients" $(ARGS)

# Not --quiet: it hides warnings, and --strict then does not count them.
docs: setup ## the site into site/; fails where a link or an anchor leads nowhere
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test: setup data ## lint, the site and all tests
	@$(MAKE) --no-print-directory -j 2 lint docs
	@$(PYTEST) -n $(JOBS) --dist worksteal $(ARGS)

# Processes that tests fork are taken apart at their end, as interpreters are; in `make test` they end at once.
proof: export TESTS_END_WHOLLY := 1
proof: setup data ## accuracy, slow faults, many seeds: before a capability is called done; figures at its end
	@well=true; \
	$(PROOF) -m "(proof or hypothesis) and not alone and not soak" -n $(JOBS) --dist worksteal $(ARGS) || [ $$? -eq 5 ] || well=false; \
	$(PROOF) -m "proof and alone" $(ARGS) || [ $$? -eq 5 ] || well=false; $$well

soak: setup data ## an hour and more
	@$(PYTEST) -m soak --timeout=14400 -s $(ARGS)

test-frameworks: data ## Keras, TensorFlow, JAX and mixed jobs, each in an environment of its own: FRAMEWORKS="jax mixed"
	@PYTHON="$(PYTHON)" sh tools/test_frameworks.sh "$(FRAMEWORKS)" $(ARGS)

test-engines: setup ## jobs on Open MPI, MPICH, torchrun, Slurm and Ray, manifests for Kubernetes; as root on Debian it installs what is missing
	@sh tools/test_engines.sh $(ARGS)

test-page: setup ## the web page in a real browser, a real Prometheus and a real terminal; as root on Debian it installs what is missing
	@sh tools/test_page.sh $(ARGS)

screenshots: setup ## the pictures of the page in docs/images, from a real job in a real browser
	@sh tools/test_page.sh --screenshots

test-serve: setup ## all of serving, with the real clients of its protocol, which it installs
	@sh tools/test_serve.sh $(ARGS)

bench: setup ## speed and memory, beside floors and other frameworks in the same run
	@$(BIN)/python -m benchmarks $(ARGS)

bench-check: setup ## this checkout against BASE=<commit>, in turns; fails where a row (ROWS=…) got slower
	@$(BIN)/python -m benchmarks.check $(BASE) $(foreach row,$(ROWS),--only "$(row)") $(ARGS)

clean: ## remove environments, builds and caches; runs/ stays
	rm -rf .venv .venv-tensorflow .venv-jax .venv-mixed .venv-lowest-tensorflow .venv-lowest-jax .venv-ray .venv-validators build dist site .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find src tests benchmarks examples tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
