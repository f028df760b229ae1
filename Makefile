# `make demo` and `make test` set up all they need by themselves, once. The rest is for development.
.PHONY: demo test test-wide reproduce soak lint format system browser clean
.DELETE_ON_ERROR:

PYTHON ?= python3
RUN = .venv/bin/thermopile
# With the checkout as its root, pytest would import it under the checkout's own name, which need not be one for a module.
PYTEST = .venv/bin/pytest --rootdir tests tests
# What ffcv compiles against, and what its OpenCV wheel loads.
DEBIAN_PACKAGES = build-essential pkg-config libopencv-dev libturbojpeg0-dev libgl1 libglib2.0-0 python3-dev python3-venv

demo: .venv/ready
	$(RUN) convert glyphs demo/glyphs --resume
	$(RUN) train --preset glyphs --data demo/glyphs --out demo/run --resume
	$(RUN) inspect demo/run

# The papers' methods compared, as docs/reproduction.md: half an hour on two cores, with FULL=1 hours. Called again, it
# goes on where it was stopped, and makes no run twice; `rm -r reproduction` makes them all anew.
reproduce: .venv/ready
	.venv/bin/python benchmarks/reproduce.py reproduction --page docs/reproduction.md $(if $(FULL),--full)

# Two processes, a file in one of them: what a file makes once is not made twice.
test: lint
	$(PYTEST) -m "not soak and not wide" --numprocesses 2 --dist loadfile

# What needs a browser.
test-wide: .venv/ready browser
	$(PYTEST) -m wide

# The same tests at full length: kills, flipped bits, 5,000 snapshots, two hours of training, seeds, a store of 2·10^8 rows.
# Takes about six hours on two cores; the last one is skipped where less than 14 GB of disk are free.
soak: .venv/ready
	$(PYTEST) -m soak --timeout 3600

# The link gives every module its real name, thermopile.…, whatever the checkout is called.
lint: .venv/ready
	mkdir -p build/types && ln -sfn ../.. build/types/thermopile
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

format: .venv/ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# torch goes first: whatever asks for torch after it finds it there, and fetches no second build.
.venv/ready: pyproject.toml constraints.txt | system
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

system:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "thermopile needs Python 3.11 or newer; name one with: make PYTHON=python3.11 …"; exit 1; }
	@pkg-config --exists opencv4 libturbojpeg 2>/dev/null && command -v c++ >/dev/null && $(PYTHON) -c $(HAS_VENV) || \
	  { $(call install,$(DEBIAN_PACKAGES),ffcv is compiled here.); }

# The report's tests look at it as a reader does; without a browser they are skipped.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  ( $(call install,chromium chromium-driver,The report is tested in a browser.) ) || \
	  echo "Without Chromium, the tests of the report in a browser are skipped."

HAS_VENV = "import ensurepip, os, sysconfig as s; assert os.path.exists(s.get_paths()['include'] + '/Python.h')" 2>/dev/null

# $(call install,packages,why they are needed): with apt-get where it may, else it says what to install and fails.
define install
if ! command -v apt-get >/dev/null; then \
    echo "$(2) Install what Debian calls $(1), then run make again."; exit 1; \
  elif [ "$$(id -u)" = 0 ]; then \
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(1); \
  elif sudo -n true 2>/dev/null; then \
    sudo apt-get update -qq && sudo DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(1); \
  else \
    echo "$(2) Install the Debian packages, then run make again:"; \
    echo "  sudo apt-get install $(1)"; exit 1; \
  fi
endef

clean:
	rm -rf .venv build demo reproduction *.egg-info
