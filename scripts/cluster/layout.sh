# Source it with a layout to export the variables that `accelerate launch --config_file LAYOUT` gives its processes, without
# their ranks: for launchers that start the processes themselves and pass on their exit codes.
while IFS= read -r setting; do
    export "${setting?}"
done < <(accelerate launch --config_file "$1" --num_machines 1 --num_processes 1 --main_process_port 0 --no_python env |
    grep -E '^(ACCELERATE|FSDP)_')
[ -n "${ACCELERATE_MIXED_PRECISION:-}" ] || { echo "$1: accelerate does not take this layout" >&2; exit 2; }
