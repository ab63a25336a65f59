#!/usr/bin/env bash
# Make .venv-oldest with the lowest versions that pyproject.toml allows, and run the quick part of the test suite on
# them. A second run reuses it.
set -euo pipefail
cd "$(dirname "$0")/.."
# Everything that the base and the extras require, at its lowest version.
lowest=$(sed -n '/^dependencies/,/^dev/p' pyproject.toml | sed 's/ *#.*//' |
    grep -o '"[a-zA-Z0-9_-]*\(\[[a-z]*\]\)\?>=[0-9.]*' | sed 's/"//; s/\[.*\]//; s/>=/==/' | sort -u | grep -v flash-attn)
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
    pip install --quiet --constraint .venv-oldest/lowest.txt --editable ".[dev]"
    echo "$wanted" > .venv-oldest/installed
fi
. .venv-oldest/bin/activate
export OMP_NUM_THREADS=1
python -m pytest -q -n 3 --dist loadfile -m 'not real' -W default  # warnings of old versions are not errors
