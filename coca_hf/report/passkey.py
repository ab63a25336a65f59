"""Passkey retrieval: against length, where in the prompt, and how far from its end (the paper's figures 4 and 5)."""

from collections.abc import Iterable

from coca_hf.report.against_length import (
    NBSP,
    Measured,
    against_length,
    curve_figure,
    keys_of,
    numbered,
    trained_lengths,
)
from coca_hf.report.document import Bullets, Figure, Grid, Section
from coca_hf.report.plots import Curve, Heat, heat_figure
from coca_hf.report.rows import Table, read_raw, trained_length

GRID = "; as asked for, which short prompts meet as nearly as their filler allows"
FIFTHS = [f"{20 * fifth}-{20 * fifth + 20}%" for fifth in range(5)]  # lines of a heat map where depths are no grid


def passkey(measured: Measured) -> Section | None:
    section = against_length("passkey", measured)
    for number, table in enumerate(measured.of_task("passkey"), 1):
        section.parts.extend(_where_found(table, number))  # type: ignore[union-attr]
    return section


def _where_found(table: Table, number: int) -> Iterable:
    """Heat map of length and depth, and the share found against the distance from the passkey to the end."""
    found = {
        name: by_length
        for name, rows in table.series.items()
        if (by_length := {row["length"]: cases for row in rows if (cases := read_raw(row, "cases"))})
    }
    if not found:
        return
    depths = _depths(table, found)
    heats, same = [], []
    for name, by_length in found.items():
        shares = [
            [
                _share(case for case in by_length.get(length, []) if _depth(case, table) == depth)
                for length in table.lengths
            ]
            for depth in depths
        ]
        values = {share for line in shares for share in line if share is not None}
        if len(values) == 1:
            same.append(f"{name}: {values.pop():.2f} at every context length and depth, so no heat map.")
        else:
            heats.append(Heat(name, [*map(str, table.lengths)], [*depths.values()], shares))
    for panel, heat in enumerate(heats, 1):
        yield Figure(
            name=f"{numbered('passkey-depth', number)}-of-{panel}",
            alt=f"Share of passkeys that {heat.title} finds, by context length and depth in the prompt; a number a "
            f"cell.",
            caption=f"Where {heat.title} finds the passkey: context length across, depth in the prompt down (0% is its "
            f"beginning{GRID * bool(table.rows[0]['depths'])}).",
            draw=heat_figure(heat, "context length (tokens)", "depth"),
            height=0.9 + 0.28 * min(len(depths), 20),
        )
    if same:
        yield Bullets(same)
    yield from _inside_and_beyond(table, found, number)
    yield from _by_distance(table, found, number)


def _depths(table: Table, found: dict[str, dict[int, list[dict]]]) -> dict[int, str]:
    """The lines of heat maps and their names: the points of the grid that cases were asked on, else fifths."""
    if not (grid := table.rows[0]["depths"]):
        return dict(enumerate(FIFTHS))
    points = {_depth(case, table) for by_length in found.values() for cases in by_length.values() for case in cases}
    return {point: f"{100 * point / max(grid - 1, 1):.0f}%" for point in sorted(points)}


def _depth(case: dict, table: Table) -> int:
    """The line of a case. On a grid cases take its points in turn, with as much filler before them as comes nearest."""
    if grid := table.rows[0]["depths"]:
        return case["case"] % grid
    return min(int(case["depth"] * len(FIFTHS)), len(FIFTHS) - 1)


def _inside_and_beyond(table: Table, found: dict[str, dict[int, list[dict]]], number: int) -> Iterable:
    """Share found against length, of passkeys within the trained length of the end and of those beyond it (figure 4).

    Nothing where no model's trained length is known, or none has a passkey beyond it.
    """
    parts = []
    for side, words in (("inside", "at most"), ("beyond", "more than")):
        keys, curves, lines = keys_of(table), [], []
        for name, rows in table.series.items():
            cases = {row["length"]: _on_side(row, found.get(name, {}).get(row["length"], []), side) for row in rows}
            known = [(length, share) for length, some in cases.items() if (share := _share(some)) is not None]
            if known:
                curves.append(Curve(keys[name], *map(list, zip(*known, strict=True))))
                lines.append([name, *(_share_of(cases.get(length, [])) for length in table.lengths)])
        if curves:
            parts += [
                curve_figure(
                    numbered(f"passkey-{side}", number),
                    f"Share found against context length, of passkeys {side} the trained length: the table beside it.",
                    f"Share found of the passkeys that stand {words} the trained length of their model from the end of "
                    f"the prompt, against context length.",
                    curves,
                    "share found",
                    y_scale="share",
                    trained_lengths=trained_lengths(table),
                ),
                Grid([f"{side} the trained length", *map(str, table.lengths)], lines, numbers_from=1),
            ]
    yield from parts if any(isinstance(part, Figure) and "beyond" in part.name for part in parts) else ()


def _share_of(cases: list[dict]) -> str:
    share = _share(cases)
    return "" if share is None else f"{share:.2f}{NBSP}of{NBSP}{len(cases)}"


def _on_side(row: dict, cases: list[dict], side: str) -> list[dict]:
    trained = trained_length(row)
    return [case for case in cases if trained and (case["distance"] > trained) == (side == "beyond")]


def _by_distance(table: Table, found: dict[str, dict[int, list[dict]]], number: int) -> Iterable:
    everything = [case for by_length in found.values() for some in by_length.values() for case in some]
    edges = sorted({_octave(case["distance"]) for case in everything})
    keys, curves, lines = keys_of(table), [], []
    for name, by_length in found.items():
        cases = [case for some in by_length.values() for case in some]
        within = {edge: [case for case in cases if _octave(case["distance"]) == edge] for edge in edges}
        shares = [_share(within[edge]) for edge in edges]
        known = [(edge, share) for edge, share in zip(edges, shares, strict=True) if share is not None]
        curves.append(Curve(keys[name], *map(list, zip(*known, strict=True))))
        lines.append([name, *("" if share is None else f"{share:.2f}" for share in shares)])
    yield curve_figure(
        numbered("passkey-distance", number),
        "Share found against the distance from the passkey to the end of the prompt: the table beside it.",
        "Share found against the distance from the passkey to the end of the prompt, in tokens, over all context "
        "lengths: each point is the octave up to its distance.",
        curves,
        "share found",
        x_label="distance (tokens)",
        y_scale="share",
        trained_lengths=trained_lengths(table),
    )
    yield Grid(["distance", *(f"≤{NBSP}{edge}" for edge in edges)], lines, numbers_from=1)


def _octave(distance: int) -> int:
    """The least power of two that is not below `distance`."""
    return 1 << max(distance - 1, 0).bit_length()


def _share(cases: Iterable[dict]) -> float | None:
    correct = [case["correct"] for case in cases]
    return sum(correct) / len(correct) if correct else None
