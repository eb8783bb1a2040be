# Two commands on a fresh machine: `make demo` and `make test`. Needs git, make and Python >= 3.11.
# The browser tests of the learn page also want Chromium and its driver; without them they are skipped.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# The releases of Triton that the kernels are written for, but the newest, which is in constraints/dev.txt.
OLD_TRITONS := 3.6.0 3.7.1 3.8.0

# Tests start many processes, which would all compile the same files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-all test-isa test-old-triton torture lint clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints/dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints/dev.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints/dev.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/tilewise demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m ''
	$(MAKE) test-isa
	$(MAKE) test-old-triton DRAWS=1000

# So many releases of Triton, and so many instruction sets, drawn anew: by default all. CI has time for some.
SOME ?= 9
drawn = $$($(BIN)/python -c "import random, sys; n, *names = sys.argv[1:]; print(*random.sample(names, min(int(n), len(names))))" $(SOME) $(1))

# GPU kernels compile with older releases of Triton too: so many configurations of each script, drawn anew.
DRAWS ?= 8
test-old-triton: $(OLD_TRITONS:%=$(VENV)/triton-%)
	@for release in $(call drawn,$(OLD_TRITONS)); do \
	  echo "Triton $$release"; PYTHONPATH=$(VENV)/triton-$$release $(BIN)/python -m pytest -n 2 --draws $(DRAWS) tests/gpu_triton/test_compile.py tests/hopper/test_compile.py tests/hopper/test_backward_compile.py || exit 1; \
	done

# CPU kernels under each instruction set but the one that `make test` takes. AVX-512 and AMX run in software where an
# x86-64 machine lacks them: slowly, so without public calls and functions, but with the tests of each kernel.
test-isa: $(STAMP)
	@best=$$($(BIN)/python -c "from tilewise.cpu.host.compile import target; print(target().isa)"); \
	for isa in $(call drawn,avx2 avx512 avx512_bf16 amx neon); do \
	  if [ "$$isa" = "$$best" ]; then echo "$$isa: as in make test"; continue; fi; \
	  if TILEWISE_CPU_ISA=$$isa $(BIN)/python -c "from tilewise.cpu.host.compile import unavailable; exit(bool(unavailable()))"; then \
	    echo "$$isa"; TILEWISE_CPU_ISA=$$isa $(BIN)/python -m pytest -n 2 tests/test_attention.py tests/test_large_scores.py tests/cpu/llvm/test_few_keys.py tests/cpu/llvm/test_functions.py || exit 1; \
	  elif [ "$$isa" != neon ] && uname -m | grep -q -e x86_64 -e amd64; then \
	    echo "$$isa, emulated"; $(BIN)/python -m pytest -n 2 --emulate $$isa tests/cpu/llvm/test_few_keys.py tests/cpu/llvm/test_kernels.py || exit 1; \
	  else echo "$$isa: not on this machine"; fi; \
	done

# Random sequences of calls: make torture ARGS="--seconds 60 --seed 1".
torture: $(STAMP)
	$(BIN)/python -m tests.torture $(ARGS)

$(VENV)/triton-%: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==$*

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: docs readme
readme: $(STAMP)
	$(BIN)/python docs/readme.py
	$(BIN)/python docs/site_hooks.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "the site is in build/site"

clean:
	rm -rf $(VENV) build
