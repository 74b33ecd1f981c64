# Everything happens in .venv, which each target makes if it has to.
BIN = .venv/bin

.PHONY: install test test-all lint format types quickstart

install:
	./launch/venv.sh dev

test:
	./tests/run.sh

test-all:
	./tests/run.sh --all

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install
	$(BIN)/mypy

quickstart:
	./launch/quickstart.sh
