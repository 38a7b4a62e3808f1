# Two commands set everything up: `make quickstart` and `make test`. Neither needs root.
# PIP_ARGS is handed to every pip install; a CPU wheel of torch saves gigabytes (see README).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
PIP_ARGS ?=
PY := $(VENV)/bin/python

.PHONY: install quickstart quickstart-seeds test full lint chaos soak clean

install: $(VENV)/.installed

$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 …")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q $(PIP_ARGS) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PY) -m pip install -q $(PIP_ARGS) -e '.[test]'
	touch $@

quickstart: install
	$(PY) -m bench.quickstart

quickstart-seeds: install
	$(PY) -m bench.quickstart --seeds 0 1 2 --check

test: $(VENV)/.installed-test
	$(PY) -m tests.parts

full: $(VENV)/.installed-test
	$(PY) -m tests.parts --full

# every cell of docs/reliability.md: one process killed, stopped or cut off at each phase
chaos: $(VENV)/.installed-test
	$(PY) -m tests.chaos

# two hours with servers killed at random; memory, files, threads and disk must stay flat
soak: $(VENV)/.installed-test
	$(PY) -m bench.soak --minutes 120

lint: $(VENV)/.installed-test
	$(PY) -m tests.parts --only lint

clean:
	rm -rf $(VENV) runs build *.egg-info
