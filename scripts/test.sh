#!/usr/bin/env bash
# Set up .venv, and .venv-vllm for the tests marked real. Run linter, formatter, type checker and the whole test suite,
# and then the quick part on the lowest supported versions (scripts/oldest.sh).
# Arguments go to pytest: scripts/test.sh -m 'not real' runs the quick part only.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh dev
. scripts/downloads.sh quickstart/downloads  # the real checkpoint that some tests run on
[[ "$*" == *"not real"* ]] || scripts/setup_vllm.sh
ruff check .
ruff format --check .
mypy
export OMP_NUM_THREADS=1  # test processes, and those that they start, share the cores
[[ "$*" == *"not real"* ]] && processes=3 || processes=2  # real tests start some of their own
python -m pytest -n $processes --dist loadfile "$@"  # each process takes one file at a time
[[ "$*" == *"not real"* ]] || scripts/oldest.sh
