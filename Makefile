# Each target works from a fresh clone: it makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo storage bench bench-gpu test lint types tests test-all-cases \
	test-build test-sanitize test-clang test-aarch64 test-interpret test-compile test-order test-ptx test-cuda \
	test-distributed test-clients test-paper docs test-site wheels test-wheels native gpu \
	test-gpu test-gpu-sanitize kernel-tables paper clean

help:
	@echo "make demo           train a small ResNet on handwritten digits by four optimizers"
	@echo "make test           lint, types and tests"
	@echo "make test-all-cases the rest of the cases of those tests"
	@echo "make test-build     install in fresh environments, with and without torch or a compiler"
	@echo "make test-sanitize  tests of the native module under AddressSanitizer and UBSan"
	@echo "make test-clang     the native module as clang builds it"
	@echo "make test-aarch64   the native module for aarch64, under qemu"
	@echo "make test-interpret the Triton kernel in Triton's interpreter"
	@echo "make test-compile   the Triton kernel compiled for GPUs, without one"
	@echo "make test-order     what is queued on a GPU, in many orders, without one"
	@echo "make test-ptx       what both compile, executed on the CPU"
	@echo "make test-cuda      the CUDA kernel compiled by nvcc for GPUs, without one"
	@echo "make kernel-tables  registers and instructions of both, into benchmarks/results/"
	@echo "make test-distributed  DTensor, FSDP, DDP and ZeRO in two and four processes over gloo"
	@echo "make test-clients   the libraries of docs/stacks.md train with it"
	@echo "make wheels         wheels into dist/cpu; CUDA=1: with code for GPUs, into dist/cuda"
	@echo "make test-wheels    such a wheel's numbers and threads, beside TORCH=..."
	@echo "make native         a native module for PYTHON=..., to be carried to another machine"
	@echo "make gpu            the first half hour with a GPU, most valuable results first"
	@echo "make test-gpu       everything that needs a GPU, with the Python that is there"
	@echo "make test-gpu-sanitize  the same kernels under compute-sanitizer"
	@echo "make bench          time of a step beside torch.optim's and others', on this CPU"
	@echo "make bench-gpu      the same on a GPU, with the Python that is there"
	@echo "make paper          the paper's experiments on data that need no download, ten minutes"
	@echo "make storage        Padam with packed states and bfloat16 parameters, seven minutes"
	@echo "make test-paper     those on CIFAR and ImageNet, on a few images, with torchvision"
	@echo "make docs           the documentation as a site, into out/site"
	@echo "make test-site      its links, and its pages in a browser; needs chromium"
	@echo "make clean          remove what these made"
	@echo "Variables: VENV=.venv, PYTHON=python3, OUT=out (reports), JOBS=2 (runs side by side)"

