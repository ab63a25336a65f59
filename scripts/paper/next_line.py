"""Make cases of four lines of a play and four candidates for the next.

They are for `tasks/next_line.yaml`, because lm-eval's benchmarks are on the hub, and a model that
has trained on Shakespeare for minutes cannot answer them.
"""

import argparse
import json
import random
import sys
from pathlib import Path

from coca_hf.files import replace_text

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("plays", metavar="PLAYS", type=Path, help="a directory of .txt files")
parser.add_argument("out", metavar="OUT.jsonl", type=Path)
args = parser.parse_args()
plays, out = args.plays, args.out
if not out.exists():
    rng, cases = random.Random(0), []
    for play in sorted(plays.glob("*.txt")):
        text = play.read_text(encoding="utf-8").splitlines()
        lines = [line.strip() for line in text if len(line.strip()) > 20]
        for _ in range(100):
            first = rng.randrange(len(lines) - 4)
            right, *wrong = lines[first + 4], *rng.sample(lines, 3)
            answer = rng.randrange(4)
            choices = [*wrong[:answer], right, *wrong[answer:]]
            cases.append(
                {"lines": "\n".join(lines[first : first + 4]), "choices": choices, "answer": answer}
            )
    if not cases:
        sys.exit(f"{plays}: got no plays, expected a directory of .txt files")
    rng.shuffle(cases)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, "".join(json.dumps(case) + "\n" for case in cases))
