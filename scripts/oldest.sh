#!/usr/bin/env bash
# Make .venv-oldest with the lowest versions that pyproject.toml allows, and run on them the tests of what depends on
# versions most: models, conversion, training, who loads what in two FSDP2 processes, what the commands print, documents,
# adapters and the report. The whole quick part would take about 7 minutes of two cores. A second run finds it made.
set -euo pipefail
cd "$(dirname "$0")/.."
# Everything that the base, the extras of [all] and peft ask for, at the lowest version.
lowest=$(sed -n '/^dependencies/,/^all/p; /^peft/p' pyproject.toml |
    grep -o '"[a-z0-9_]*>=[0-9.]*' | sed 's/"//; s/>=/==/')
wanted=$(cat pyproject.toml scripts/oldest.sh | cksum)
if [ "$(cat .venv-oldest/installed 2> /dev/null)" != "$wanted" ]; then
    echo "Installing the oldest supported versions into .venv-oldest (about 3 minutes)"
    "${PYTHON:-python3}" -m venv .venv-oldest
    . .venv-oldest/bin/activate
    echo "$lowest" > .venv-oldest/lowest.txt
    torch=$(grep '^torch==' .venv-oldest/lowest.txt)+cpu
    # A wheel at hand (PIP_FIND_LINKS) comes before PyTorch's own index.
    pip install --quiet "$torch" 2> /dev/null ||
        pip install --quiet "$torch" --index-url https://download.pytorch.org/whl/cpu
    pip install --quiet --constraint .venv-oldest/lowest.txt --editable ".[all,peft]" opt_einsum pytest pytest-timeout pytest-xdist
    echo "$wanted" > .venv-oldest/installed
fi
. .venv-oldest/bin/activate
export OMP_NUM_THREADS=1
# Transformers 5.16 reads no GGUF, good or bad. The warnings of old versions are no errors.
python -m pytest -q -n 2 --dist loadfile tests/test_{documents,peft}.py tests/report/test_report.py \
    tests/train/test_{blocks,held_out,loading,objectives,recipe,resume,stages}.py \
    tests/convert/test_{bad_input,conversion,families,patch}.py tests/models/test_{cache,families,golden,llama,rotary}.py \
    -k 'not compile and not killed' -W default \
    --deselect 'tests/convert/test_bad_input.py::test_damaged_source_is_one_line_and_exit_code_2[bad gguf]'
