#!/usr/bin/env bash
# Set up .venv, and .venv-vllm for the tests marked real; run linter, formatter, type checker and the whole test suite;
# then, unless only the quick part is asked for, that part on the lowest supported versions (scripts/oldest.sh).
# Arguments go to pytest: scripts/test.sh -m 'not real' is the quick part.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh dev
. scripts/downloads.sh quickstart/downloads  # the real checkpoint that some tests run on
[[ "$*" == *"not real"* ]] || scripts/setup_vllm.sh
ruff check .
ruff format --check .
mypy
export OMP_NUM_THREADS=1  # two processes of tests, and those that they start, share the machine's cores
python -m pytest -n 2 --dist loadfile "$@"  # a file to each of two processes, in turn
[[ "$*" == *"not real"* ]] || scripts/oldest.sh
