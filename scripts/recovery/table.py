"""Print the tables of docs/results/recovery/README.md from what run.py measured.

If a run has several seeds, a number is their mean, with the smallest and the largest in brackets.
The second table has the divergence of attention maps, by what the original's heads attend to with
more than half of their mass.
"""

import argparse
import sys
from pathlib import Path

from coca_hf.report.read import read_tables

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("out", nargs="?", type=Path, default=Path("runs/recovery"))
out = parser.parse_args().out
measured: dict[str, dict[str, dict[str, float]]] = {}  # numbers by run, column and seed
columns: list[str] = []
by_kind: dict[str, dict[str, list[float]]] = {}  # divergences by run and kind of head
KINDS = ("first token", "token before", "others")
TEXTS = {"books-test.parquet": "novels", "held-out": "Shakespeare"}


def note(row: dict, column: str, value: float) -> None:
    if column not in columns:
        columns.append(column)
    run = row["model"].split(", seed")[0]
    by_seed = measured.setdefault(run, {}).setdefault(column, {})
    if row["model"] in by_seed:
        sys.exit(
            f"{row['model']}: got rows of different settings for {column!r}, expected one; "
            f"delete the others from {out / 'rows' / 'rows.jsonl'}"
        )
    by_seed[row["model"]] = value


def shown(values: list[float], original: float | None = None) -> str:
    if not values:
        return ""
    mean = sum(values) / len(values)
    digits = 0 if mean >= 1000 else 1 if mean >= 10 else 2
    text = f"{mean:,.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
    return text if original is None else f"{text}, {mean / original:.2f} x"


for table in read_tables([out / "rows"]):
    for row in (row for row in table.rows if row["value"] is not None):
        text = Path(row.get("data") or "").name
        source = TEXTS.get(text, text)
        if row["task"] in ("perplexity", "position-loss"):
            note(row, f"perplexity, {source}, {row['length']}", row["value"])
        elif row["task"] == "copying":
            copied = "passage read again" if row.get("data") else "second copy"
            note(row, f"{copied}, {row['length']}, nats", row["value"])
        elif row["task"] == "attention-maps":
            note(row, f"attention, {row['length']}, nats", row["value"])
            note(row, f"mass on first token, {row['length']}", row["sink"])
            for head in table.read_raw(row, "heads") or []:
                looks_back = 1 if head["baseline_previous"] > 0.5 else 2
                kind = KINDS[0 if head["baseline_sink"] > 0.5 else looks_back]
                of_run = by_kind.setdefault(row["model"].split(", seed")[0], {})
                of_run.setdefault(kind, []).append(head["divergence"])
        elif row["task"] == "passkey":
            note(row, f"passkey, {row['length']}", row["value"])
        elif row["task"] == "recall":
            note(row, f"key-value recall, {row['length']}", row["value"])

print("| run | " + " | ".join(columns) + " |")
print("|---|" + "---:|" * len(columns))
for run, found in measured.items():
    cells = []
    for column in columns:
        is_ratio = column.startswith("perplexity") and run != "original"
        of_original = measured.get("original", {}).get(column, {})
        ratio = of_original.get("original") if is_ratio else None
        cells.append(shown([*found.get(column, {}).values()], ratio))
    print(f"| {run} | " + " | ".join(cells) + " |")

heads = {kind: len(found) for kind, found in by_kind.get("original", {}).items()}
if heads:
    named = (f"{kind} ({number} heads)" for kind, number in heads.items())
    print(f"\n| run | {' | '.join(named)} |")
    print("|---|" + "---:|" * len(heads))
for run, kinds in by_kind.items():
    means = (sum(kinds[kind]) / len(kinds[kind]) for kind in heads)
    print(f"| {run} | " + " | ".join(f"{max(mean, 0):.2f}" for mean in means) + " |")
