# make setup | run | examples | test | test-fast | test-cpus | test-packages | soak | lint | lines | docs | test-wheel | release | bench
#   | sanitize | clean
#   PYTHON=python3.12 make setup     another interpreter (3.10 to 3.13)
#   VENV=/somewhere make test        another place for the virtual environment
#   make test PYTEST="-m exhaustive" what this leaves out: most of the matrices of schedules and gradients, an hour
#   make test-cpus CPUS="haswell" PYTEST=tests/cpu    the same where tests take this CPU for others, too
#   make run HIDDEN=1024 TUNE="--trials 200"     by default the search stops after 90 seconds

PYTHON ?= python3
VENV ?= .venv
HIDDEN ?= 800
TUNE ?= --time-limit 90
PYTEST ?=
SECONDS ?= 600
# one more than there are cores: many tests wait for processes that they kill or let hang
WORKERS ?= $(shell expr $$(nproc) + 1)
CPUS ?= znver3 skylake-avx512

# What runs modules: docs/tutorials/deploying.md
RUNTIME := numpy msgspec ml_dtypes "apache-tvm-ffi==0.1.14.post1"

BIN := $(VENV)/bin
MODULE := build/lstm$(HIDDEN).so
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Searches need the [tune] extra. Without nvcc, a machine with an NVIDIA driver compiles CUDA through NVRTC, from [cuda].
COMMA := ,
EXTRA := [tune$(if $(shell command -v nvidia-smi),$(if $(shell command -v nvcc),,$(COMMA)cuda))]

# Installs $(1) into the environment; says every five seconds that it is at it, and ends as pip does.
define install
	@echo "installing $(1) into $(VENV), as pyproject.toml says"
	@(while sleep 5 >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; do echo "  still installing"; done) & beat=$$!; \
	$(PIP) install --editable '$(1)'; code=$$?; kill $$beat; exit $$code
	@touch $@
endef

.PHONY: setup run examples test test-fast test-optimized test-cpus test-packages soak lint lines docs test-wheel \
	release bench sanitize clean

# Each stamp stands for an installation, so that it is done again only when pyproject.toml changes.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 10) <= v[:2] <= (3, 13) else f"ecornn needs Python 3.10 to 3.13; this is {v[0]}.{v[1]}. Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(call install,.$(EXTRA))

$(VENV)/installed-test: $(VENV)/installed
	$(call install,.[test])

$(VENV)/installed-packages: $(VENV)/installed-test
	$(call install,.[packages])

$(VENV)/installed-lint: $(VENV)/installed
	$(call install,.[lint])

$(VENV)/installed-docs: $(VENV)/installed
	$(call install,.[docs])

$(VENV)/installed-examples: $(VENV)/installed
	$(call install,.[examples])

$(VENV)/installed-bench: $(VENV)/installed
	$(call install,.[bench])

setup: $(VENV)/installed

# Searches a schedule for one LSTM on the GPU at hand, or else on this CPU, compiles the best one to
# a module file, and runs that against the float64 reference.
run: $(VENV)/installed
	$(BIN)/ecornn-tune --cell lstm --hidden $(HIDDEN) $(TUNE)
	mkdir -p build
	$(BIN)/ecornn-compile --cell lstm --hidden $(HIDDEN) --output $(MODULE)
	$(BIN)/python examples/00_first_run.py $(MODULE)

# What the programs of examples/ need: $(VENV)/bin/python examples/04_replace.py
examples: $(VENV)/installed-examples

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 -m "not gpu and not exhaustive" $(APART) $(PYTEST)

# Rooms of what is written and measured, which no CPU changes: tests/README.md
WRITTEN := $(addprefix --ignore=tests/,docs report benchmarks)

# What takes some minutes on two cores: of each test one case, without slow tests and those of what is written.
test-fast: $(VENV)/installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 -m "not gpu and not exhaustive and not slow" --first $(WRITTEN) $(PYTEST)

# Without assertions in the package: python -O drops them. Pytest rewrites those of tests, which hold.
OPTIMIZED := $(addprefix tests/,project/test_architecture.py runtime/test_runtime_layer.py runtime/test_runtime_packing.py \
	cpu/test_cpu_training.py torch/test_torch_own_cells.py)
test-optimized: $(VENV)/installed-test
	$(BIN)/python -O -m pytest -n $(WORKERS) --maxprocesses 8 -m "not gpu and not exhaustive and not slow" \
		-W "ignore:assertions not in test modules:pytest.PytestConfigWarning" $(OPTIMIZED) $(PYTEST)

# An older CPU's code runs on a newer one: tests with this CPU, then with each of CPUS in its place.
test-cpus:
	$(MAKE) test
	for cpu in $(CPUS); do ECORNN_TEST_CPU=$$cpu $(MAKE) test APART="$(WRITTEN)" || exit; done

# Models of other people's packages with compiled layers, see tests/packages/; what they need is installed besides.
#   make test-packages PYTEST="--absent=skip" leaves out those that cannot be imported
test-packages: $(VENV)/installed-packages
	$(BIN)/python -m pytest tests/packages $(PYTEST)

