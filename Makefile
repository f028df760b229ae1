# `make demo` and `make test` set up all they need by themselves, once. The rest is for development.
.PHONY: trainers notebooks image site demo test fast-tests test-wide test-lowest test-newest mutants reproduce soak gpu gpu-wheels wheels lint link format system browser slurm azurite clean
.DELETE_ON_ERROR:
# Where bytecode is not kept, each of the many processes that tests start compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

PYTHONS = 3.11 3.12 3.13 3.14
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
RUN = .venv/bin/thermopile
PIP = setup/quietly .venv/bin/pip install --disable-pip-version-check
# With the checkout as its root, pytest would import it under the checkout's own name, which need not be one for a module.
PYTEST = .venv/bin/pytest --rootdir tests tests
COUNTED = .venv/bin/python tests/cpu_budget.py
# The wheel of ffcv, which setup/ffcv_wheel.py builds where dist/ lacks it, and what that takes. To count what this adds to a
# Debian that has nothing yet (103 packages on Debian 12; 51 where dist/ holds the wheel, python3-venv and make):
#   touch /tmp/none; apt-get -s -o Dir::State::status=/tmp/none install --no-install-recommends PACKAGES | grep -c ^Inst
FFCV = $(wildcard dist/ffcv-1.0.2+thermopile.1-cp311-abi3-*_$(shell uname -m).whl)
DEBIAN_PACKAGES = $(if $(FFCV),,g++ pkg-config libturbojpeg0-dev python3-dev) python3-venv

demo: .venv/ready
	setup/quietly $(RUN) convert glyphs demo/glyphs --resume
	$(RUN) train --preset glyphs --data demo/glyphs --out demo/run --resume
	$(RUN) inspect demo/run
	@echo "Look at the report:     open demo/run/report/report.html in a browser"
	@echo "Look at single samples: $(RUN) inspect demo/run --sample 1204 77"
	@echo "Train on your own data: $(RUN) convert folder PICTURES data/mine && $(RUN) train --preset small --data data/mine --out runs/mine"

# The papers' methods compared, on docs/reproduction.md: CLIP, SogCLR and iSogCLR on pairs with the settings that the
# committed searches chose, in three quarters of an hour on two cores; with FULL=1 everything, in a day. What RESULTS holds is not made again: name a new file to make it yourself.
RESULTS = benchmarks/reproduction/results.jsonl
PAGE = docs/reproduction.md
reproduce: .venv/ready
	.venv/bin/python -m benchmarks.reproduce $(RESULTS) --page $(PAGE) $(if $(FULL),--full)

# What one runs before a commit: in five minutes, within a budget of CPU seconds (tests/cpu_budget.py). Lint runs beside.
test: .venv/ready
	@$(MAKE) --no-print-directory --jobs 2 lint fast-tests

# The wide tests wait for hosts, locks and servers half of the time, so two more processes pay on two cores.
SHARED_OUT = --no-loadscope-reorder --numprocesses
fast-tests: .venv/ready link
	$(COUNTED) $(PYTEST) -m "not soak and not wide" $(SHARED_OUT) 2

# All else that is to be known before a merge: the claim, kills, flipped bits, ranks, benchmarks' scripts, and what needs a
# browser, an object server, a Ray cluster or, as root, hosts (network namespaces) and Slurm on two of them.
test-wide: .venv/ready link browser slurm azurite trainers notebooks site
	PATH="$(CURDIR)/build/azurite/node_modules/.bin:$$PATH" $(WIDE) tests $(addprefix --ignore=,$(OTHERS))
	PYTHONPATH="$(CURDIR)/build/trainers" $(WIDE) $(OTHERS)

# The time limit is for what hangs: a busy machine takes four times as long as an idle one.
WIDE = $(COUNTED) --budget inf --budget-a-file inf .venv/bin/pytest --rootdir tests -m "wide and not soak" --timeout 900 $(SHARED_OUT) 4
# Alone, for with them on the path transformers and timm import torchvision, which no other test is to depend on.
OTHERS = $(addprefix tests/,test_keep_your_trainer.py benchmarks/test_gpu_rival.py trainer/test_presets.py trainer/test_timm_and_open_clip.py)

# What the tests find: breaks chosen and drawn lines one at a time, in a copy of the tree, and names the tests that fail.
# Takes about half an hour on an idle core. Only some: make mutants MUTANTS=chosen, or MUTANTS='--drawn 60 pipeline/order/order.py'.
mutants: .venv/ready
	$(PIP) cosmic-ray==8.7.0
	nice -n 19 .venv/bin/python tests/mutants $(MUTANTS)

