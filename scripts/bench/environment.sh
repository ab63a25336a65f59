# Sourced by scripts that run on a GPU machine where coca_hf is not installed: makes the package importable and its
# commands callable from this checkout, without writing into site-packages, and installs the wheels in .whl/.
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$PATH"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
mkdir -p "$site/bin"
if compgen -G '.whl/*.whl' > /dev/null; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl
fi
if ! python3 -m pip show -q coca-hf 2> /dev/null; then
    # coca_hf reads its own version from the metadata of its distribution
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
    mkdir "$site/coca_hf-$version.dist-info"
    printf 'Metadata-Version: 2.1\nName: coca-hf\nVersion: %s\n' "$version" > "$site/coca_hf-$version.dist-info/METADATA"
    for command in convert train eval; do
        function=${command/eval/evaluate}
        printf '#!/bin/sh\nexec python3 -c "from coca_cli.main import %s; %s()" "$@"\n' "$function" "$function" \
            > "$site/bin/coca-$command"
        chmod +x "$site/bin/coca-$command"
    done
fi
command -v python > /dev/null || ln -s "$(command -v python3)" "$site/bin/python"