# Threads that load, bind, run and train layers on busy cores: make soak SECONDS=60
soak: $(VENV)/installed-test
	$(BIN)/python benchmarks/soak.py $(SECONDS)

# mypy sees the layout that is installed: schedules/ as ecornn.schedules.
lint: $(VENV)/installed-lint
	$(BIN)/ruff check .
	rm -rf build/lint && mkdir -p build/lint/ecornn
	ln -s $(CURDIR)/ecornn/* $(CURDIR)/schedules $(CURDIR)/tuning_logs build/lint/ecornn
	cd build/lint && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml

# Lines of what is installed, of benchmarks and of tests.
lines:
	@for part in "ecornn schedules tuning_logs" benchmarks tests; do for kind in 'py' 'cc|h|hpp|cu|c'; do \
		printf '%s, *.(%s): ' "$$part" "$$kind"; \
		git ls-files -z $$part | grep -zE "\.($$kind)\$$" | xargs -0 cat | wc -l; done; done

# The site of README and docs, in build/site: open build/site/index.html, no server or network is needed.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# The wheel, built and installed with what it requires into an environment that has nothing else, compiles a layer there,
# and runs it against the reference; then the runtime alone runs the same file, and says what it cannot do.
test-wheel: $(VENV)/installed-test
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --wheel --outdir build/wheel .
	$(PYTHON) -m venv build/wheel/whole
	build/wheel/whole/bin/python -m pip --disable-pip-version-check --quiet install build/wheel/*.whl
	cd build/wheel && whole/bin/ecornn compile --cell lstm --hidden 64 --batch 4 --seq 20 --target cpu -o lstm64.so
	cd build/wheel && whole/bin/python $(CURDIR)/examples/00_first_run.py lstm64.so
	$(PYTHON) -m venv build/wheel/runtime
	build/wheel/runtime/bin/python -m pip --disable-pip-version-check --quiet install $(RUNTIME)
	build/wheel/runtime/bin/python -m pip --disable-pip-version-check --quiet install --no-deps build/wheel/*.whl
	cd build/wheel && runtime/bin/python $(CURDIR)/examples/00_first_run.py lstm64.so
	cd build/wheel && ! runtime/bin/ecornn doctor

# What a release uploads, of the last commit: an archive of the sources and the wheel that is built from it, in
# build/release/dist. Each is installed with its requirements into an environment that has nothing else, where it compiles
# a layer and runs it against the reference. Nothing is uploaded, and no tag is set.
VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
DIST = build/release/dist/ecornn-$(VERSION)

# Environment $(1), with the file $(2).
define released
	@echo "installing $(notdir $(2)) into an environment of its own"
	$(PYTHON) -m venv build/release/$(1)
	build/release/$(1)/bin/python -m pip --disable-pip-version-check --quiet install $(2)
	cd build/release && $(1)/bin/python -c 'import ecornn, sys; sys.exit(ecornn.__version__ != "$(VERSION)")'
	cd build/release && $(1)/bin/ecornn compile --cell lstm --hidden 64 --batch 4 --seq 20 --target cpu -o $(1).so
	cd build/release && $(1)/bin/python $(CURDIR)/examples/00_first_run.py $(1).so
endef

release: export PYTHONPATH =
release: $(VENV)/installed-test
	@! git rev-parse --quiet --verify refs/tags/v$(VERSION) || { echo "v$(VERSION) has a tag: raise the version"; exit 1; }
	@git diff --quiet HEAD || { echo "commit what has changed: a release is of a commit"; exit 1; }
	rm -rf build/release && mkdir -p build/release/source
	@git rev-parse --short HEAD >build/release/commit
	git archive "$$(cat build/release/commit)" | tar --extract --directory build/release/source
	@echo "building both files of $$(cat build/release/commit); what setuptools says is in build/release/build.log"
	$(BIN)/python -m build --outdir build/release/dist build/release/source >build/release/build.log 2>&1 || \
		{ tail -n 30 build/release/build.log; exit 1; }
	@if $(BIN)/python -c 'import twine' 2>/dev/null; then $(BIN)/python -m twine check --strict build/release/dist/*; \
		else echo "twine is not installed: the package's page is not checked"; fi
	$(call released,wheel,$(DIST)-py3-none-any.whl)
	$(call released,archive,$(DIST).tar.gz)
	@echo "Upload $(DIST).tar.gz and $(DIST)-py3-none-any.whl: python -m twine upload build/release/dist/*"
	@echo "Tag: git tag --annotate v$(VERSION) --message 'ecornn $(VERSION)' $$(cat build/release/commit)"

# compute-sanitizer over small layers of every schedule, on the GPU at hand.
sanitize: $(VENV)/installed-bench
	$(BIN)/python tests/sanitize.py

# What docs say of speed, measured on the GPU at hand, with their tables and plots; without a GPU, on this CPU.
# `$(BIN)/python benchmarks/run_all.py --list` says which command makes which file of results, and `run_all.py NAME` is one.
bench: $(VENV)/installed-bench
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf build $(VENV)
