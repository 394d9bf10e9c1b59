# Two commands do everything on a fresh machine: `make lab` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
OUT    ?= runs/quick

# Tests start a hundred processes; without byte code kept each would compile all of normkit again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: lab reference test test-slow check format clean

lab: $(READY)
	$(BIN)/normkit lab run --quick --out $(OUT)

# The committed run, made anew: an hour. Stopped and started again, it goes on where it was.
reference: $(READY)
	$(BIN)/normkit lab run --full --out runs/reference
	cp $(addprefix runs/reference/,environment.json measurements.jsonl settings.json verdicts.json) docs/reference-run/
	$(BIN)/normkit lab report docs/reference-run --png

test: $(READY)
	# Two workers with two threads each on two cores: threads that wait must not spin.
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"
	# The GPU's kernels on the CPU: Triton decides when it is imported whether it interprets.
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" tests/kernels/fused

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m slow tests/kernels/fused

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --threads 2
	$(BIN)/python -m pytest -q tests/test_arrows.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch goes first and alone: resolved together with the rest, pip may pick a CUDA build of several GB.
# --no-compile: what is used is compiled when it is first imported; compiling all of it here takes 37 s longer.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --group dev -e ".[lab,onnx,hf]"
	touch $(READY)

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