# Installs anew when sources of the native module or the requirements have changed.
$(READY): requirements-dev.txt pyproject.toml setup.py $(wildcard csrc/*)
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); PyTorch takes a while the first time"
	@# What is imported is compiled then; all of PyTorch takes as long as installing it.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# All runs of one seed on one machine are the same each time; interrupted, it goes on.
JOBS ?= 2
EXPERIMENTS = $(BIN)/python -m benchmarks.paper
paper: $(READY)
	$(EXPERIMENTS) run --task digits --model resnet18 --seeds 3 --jobs $(JOBS) --out $(OUT)/paper
	$(EXPERIMENTS) run --task lm --model lstm2 --seeds 3 --jobs $(JOBS) --out $(OUT)/paper
	$(EXPERIMENTS) sweep-p --task digits --model resnet18 --seeds 3 --jobs $(JOBS) --out $(OUT)/paper

storage: $(READY)
	$(EXPERIMENTS) storage --task lm --model lstm2 --seeds 3 --jobs $(JOBS) --out $(OUT)/storage
	$(EXPERIMENTS) storage --task digits --model resnet18 --seeds 3 --jobs $(JOBS) \
		--out $(OUT)/storage

demo: $(READY)
	$(EXPERIMENTS) run --task digits --model resnet18 --optimizers sgd,adam,amsgrad,padam \
		--jobs $(JOBS) --out $(OUT)/demo

# Both benchmarks in one process; what they found goes to $(OUT) as JSON, tables and a plot.
OUT ?= out
BENCHMARK = -m pytest -p no:xdist --benchmark-disable-gc --benchmark-quiet
bench: $(READY)
	@mkdir -p $(OUT)
	@echo "About fifteen minutes; tables and a plot in $(OUT) at the end. First the host's time:"
	@status=0; \
	$(BIN)/python $(BENCHMARK) benchmarks --benchmark-json=$(OUT)/step-cpu.json || status=$$?; \
	$(BIN)/python -m benchmarks.report $(OUT)/step-cpu.json --out $(OUT) --command "make bench"; \
	exit $$status

# With the Python of a GPU machine, like test-gpu; the package must be installed there. The report
# needs rich and matplotlib; where they are missing, it can be made elsewhere.
bench-gpu:
	@mkdir -p $(OUT)
	@status=0; \
	$(PYTHON) $(BENCHMARK) benchmarks --turns 3 --benchmark-json=$(OUT)/step-gpu.json || status=$$?; \
	$(PYTHON) -c "import matplotlib, rich" && \
	$(PYTHON) -m benchmarks.report $(OUT)/step-gpu.json --out $(OUT) --command "make bench-gpu" || \
	echo "For tables: python -m benchmarks.report $(OUT)/step-gpu.json, where rich is installed"; \
	exit $$status

test: lint types tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/*.cpp csrc/*.cu benchmarks/*.cpp
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*
	$(BIN)/zizmor --quiet --offline .github

types: $(READY)
	$(BIN)/mypy

# As many processes as processors, with as many threads each: those that wait must not do so busily.
tests: $(READY)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto

# Cases that `make test` has no time for.
test-all-cases: $(READY)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto -m "slow and not interpret"

test-build: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadgroup -m build

# Installs the package into folder $(1), its native module built under environment $(2) with CMake's
# arguments $(3), without a warning.
define copy_of_package
	rm -rf $(1)
	$(2) PADAM_EXT_BUILD=cpu PADAM_EXT_CMAKE_ARGS="-DCMAKE_COMPILE_WARNING_AS_ERROR=ON $(3)" \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(1) .
endef

# A second copy of the package, with a native module built with both sanitizers. Their runtime must be
# loaded before Python. Leaks are not looked for: Python itself does not free everything.
SANITIZED := build/sanitized
test-sanitize: $(READY)
	$(call copy_of_package,$(SANITIZED),,-DPADAM_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo)
	PYTHONPATH=$(SANITIZED) ASAN_OPTIONS=detect_leaks=0 OMP_WAIT_POLICY=passive \
		LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
		$(BIN)/pytest -n auto --expect-package-in=$(SANITIZED) -m sanitize -k "not eager"

# A third copy, built by clang.
CLANG := build/clang
test-clang: $(READY)
	$(call copy_of_package,$(CLANG),CXX=clang++)
	PYTHONPATH=$(CLANG):. OMP_WAIT_POLICY=passive $(BIN)/pytest -n auto \
		--expect-package-in=$(CLANG) -m "numbers or sanitize" -k "not eager"

test-aarch64: $(READY)
	tests/aarch64.sh $(BIN)

# The interpreter and the compiler do not mix in one process.
test-interpret: $(READY)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m interpret

test-compile: $(READY)
	$(BIN)/python -m pytest -n auto -m compile

# What is queued on a device, executed in many orders by a stand-in for it.
test-order: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m order

# The kernels' PTX, as Triton and, where it is, nvcc compile it, executed on the CPU.
test-ptx: $(READY)
	EXECUTE_PTX=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto \
		-m "ptx and not slow $$(command -v nvcc > /dev/null || echo "and not nvcc")"

# Needs nvcc, and of Triton the programs that read machine code.
test-cuda: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadgroup -m "nvcc and not ptx"

# The tables of both in benchmarks/results/.
kernel-tables: $(READY)
	$(BIN)/python -m benchmarks.triton_kernels
	$(BIN)/python -m benchmarks.cuda_kernels

# Each test starts two or four processes, so there is one at a time.
test-distributed: $(READY)
	$(BIN)/python -m pytest -p no:xdist -m distributed

# In an environment of their own: what they ask for is large. torchtitan asks for an older
# huggingface_hub than transformers does, and for much that only its trainer needs.
CLIENTS := .venv-clients
test-clients:
	@test -d $(CLIENTS) || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-compile -r requirements-clients.txt
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps torchtitan==0.3.0
	PADAM_EXT_BUILD=cpu $(CLIENTS)/bin/pip install --quiet --disable-pip-version-check \
		--force-reinstall --no-deps .
	$(CLIENTS)/bin/pytest --expect-package-in=$(CLIENTS) -m clients

# torchvision does not import beside every torch, so it has an environment of its own as well. What
# is tested is the native module built for the other environment: one serves every torch.
PAPER := .venv-paper
test-paper: $(READY)
	@test -d $(PAPER) || $(PYTHON) -m venv $(PAPER)
	@echo "Installing into $(PAPER); torchvision asks for the PyTorch that has CUDA, gigabytes"
	$(PAPER)/bin/pip install --quiet --disable-pip-version-check --no-compile -r requirements-paper.txt
	OMP_WAIT_POLICY=passive $(PAPER)/bin/python -m pytest -n auto -m paper

# Whatever Sphinx warns of is an error. Of what an earlier build has read it would not warn again.
SITE = $(OUT)/site
docs: $(READY)
	rm -rf $(SITE)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env \
		-c docs -d $(OUT)/site-cache . $(SITE)
	@echo "The site is in $(SITE)/index.html"

test-site: docs
	SITE=$(SITE) $(BIN)/python -m pytest -p no:xdist -m site
	$(BIN)/linkchecker --config=docs/linkchecker.ini --no-status $(SITE)/index.html

# Not in the virtual environment: a GPU machine has a torch and a Triton of its own. Nothing here
# needs more than pytest and numpy.
test-gpu:
	$(PYTHON) -m pytest -m gpu

# The source distribution, and of it a wheel for each CPython that is here, with the oldest glibc that it
# runs on in its name. Those with code for GPUs have a version of their own. OpenMP's runtime stays
# out: torch brings one, and threads of two would get in each other's way.
CUDA ?=
DIST := dist/$(if $(CUDA),cuda,cpu)
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14
WHEELS := build/wheels
wheels: $(READY)
	@for python in $(PYTHONS); do $$python -c "" 2> /dev/null && exit; done; \
		echo "None of these runs here: $(PYTHONS)"; exit 1
	rm -rf $(WHEELS) $(DIST)
	$(BIN)/python -m build --sdist --outdir $(DIST) . > /dev/null
	printf "[egg_info]\ntag_build = $(if $(CUDA),+cu$$(nvcc --version | \
		sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1\2/p'))\n" > $(DIST)/version.cfg
	for python in $(PYTHONS); do \
		found=$$($$python -c "import sys; print(sys.executable)" 2> /dev/null) || continue; \
		echo "A wheel for $$found"; \
		PADAM_EXT_BUILD=$(if $(CUDA),cuda,cpu) DIST_EXTRA_CONFIG=$(CURDIR)/$(DIST)/version.cfg \
		$(BIN)/pip --quiet --disable-pip-version-check --python $$found \
			wheel --no-deps --wheel-dir $(WHEELS) $(DIST)/*.tar.gz || exit; \
	done
	PATH=$(BIN):$$PATH $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir $(DIST) $(WHEELS)/*.whl
	rm $(DIST)/version.cfg
	@ls -l $(DIST)

# What a wheel computes, in an environment with nothing else of this project, beside any torch. The
# tests are the clone's.
TORCH ?= 2.13.0
WHEEL_ENV := .venv-wheels
test-wheels:
	rm -rf $(WHEEL_ENV)
	$(PYTHON) -m venv $(WHEEL_ENV)
	$(WHEEL_ENV)/bin/pip install --quiet --disable-pip-version-check --no-compile torch==$(TORCH) \
		$$(grep -E "^(numpy|pytest|pytest-xdist|hypothesis|expecttest)==" requirements-dev.txt)
	$(WHEEL_ENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-index \
		--find-links $(DIST) --pre padam_ext
	OMP_WAIT_POLICY=passive $(WHEEL_ENV)/bin/pytest -n auto --expect-package-in=$(WHEEL_ENV) \
		tests/test_native_threads.py $$(grep -l mark.numbers tests/*.py)

# A native module for another Python, as in `make native PYTHON=python3.12`, beside the package's
# source: for a machine without a compiler.
NATIVE := build/native
native:
	rm -rf $(NATIVE)
	$(PYTHON) -m venv $(NATIVE)
	$(NATIVE)/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(NATIVE)/wheel .
	$(NATIVE)/bin/python -m zipfile -e $(NATIVE)/wheel/*.whl $(NATIVE)/content
	cp $(NATIVE)/content/padam_ext/_native*.so padam_ext/

# The first half hour with a GPU: versions, a small step, tests, then speed, each result written as
# soon as it is known. Ends in under nine minutes and goes on where it ended; DONE names folders with
# results of other calls. Needs nothing but what test-gpu needs.
DONE ?=
gpu:
	@# A native module that `make native` has put here is taken as it is: there may be no nvcc.
	@$(PYTHON) -c "import padam_ext.kernels" 2> /dev/null || \
		PADAM_EXT_BUILD=$$(ls padam_ext/_native$$($(PYTHON) -c "import sysconfig; \
			print(sysconfig.get_config_var('EXT_SUFFIX'))") > /dev/null 2>&1 && echo none || echo auto) \
		$(PYTHON) -m pip install --quiet --no-build-isolation --no-deps -e .
	PYTHONPATH=tests $(PYTHON) -m benchmarks.first_contact --out $(OUT) $(if $(DONE),--done $(DONE))

# Where NVIDIA's compute-sanitizer is installed. Memory that torch keeps for itself hides overruns.
test-gpu-sanitize:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 $(PYTHON) -m pytest -m gpu -k "another_kernel"

clean:
	rm -rf $(VENV) $(CLIENTS) $(PAPER) build dist out docs/generated *.egg-info padam_ext/_native*.so \
		.hypothesis .mypy_cache .pytest_cache .ruff_cache .benchmarks
