# torch-quartz: make demo | test | build | examples | conformance | sanitize | bench | format | lint | clean
#
# Without PYTHON, everything happens in .venv, which is made on first use. With PYTHON=python3 (any interpreter that has
# torch), that environment is used as it is: nothing is installed or downloaded, and the package is built in place.

VENV ?= .venv
PYTHON ?=
TORCH ?= torch==$(if $(wildcard /proc/driver/nvidia/version /dev/nvidiactl),2.14.1,2.13.0)
JOBS ?= $(shell nproc)
TESTS ?= tests

ifeq ($(PYTHON),)
PY := $(abspath $(VENV))/bin/python
READY := $(VENV)/.ready-$(subst =,-,$(TORCH))
INSTALLED := $(VENV)/.installed
else
PY := $(PYTHON)
READY :=
INSTALLED :=
export PYTHONPATH := $(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))
export GTEST_OPTIONAL := 1
endif
export PATH := $(abspath $(VENV))/bin:$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)

CPP_FILES = $(shell git ls-files --cached --others --exclude-standard '*.h' '*.cpp' '*.cu' '*.cuh')

.PHONY: demo test build env pytest gtest examples conformance sanitize bench format lint clean

demo: build
	$(PY) examples/03_transformers.py
	$(PY) examples/04_offline.py

test: pytest gtest

# The tests that need a second device run on the host substrate, which can have any number of them. There may be none in
# TESTS: status 5 of pytest.
pytest: build
	$(PY) -m pytest $(TESTS)
	TORCH_QUARTZ_SUBSTRATE=host TORCH_QUARTZ_HOST_DEVICES=2 $(PY) -m pytest -m two_devices $(TESTS) || [ $$? = 5 ]

gtest: build
	PYTHON=$(PY) scripts/gtest.sh

build: $(READY)
	$(PY) setup.py -q egg_info build_ext --inplace
ifneq ($(INSTALLED),)
	@test -e $(INSTALLED) || $(PY) -m pip install -q --no-deps --no-build-isolation -e .
	@touch $(INSTALLED)
endif

env: $(READY)

$(READY):
	scripts/environment.sh $(VENV) '$(TORCH)' $(EXTENT)
	rm -f $(VENV)/.ready-*
	touch $@

examples: build
	PYTHON=$(PY) scripts/examples.sh

# The whole sweep takes about half an hour on two free cores; `make test` has a fixed slice of it.
conformance: build
	$(PY) tests/upstream/conformance.py --out build/conformance $(CONFORMANCE_ARGS)

sanitize: $(READY)
	PYTHON=$(PY) SANITIZE=address,undefined scripts/gtest.sh

bench: build
	for file in tests/bench/bench_*.py; do $(PY) $$file || exit 1; done

format:
	ruff check --fix .
	ruff format .
	clang-format -i $(CPP_FILES)

lint:
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CPP_FILES)

clean:
	rm -rf build dist python/*.egg-info python/torch_quartz/lib python/torch_quartz/include python/torch_quartz/share
	rm -f python/torch_quartz/_C*.so python/torch_quartz/_build_config.py
	find python tests examples -name __pycache__ -type d -exec rm -rf {} +
