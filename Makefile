# penstock. `make run` and `make test` set everything up by themselves; `make help` lists the rest.

# What scripts/setup.py serves, which the oldest ones cannot even read.
SERVED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c '$(SERVED)' 2>/dev/null && { echo "$$p"; break; }; done)
BIN := .venv/bin
STEP := scripts/step.sh
SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')

# rustup's directory, for shells that have not read its profile; one Python for every build of pyo3.
export PATH := $(PATH):$(or $(CARGO_HOME),$(HOME)/.cargo)/bin
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
# Also where cargo's configuration (build.target-dir) names another folder: what is built is looked for here.
export CARGO_TARGET_DIR := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
# Images of containers like to set it; then every process, each worker of Spark too, compiles anew what it imports.
unexport PYTHONDONTWRITEBYTECODE
# Where crates lie, which is in each message of a panic there; a wheel does not tell of it.
CRATES = $(or $(CARGO_HOME),$(HOME)/.cargo)/registry/src

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help setup release run test lint format test-rust test-python test-long test-real soak test-wheel fuzz wheel bench criterion clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## .venv with the pinned packages and the built package; quick when nothing changed
ifeq ($(strip $(PYTHON)),)
	@echo "setup: no Python 3.11 to 3.14 on PATH. Install one, or name it: make setup PYTHON=/path/to/python3" >&2; exit 1
else
	@$(PYTHON) -c '$(SERVED)' 2>/dev/null || { echo "setup: PYTHON=$(PYTHON) ($$($(PYTHON) --version 2>&1)) is not Python 3.11 to 3.14. Name another one: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) scripts/setup.py $(SETUP)
endif

release: SETUP = --profile release
release: setup ## setup with a fully optimised native module, as wheels have it (some ten minutes on two cores)

run: setup ## the main job: queries whose state moves, that lose a worker, grow and shrink (about a minute)
	@$(BIN)/penstock demo $(ARGS)

test: setup lint test-rust test-python test-wheel ## everything that has to pass
	@echo; echo "== all of make test passed"

lint: setup ## formatting, clippy, ruff, mypy
	@$(STEP) "rustfmt" cargo fmt --all --check
	@$(STEP) "clippy" cargo clippy --workspace --all-targets --locked -- -D warnings
	@$(STEP) "ruff check" $(BIN)/ruff check python benches tests scripts
	@$(STEP) "ruff format" $(BIN)/ruff format --check python benches tests scripts
	@$(STEP) "mypy" $(BIN)/mypy
	@$(STEP) "licences" $(BIN)/python scripts/notices.py --check

format: setup ## rewrite the sources in the project's format
	cargo fmt --all
	$(BIN)/ruff check --fix-only python benches tests scripts
	$(BIN)/ruff format python benches tests scripts

test-rust: setup ## cargo test
	@$(STEP) "cargo test" $(PYTHON) scripts/test_rust.py

test-python: setup ## pytest
	@$(STEP) "penstock-bench" sh -c 'cargo test --quiet --workspace --locked --no-run --test late && touch "$$CARGO_TARGET_DIR/debug/penstock-bench"'
	@$(STEP) "classes of Spark for tests" $(BIN)/python tests/spark_classes.py
	@$(STEP) "pytest" $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --durations=15 $(ARGS)

wheel: setup ## target/wheels/penstock-*.whl, fully optimised (some ten minutes on two cores)
	@rm -rf target/wheels
	@RUSTFLAGS="$$RUSTFLAGS --remap-path-prefix=$(CRATES)=crates" $(BIN)/maturin build --release --locked --out target/wheels
	@$(BIN)/python scripts/check_wheel.py --to-publish target/wheels/penstock-*.whl

test-long: setup ## what repeats for minutes: every test, more cases and seeds, fresh ones each time (SEED=, which it prints, for the same again)
	@$(STEP) "cargo test, more seeds" env CARGO_PROFILE_DEV_OPT_LEVEL=1 PENSTOCK_SEEDS=$${PENSTOCK_SEEDS:-3000} PENSTOCK_STATES=$${PENSTOCK_STATES:-1000000} PENSTOCK_TEST_LIMIT_S=$${PENSTOCK_TEST_LIMIT_S:-12000} PROPTEST_CASES=$${PROPTEST_CASES:-2000} PROPTEST_RNG_SEED=$(SEED) $(PYTHON) scripts/test_rust.py
	@$(STEP) "classes of Spark for tests" $(BIN)/python tests/spark_classes.py
	@$(STEP) "pytest --long, SEED=$(SEED)" env HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-fresh} $(BIN)/python -m pytest --long --hypothesis-seed=$(SEED) --durations=15 $(ARGS)

test-real: setup ## Kafka, PostgreSQL, Delta and S3, fetched and started, while processes are killed (ten minutes)
	@$(STEP) "real parts" $(BIN)/python scripts/real_parts.py
	@$(STEP) "pytest --real" target/real/env/bin/python -m pytest --real -s tests/real $(ARGS)

soak: setup ## a query for an hour while members are killed and it is rescaled every minute: nothing grows; ARGS="--minutes 15"
	@PYTHONPATH=benches/python $(BIN)/python -m penstock_bench.soak $(ARGS)

test-wheel: setup ## a wheel of what setup built, as a user gets it; `make wheel` does the same with the optimised one
	@rm -rf target/wheels-test
	@$(STEP) "wheel" $(BIN)/maturin build --quiet --profile setup --locked --out target/wheels-test
	@$(STEP) "installed wheel" $(BIN)/python scripts/check_wheel.py target/wheels-test/penstock-*.whl

fuzz: ## every decoder of bytes from outside under cargo-fuzz, a minute each; FUZZ="TARGET ..." names some, SECONDS_PER_TARGET= the time
	@CARGO_TARGET_DIR=$(CURDIR)/fuzz/target scripts/fuzz.sh $(FUZZ)

bench: release ## all benches beside their peers, into benches/results (an hour and a half; goes on where it stopped)
	@$(BIN)/penstock bench --all --record benches/results $(ARGS)

criterion: setup ## micro-benchmarks of the core against its own past (minutes)
	cargo bench -p penstock-benches --locked $(ARGS)

clean: ## forget what was built and written
	rm -rf target fuzz/target fuzz/artifacts out .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log

distclean: clean ## and the environment
	rm -rf .venv python/penstock/_native.*.so
