# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
DIGITS = outputs/digits
# `make test SLOW=1` adds the slow suites.
MARKS = $(if $(SLOW),,-m "not slow")

.PHONY: setup demo test lint docs clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/python examples/qwen3_vl_digits/prepare.py --out $(DIGITS)
	$(BIN)/python -m hyper_parallel.trainer.launch --config examples/qwen3_vl_digits/train.yaml
	$(BIN)/python examples/qwen3_vl_digits/read_digits.py --model $(DIGITS)/run --data $(DIGITS)

test: setup lint docs
	$(BIN)/python -m pytest $(MARKS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site

clean:
	rm -rf $(VENV) outputs build *.egg-info
