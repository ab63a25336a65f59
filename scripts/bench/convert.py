"""Conversion at full size against `cp -r`: wall time and peak memory on a synthetic LLaMA-7B-shaped
fp16 checkpoint.

    python scripts/bench/convert.py --out docs/results/convert-7b.json  # needs 28 GB of disk

Every round copies and converts once, in turn; the source is dropped from the page cache before
each, and each is timed until its files are on the disk (`sync`). Memory: `rss` is the peak resident
set of the whole process, `anonymous` the peak of what is not backed by a file. Prints a table,
writes JSON, and removes what it made.
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

import numpy as np
import torch
from measure import SHAPES, write
from transformers import LlamaConfig, LlamaForCausalLM

CONVERT = "import sys; from coca_cli.main import convert; sys.argv[0] = 'coca-convert'; convert()"
BLOCK_NUMBERS = 1 << 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix=".bench-convert-") as folder:
        result = measure(Path(folder), options)
    show(result)
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
        "hardware": {
            "sha_ni": " sha_ni " in Path("/proc/cpuinfo").read_text(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
    }


def make_source(directory: Path, config: LlamaConfig, shard_bytes: int = 5_000_000_000) -> int:
    """Write a checkpoint of finite random fp16 numbers below 2, in shards; returns the bytes of its
    tensors.
    """
    directory.mkdir()
    config.dtype = "float16"
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    random = np.random.default_rng(0).integers(0, 1 << 16, BLOCK_NUMBERS, dtype=np.uint16) & 0xBFFF
    data = memoryview(random).cast("B")
    shards: list[dict[str, tuple]] = [{}]
    with torch.device("meta"):
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in LlamaForCausalLM(config).state_dict().items()
        }
    for name, shape in shapes.items():
        if sum(2 * int(np.prod(other)) for other in shards[-1].values()) > shard_bytes:
            shards.append({})
        shards[-1][name] = shape
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, end = {}, 0
        for name, shape in shard.items():
            start, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (directory / file).open("wb", buffering=0) as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for index, (name, shape) in enumerate(shard.items()):
                offset = 2 * 7919 * (index + total % 1000)  # so that no two tensors are equal
                left = 2 * int(np.prod(shape))
                while left:
                    left -= stream.write(data[offset : offset + min(left, len(data) - offset)])
                    offset = 0
                weight_map[name] = file
            os.fsync(stream.fileno())
        total += end
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def forget(directory: Path) -> None:
    """Drop a directory's files from the page cache, so that they come from the disk."""
    os.sync()
    for file in directory.iterdir():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(command: list[str]) -> dict:
    """Seconds until a command has ended and the disk has everything; its peak memory and its
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


def show(result: dict) -> None:
    print(
        "| round | command | seconds, sync included | user | system | peak RSS | peak anonymous |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for row in result["rows"]:
        print(
            f"| {row['round']} | {row['command']} | {row['seconds']:.1f} | "
            f"{row['user_seconds']:.1f} "
            f"| {row['system_seconds']:.1f} | {row['rss_bytes'] / 1e9:.2f} GB | "
            f"{row['anonymous_bytes'] / 1e9:.2f} GB |"
        )
    print(f"ratio by round: {', '.join(f'{ratio:.2f}' for ratio in result['ratio_by_round'])}")


if __name__ == "__main__":
    main()
