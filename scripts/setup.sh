# Sourced by quickstart.sh and test.sh: makes .venv with coca_hf in its tested versions, and activates it.
# Usage: . scripts/setup.sh EXTRA   (an extra of pyproject.toml). A second run reuses it.
extra=$1
python=${PYTHON:-python3}

if ! command -v "$python" > /dev/null; then
    echo "error: $python not found, expected Python 3.10 or newer; set PYTHON=/path/to/python3" >&2
    exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "error: $python is $("$python" --version), expected 3.10 or newer; set PYTHON=/path/to/python3" >&2
    exit 2
fi

wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)
if [ "$(cat ".venv/installed-$extra" 2> /dev/null)" != "$wanted" ]; then
    echo "Installing into .venv (about 2 minutes)"
    "$python" -m venv .venv
    . .venv/bin/activate
    torch=$(grep '^torch==' constraints.txt)
    if [ "$(uname)" = Linux ] && ! nvidia-smi -L > /dev/null 2>&1; then
        # Without a GPU, PyPI's wheel would bring gigabytes of CUDA. A wheel at hand (PIP_FIND_LINKS) comes first.
        pip install --quiet "$torch+cpu" 2> /dev/null ||
            pip install --quiet "$torch+cpu" --index-url https://download.pytorch.org/whl/cpu
    else
        pip install --quiet "$torch"
    fi
    pip install --quiet --constraint constraints.txt --editable ".[$extra]"
    echo "$wanted" > ".venv/installed-$extra"
fi
. .venv/bin/activate
export PIP_DISABLE_PIP_VERSION_CHECK=1
