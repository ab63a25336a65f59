#!/usr/bin/env bash
# Rehearse scripts/bench/gpu.sh as a lent GPU machine would run it: the files of a checkout only, older versions of torch,
# transformers and typer, packages that are missing there as wheels only, read-only site-packages, an empty HOME, and no
# network.
#
#   scripts/bench/rehearse.sh [PART…]    # about 20 minutes of 2 cores; makes .venv-gpu (gigabytes, of CUDA) and .whl
#
# .whl/ holds the wheels for the real machine (Python 3.12, x86-64); the rehearsal installs the same versions.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3.12}
wheels=(pydantic==2.14.3 pydantic-core==2.50.4 typing-inspection annotated-types datasets==5.2.0 'dill<0.4.2'
    'multiprocess<0.70.20' gguf==0.19.0 ruamel-yaml==0.19.1 typer==0.29.2)
# Triton 3.6, which comes with this torch, interprets kernels only with an older numpy, which warns
installed=(torch==2.11.0 numpy==2.3.5 transformers==5.17.0 accelerate==1.15.0 peft opt-einsum pyarrow pandas psutil rich
    typer==0.28.0 tensorboard pillow matplotlib jinja2 xxhash requests pytest pytest-timeout pytest-xdist)
if [ ! -d .whl ]; then
    "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        -d .whl "${wheels[@]}"
fi
if [ ! -e .venv-gpu/installed ]; then
    "$python" -m venv .venv-gpu
    .venv-gpu/bin/pip install -q "${installed[@]}"
    .venv-gpu/bin/pip uninstall -q -y pydantic pydantic-core datasets ruamel-yaml 2> /dev/null || true
    chmod -R a-w .venv-gpu/lib
    touch .venv-gpu/installed
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/home" "$work/tree"
git ls-files -co --exclude-standard -z | xargs -0 cp --parents -t "$work/tree"
cp -r .whl "$work/tree"
venv=$PWD/.venv-gpu
cd "$work/tree"
unshare --net env -i HOME="$work/home" PATH="$venv/bin:/usr/bin:/bin" SMOKE=1 PYTEST_ADDOPTS="-W default" \
    scripts/bench/gpu.sh "$work/results" "$@"
