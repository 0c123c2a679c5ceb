# make serve   install into .venv and serve the bundled demo model on http://127.0.0.1:8000
# make test    install the test extra and run two cases of each test (one if it compiles), but those of kernels
# make test-all   all cases of these tests; more than an hour
# make test-kernels   the kernels, and whole steps, by the compilers of GPUs and TPUs; into .venv-aot
# make test-replicas   the Helm chart, and replicas on a local Ray cluster; into .venv-replicas
# make lint    ruff and mypy
# make settings   write docs/settings.md from the settings' definitions
# make models   write docs/models.md, what works with which model
# make slow    two cases of each test that is marked as slow, also of kernels; all cases, for hours: make slow CASES=
# make release   wheel and sdist of the last commit, in dist/; each is tried in a fresh environment

PYTHON ?= python3
VENV ?= .venv
MODEL ?= demo
EXTRA ?=
TEST_EXTRA ?= test
CASES ?= --most-cases 2
KERNEL_TESTS ?= tests/aot tests/kernels  # the longest file first
ENGINE_TESTS ?= tests/engine
BIN = $(VENV)/bin
# pytest-timeout cannot interrupt a test that waits in native code, for a step that never ends. Its process is ended, and
# with it the run: pytest-xdist would start the same test in a new process, again and again.
HANGS_AFTER = 660  # seconds in one test
END_HANGS = -o faulthandler_timeout=$(HANGS_AFTER) -o faulthandler_exit_on_timeout=true --max-worker-restart 0
# Two processes, a file of tests each: most of the time goes to compiling, on one thread. GROUP: options that choose
# other tests than those that run by default.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --durations 20 $(END_HANGS) $(GROUP)
PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check
# For tests, modules are compiled as they are imported: to compile all of them takes longer than to install them.
PIP_INSTALL_FOR_TESTS = $(PIP_INSTALL) --no-compile
# Where Python writes no bytecode, each server that a test starts would compile its modules again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: serve test test-all test-engine test-kernels test-replicas slow lint types settings models format release clean

serve: $(VENV)/installed
	$(BIN)/jaxserve serve $(MODEL)

test: $(VENV)/installed-$(TEST_EXTRA)
	$(PYTEST) --ignore tests/aot --ignore tests/kernels $(CASES)

test-all: CASES =
test-all: test

# Tests of the engine; used with VENV and PYTHON of another version.
test-engine: $(VENV)/installed-$(TEST_EXTRA)
	$(BIN)/python -c "import jax, sys; print('Python', sys.version.split()[0], 'jax', jax.__version__)"
	$(PYTEST) $(ENGINE_TESTS)

test-kernels: VENV = .venv-aot
test-kernels: aot-environment
	$(BIN)/python -c "import jax, sys; print('Python', sys.version.split()[0], 'jax', jax.__version__)"
	JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES=-1 $(PYTEST) --no-loadscope-reorder $(KERNEL_TESTS)

.PHONY: aot-environment
aot-environment: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL_FOR_TESTS) -e ".[test-core,aot]" $(EXTRA)

test-replicas: VENV = .venv-replicas
test-replicas: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL_FOR_TESTS) -e ".[test,ray,chart]" $(EXTRA)
	$(BIN)/python -m pytest -m "slow or not slow" -s tests/replicas

slow:
	$(MAKE) test test-kernels TEST_EXTRA=test-slow GROUP="-m slow --timeout 1800 $(CASES)" HANGS_AFTER=3660

lint: $(VENV)/installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types

types: $(VENV)/installed-lint
	$(BIN)/mypy

settings: $(VENV)/installed
	$(BIN)/python -c "from jaxserve.commands import cli, help; serve = cli.make_parser().parse_args(['serve']); \
	open('docs/settings.md', 'w').write(help.settings_page(serve.serve_parser))"

models: $(VENV)/installed-$(TEST_EXTRA)
	$(BIN)/python tests/model_table.py

format: $(VENV)/installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Built from the last commit, so that a file that somebody forgot to commit is missed here. An sdist with links would
# install a package without three of its four folders.
release: VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
release: VENV = .venv-release
release:
	rm -rf $(VENV) dist
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) build
	mkdir $(VENV)/source
	git archive HEAD | tar -x -C $(VENV)/source
	$(BIN)/python -m build --outdir dist $(VENV)/source
	! tar -tvzf dist/jaxserve-$(VERSION).tar.gz | grep ^l
	$(call TRY,jaxserve-$(VERSION)-py3-none-any.whl)
	$(call TRY,jaxserve-$(VERSION).tar.gz)

# Installs a file of dist/ into an environment of its own, and runs the demo model from there.
define TRY
	rm -rf $(VENV)/fresh
	$(PYTHON) -m venv $(VENV)/fresh
	$(VENV)/fresh/bin/pip install --quiet --disable-pip-version-check dist/$(1)
	cd $(VENV)/fresh && test "$$(bin/jaxserve --version)" = "jaxserve $(VERSION)"
	cd $(VENV)/fresh && bin/jaxserve serve --help > /dev/null
	cd $(VENV)/fresh && bin/jaxserve generate demo "def open(" --max-tokens 8 --platform cpu
	@echo "$(1) installs and runs"
endef

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/installed-%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL_FOR_TESTS) -e ".[$*]" $(EXTRA)
	touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) .venv*-aot .venv-replicas .venv-release build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
