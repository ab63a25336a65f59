"""Draw speed against length, CoCA beside LLaMA, from the results of model.py and `decode.py --what
step`.

    python scripts/bench/plot.py docs/results/{prefill-lengths,prefill,decode}-cpu.json --out docs/speed-cpu.png

This is the paper's figure of speed as a ratio: tokens/s over LLaMA's in the same run. Several
results of one kind are drawn as one curve.
"""

import argparse
import json
from pathlib import Path

from coca_hf.page import Curve, Key, Plot
from coca_hf.report.plots import draw, to_png

KINDS = {"prefill-bench": "prefill", "decode-step-bench": "decoding"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    plot = Plot(
        curves([json.loads(file.read_text()) for file in options.results]),
        "tokens/s, times LLaMA's",
        x_label="tokens (of the prompt, or in the cache)",
        y_scale="linear",
    )
    options.out.write_bytes(to_png(draw(plot, 7.5, 3.6, True)))


def curves(results: list[dict]) -> list[Curve]:
    """Raises SystemExit for a result of another benchmark."""
    points: dict[tuple[str, str], dict[int, float]] = {}
    for result in results:
        if result["task"] not in KINDS:
            raise SystemExit(
                f"plot.py: got a result of {result['task']!r}, expected one of {', '.join(KINDS)}"
            )
        for row in result["rows"]:
            if ratio := row.get("over_llama"):
                of_rival = points.setdefault((row["rival"], KINDS[result["task"]]), {})
                of_rival[row["length"]] = ratio
    lengths = sorted({length for values in points.values() for length in values})
    rivals = list(dict.fromkeys(rival for rival, _ in points if not rival.startswith("LLaMA")))
    drawn = [Curve(Key("LLaMA", color=6, marked=False), lengths, [1.0] * len(lengths))]
    for (rival, kind), values in sorted(points.items()):
        if rival in rivals:
            style = list(KINDS.values()).index(kind)
            *model, attention = rival.split()
            name = f"{' '.join(model)}, attention {attention}" if model[1:] else rival
            key = Key(f"{kind}, {name}", color=rivals.index(rival), style=style)
            drawn.append(Curve(key, sorted(values), [values[length] for length in sorted(values)]))
    return drawn


if __name__ == "__main__":
    main()
