"""Conversion at full size against `cp -r`: wall time and peak memory on a synthetic LLaMA-7B-shaped
fp16 checkpoint. With --calibrate: the same for calibration, projected to a whole model.

    python scripts/bench/convert.py --out docs/results/convert-7b.json  # needs 28 GB of disk
    python scripts/bench/convert.py --layers 3 --calibrate TEXT --out docs/results/calibrate-7b.json

Every round copies and converts once. The source is dropped from the page cache before each, and
each is timed until its files are on the disk (`sync`). `rss` is the peak resident set of the whole
process, and `anonymous` the peak of its memory that is not backed by a file. Prints a table, writes
JSON, and removes its files.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from measure import SHAPES, show, write
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from coca_hf.convert.layer_fit import STEPS

CONVERT = "import sys; from coca_cli.main import convert; sys.argv[0] = 'coca-convert'; convert()"
MACHINE = {  # beside what `write` says of it
    "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("."),
        help="on the disk to measure; files go in a new folder",
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-7b")
    parser.add_argument("--layers", type=int, help="in place of the shape's")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-shard-size", default="1GB")
    parser.add_argument("--calibrate", type=Path, help="text to calibrate on, once")
    parser.add_argument("--calibrate-tokens", type=int, default=32768)
    parser.add_argument("--calibrate-passes", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix=".bench-convert-") as folder:
        if options.calibrate:
            result = measure_calibration(Path(folder), options)
            print(json.dumps(result, indent=1))
        else:
            result = measure(Path(folder), options)
            columns = {
                **{"round": "round", "command": "command", "seconds, sync included": "seconds"},
                **{"user": "user_seconds", "system": "system_seconds"},
                **{"peak RSS, GB": ("rss_bytes", 1e-9)},
                **{"peak anonymous, GB": ("anonymous_bytes", 1e-9)},
            }
            show("Converting beside copying", columns, result["rows"])
            print("ratio by round:", *(f"{ratio:.2f}" for ratio in result["ratio_by_round"]))
    write(result, options.out)


def measure(folder: Path, options: argparse.Namespace) -> dict:
    source = folder / "source"
    layers = {"num_hidden_layers": options.layers} if options.layers else {}
    num_bytes = make_source(source, LlamaConfig(**SHAPES[options.shape] | layers))
    commands = {
        "cp -r": ["cp", "-r", str(source), str(folder / "copy")],
        "coca-convert": [
            *(sys.executable, "-c", CONVERT, str(source), str(folder / "coca")),
            *("--max-shard-size", options.max_shard_size),
        ],
    }
    rows = []
    for number in range(options.rounds):
        for name, command in commands.items():
            forget(source)
            rows.append({"round": number + 1, "command": name, **run(command)})
            print(rows[-1], file=sys.stderr)
            shutil.rmtree(command[3] if name == "cp -r" else folder / "coca")
            os.sync()
    seconds = {
        name: [row["seconds"] for row in rows if row["command"] == name] for name in commands
    }
    peaks = [row for row in rows if row["command"] == "coca-convert"]
    return {
        "task": "convert-bench",
        "source_bytes": num_bytes,
        "rows": rows,
        "ratio_by_round": [
            ours / copy
            for ours, copy in zip(seconds["coca-convert"], seconds["cp -r"], strict=True)
        ],
        "peak_rss_bytes": max(row["rss_bytes"] for row in peaks),
        "peak_anonymous_bytes": max(row["anonymous_bytes"] for row in peaks),
        "hardware": {"sha_ni": " sha_ni " in Path("/proc/cpuinfo").read_text(), **MACHINE},
    }


def measure_calibration(folder: Path, options: argparse.Namespace) -> dict:
    """Calibrate the source once, and project the seconds of every part of a layer to all layers and
    to the default tokens and steps.
    """
    source, layers = folder / "source", options.layers or SHAPES[options.shape]["num_hidden_layers"]
    config = LlamaConfig(**SHAPES[options.shape] | {"num_hidden_layers": layers})
    num_bytes = make_source(source, config)
    byte_tokenizer().save_pretrained(source)
    extra = ["--calibrate", options.calibrate, "--calibrate-tokens", options.calibrate_tokens]
    if options.calibrate_passes:
        extra += ["--calibrate-passes", options.calibrate_passes]
    row = run([sys.executable, "-c", CONVERT, str(source), str(folder / "coca"), *map(str, extra)])
    facts = json.loads((folder / "coca" / "conversion.json").read_text())["calibration"]
    tokens = facts["tokens"] + facts["repeated_tokens"]
    steps = tokens // facts["block_tokens"] * facts["passes"]
    busy = (row["user_seconds"] + row["system_seconds"]) / row["seconds"]
    per_layer = {part: spent / layers for part, spent in facts["seconds_by_part"].items()}
    factors = {"forward": 65536 / tokens, "steps": STEPS / steps}
    projected = {part: spent * factors.get(part, 1.0) for part, spent in per_layer.items()}
    all_layers = SHAPES[options.shape]["num_hidden_layers"]
    return {
        "task": "calibrate-bench",
        "source_bytes": num_bytes,
        "layers": layers,
        "tokens": tokens,
        "steps": steps,
        **row,
        "share_of_a_processor": busy,
        "seconds_per_layer": per_layer,
        "projected_seconds_per_layer": projected,
        "projected_hours": sum(projected.values()) * all_layers / 3600,
        "projected_hours_of_processor": sum(projected.values()) * busy * all_layers / 3600,
        "hardware": MACHINE,
    }


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: number for number, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def make_source(directory: Path, config: LlamaConfig) -> int:
    """Write a checkpoint of random fp16 weights (deviation 0.02, norms 1) in shards; return the
    bytes of its tensors. One shard at a time is in memory.
    """
    config.dtype, config.architectures = "float16", ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = LlamaForCausalLM(config).half().state_dict()
    split = split_torch_state_dict_into_shards(shapes, max_shard_size="2GB")
    torch.manual_seed(0)
    for file, names in split.filename_to_tensors.items():
        tensors = {name: torch.ones(shapes[name].shape, dtype=torch.float16) for name in names}
        for tensor in tensors.values():
            if tensor.dim() > 1:
                tensor.normal_(0, 0.02)
        save_file(tensors, directory / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return split.metadata["total_size"]


def forget(directory: Path) -> None:
    """Drop a directory's files from the page cache, so they are read from the disk."""
    os.sync()
    for file in directory.iterdir():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(command: list[str]) -> dict:
    """Seconds until a command has ended and everything is on the disk, with its peak memory and
    processor time.
    """
    start, anonymous = time.perf_counter(), 0
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        anonymous = max(anonymous, anonymous_bytes(process.pid))
        time.sleep(0.02)
    ended = time.perf_counter()
    if status:
        raise SystemExit(f"{command}: ended with status {status}")
    subprocess.run(["sync"], check=True)
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "seconds_before_sync": round(ended - start, 2),
        "user_seconds": round(usage.ru_utime, 2),
        "system_seconds": round(usage.ru_stime, 2),
        "rss_bytes": usage.ru_maxrss * 1024,
        "anonymous_bytes": anonymous,
    }


def anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