# The same tests at full length: kills, signals, flipped bits, 5,000 snapshots, two hours of training, seeds, a store of
# 2·10^8 rows. Takes about seven hours on two cores; the last one is skipped where less than 14 GB of disk are free.
soak: .venv/ready slurm
	$(PYTEST) -m soak --hypothesis-profile soak --timeout 3600

# The fast tests with the lowest versions that pyproject.toml takes of all packages it requires, on the lowest Python, in an
# environment of its own; and in .venv with the newest of what is released. torch comes with all of CUDA: 6.4 GB.
FLOORS = $(shell sed -n '/^dependencies = \[/,/^\]/ s/^ *"\([^>]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml)
test-lowest: build/lowest/ready link
	PYTHONPATH="$(CURDIR)/build/types" build/lowest/bin/pytest --rootdir tests tests -m "not soak and not wide"

build/lowest/ready: pyproject.toml | .venv/ready
	python$(firstword $(PYTHONS)) -m venv --clear build/lowest
	build/lowest/bin/pip install --quiet --upgrade pip
	build/lowest/bin/pip install --quiet --find-links dist --only-binary ffcv $(FLOORS) --group dev --editable .[gpu]
	touch $@

test-newest: .venv/ready link
	.venv/bin/pip install --quiet --upgrade --target build/$@ torch transformers tokenizers zarr icechunk pydantic numcodecs pyarrow
	PYTHONPATH="$(CURDIR)/build/$@:$(CURDIR)/build/types" $(PYTEST) -m "not soak and not wide"

# What a GPU does, in MINUTES, in the environment of PYTHON as it is: nothing is installed. Writes docs/gpu.md. WHEELS names
# a folder that `make gpu-wheels` has filled where there is a network: it is put on the path for as long as this runs.
# FOUND names a folder for what was found: a second command with it runs only what is lacking.
MINUTES = 9
gpu: link
	@PYTHONPATH="$(CURDIR)/build/types$(if $(PYTHONPATH),:$(PYTHONPATH))" $(PYTHON) -m benchmarks.gpu --page docs/gpu.md \
	  --minutes $(MINUTES) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(FOUND),--found $(FOUND))

# For a machine with a GPU, torch and transformers, but no network: 38 MB of wheels for its Python, and pairs to train on.
# With DALI=1, DALI's wheels, 270 MB, are among them, and all of it also lies in numbered folders beside, to be brought one
# after another where that is too much at once (docs/gpu.md).
gpu-wheels: .venv/ready trainers
	@PYTHONPATH=build/trainers .venv/bin/python setup/gpu_wheels.py build/gpu-wheels 3.12 open_clip_torch \
	  webdataset==0.2.86 $(if $(DALI),nvidia-dali-cuda130)
	@.venv/bin/python -m benchmarks.openclipart build/openclipart --small build/gpu-wheels/pairs
	@$(if $(DALI),.venv/bin/python -m benchmarks.pieces cut build/gpu-wheels)

# Gives every module its real name, thermopile.…, whatever the checkout is called.
link:
	@mkdir -p build/types && ln -sfn ../.. build/types/thermopile

lint: .venv/ready link
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	PYTHONPATH=build/types .venv/bin/lint-imports --no-cache

format: .venv/ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# torch comes first, with the CUDA packages that this machine's build of it asks for. All other packages are in
# constraints.txt, so pip resolves nothing. ffcv has no wheels elsewhere, and its sources ask for all of OpenCV.
.venv/ready: pyproject.toml constraints.txt $(wildcard setup/ffcv_wheel.py setup/opencv4.pc setup/opencv2/opencv.hpp) | system
	@echo "Installing the Python packages into .venv, which takes a few minutes."
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@$(if $(FFCV),,setup/quietly .venv/bin/python setup/ffcv_wheel.py dist)
	@$(PIP) --constraint constraints.txt torch
	@$(PIP) --find-links dist --requirement constraints.txt --no-deps --editable .
	@touch $@

# What `pip install --find-links dist thermopile` needs besides the package index, and the sources.
wheels: .venv/ready
	@$(PIP) build
	@setup/quietly .venv/bin/python -m build --outdir dist .
	@ls dist

