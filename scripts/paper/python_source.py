"""Write this machine's Python sources as JSON lines, for the paper's quarter of code."""

import argparse
import json
import sysconfig
from pathlib import Path

from coca_hf.files import replace_text

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("out", metavar="OUT.jsonl", type=Path)
out = parser.parse_args().out
if not out.exists():
    roots = dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    files = sorted({file for root in roots for file in root.rglob("*.py")})
    texts = (
        file.read_text(encoding="utf-8", errors="ignore")
        for file in files
        if "test" not in file.parts
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, "".join(json.dumps({"text": text}) + "\n" for text in texts if text.strip()))