system:
	@$(PYTHON) -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv)' $(PYTHONS) || \
	  { echo "thermopile needs one of Python $(PYTHONS); name it with: make PYTHON=python3.11 …"; exit 1; }
	@{ $(PYTHON) -c 'import ensurepip' && $(if $(FFCV),true,$(CAN_COMPILE)); } >/dev/null 2>&1 || \
	  { $(call install,$(DEBIAN_PACKAGES),$(if $(FFCV),Python needs venv.,ffcv is compiled here.)); }

# The report's tests look at it as a reader does; without a browser they are skipped.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  ( $(call install,chromium chromium-driver,The report is tested in a browser.) ) || \
	  echo "Without Chromium, the tests of the report in a browser are skipped."

# The documentation's scripts run on a cluster of network namespaces, which only root can make; else their tests are skipped.
slurm:
	@[ "$$(id -u)" != 0 ] || { command -v ip && command -v munged && command -v slurmctld && command -v slurmd; } >/dev/null || \
	  ( $(call install,slurm-wlm munge iproute2,The scripts for Slurm are tested.) ) || \
	  echo "Without Slurm, the tests of its scripts are skipped."

# The emulator of Azure's blob storage; without it, the tests of az:// are skipped.
azurite:
	@[ -x build/azurite/node_modules/.bin/azurite-blob ] || \
	  { command -v npm >/dev/null && setup/quietly npm install --no-fund --no-audit --prefix build/azurite azurite@3.37.0; } || \
	  echo "Without azurite, the tests of az:// are skipped."

# The pages as a site, in build/site: any warning, such as a broken link, is an error.
site: .venv/ready
	@mkdir -p build/api/thermopile  # of build/types every link would be followed, again and again: it is within itself
	@ln -sf $(addprefix $(CURDIR)/,$(wildcard *.py) pipeline state_store storage tools trainer) build/api/thermopile
	@[ -d build/mkdocs/material ] || $(PIP) --target build/mkdocs mkdocs-material==9.8.2 'mkdocstrings[python]==1.0.8'
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=build/mkdocs .venv/bin/python -m mkdocs build --quiet --strict

# Other libraries' trainers, in which our batches and losses are tested; without them, these tests are skipped.
trainers:
	@[ -d build/trainers/webdataset ] || $(PIP) --target build/trainers --no-deps open_clip_torch==3.3.0 timm torchvision \
	  ftfy wcwidth webdataset==0.2.86 braceexpand lightning lightning-utilities pytorch-lightning torchmetrics accelerate || \
	  echo "Without open_clip, Lightning and Accelerate, the tests of their trainers are skipped."

# What runs a notebook; tests/test_notebooks.py gives it to the kernel alone, and is skipped without it.
notebooks:
	@[ -d build/notebooks/nbclient ] || \
	  $(PIP) --target build/notebooks --constraint constraints.txt nbclient==0.11.0 ipykernel==7.4.0 || \
	  echo "Without nbclient and ipykernel, the notebooks are not run."

# An image of the Dockerfile, for CPUs or with DEVICE=cuda. Its base is the one of today, named by its digest.
BASE = debian:12-slim
DEVICE = cpu
image:
	docker pull --quiet $(BASE)
	docker build --tag thermopile:$(DEVICE) --build-arg DEVICE=$(DEVICE) \
	  --build-arg BASE=$$(docker inspect --format '{{index .RepoDigests 0}}' $(BASE)) .

CAN_COMPILE = $(CXX) -E -x c++ -include turbojpeg.h -include Python.h -I"$$($(PYTHON) -c $(INCLUDE))" /dev/null && \
  pkg-config --exists libturbojpeg
INCLUDE = "import sysconfig; print(sysconfig.get_paths()['include'])"

# $(call install,packages,why they are needed): with apt-get where it may, else it says what to install and fails.
define install
if ! command -v apt-get >/dev/null; then \
    echo "$(2) Install what Debian calls $(1) (docs/install.md has other systems' names), then run make again."; exit 1; \
  elif [ "$$(id -u)" = 0 ]; then $(call apt_get,,$(1)); \
  elif sudo -n true 2>/dev/null; then $(call apt_get,sudo,$(1)); \
  else \
    echo "$(2) Install the Debian packages, then run make again:"; \
    echo "  sudo apt-get install $(1)"; exit 1; \
  fi
endef

define apt_get
echo "Installing Debian packages: $(2)" && setup/quietly $(1) apt-get update && \
    setup/quietly $(1) env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(2)
endef

clean:
	rm -rf .venv build dist demo reproduction *.egg-info
