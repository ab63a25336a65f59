"""What the figures of rotary boundaries draw, against counts by hand."""

import math

import numpy as np
import pytest

from coca_hf.report import read_page
from coca_hf.report.plots import draw
from tests.report.made import row, with_raw, write_rows

LAYERS, HEADS = 2, 3
PAIRS = [  # layer, head, angle in degrees, and tau in tokens where the angle is above 180
    (0, 0, 0.0, None),
    (0, 0, 9.9, None),
    (0, 0, 359.9, 0.4),
    (0, 1, 181.0, 1.0),
    (0, 1, 270.0, 1.9),
    (0, 2, 90.0, None),
    (1, 0, 200.0, 2.0),
    (1, 1, 300.0, 64.0),
    (1, 1, 310.0, 100.0),
    (1, 1, 45.0, None),
    (1, 2, 190.0, 2.0**22),
    (1, 2, 195.0, 2.0**40),
]


def angle_lines(pairs):
    """The raw table `angles`: 36 bins of angles, 24 of tau, of which bin i begins at 2^(i-1) and
    the last is open.
    """
    lines = []
    for layer in range(LAYERS):
        for head in range(HEADS):
            line = {"layer": layer, "head": head, "angle_counts": [0] * 36, "tau_counts": [0] * 24}
            for _, _, degrees, tau in [pair for pair in pairs if pair[:2] == (layer, head)]:
                line["angle_counts"][int(degrees // 10)] += 1
                if tau is not None:
                    line["tau_counts"][min(max(math.floor(math.log2(tau)) + 1, 0), 23)] += 1
            lines.append(line)
    return lines


def decay_lines(scale):
    return [
        {"layer": layer, "distance": s, "bound_rope": rope / (s + 1), "bound_coca": coca + s}
        for layer, rope, coca in ((0, scale, 7 * scale), (1, 2 * scale, 7 * scale + 1))
        for s in (0, 1, 4, 16)
    ]


@pytest.fixture
def axes(tmp_path):
    """The axes of every figure by name: of a model at two lengths, the longer counts, and of strict."""
    directory = tmp_path / "run"
    short, long, coca = (
        row(model, length=length, value=0.5, task="boundary")
        for model, length in (("llama", 256), ("llama", 512), ("coca", 512))
    )
    coca["coca_constraint"] = "strict"
    strict = [(0, 0, 0.0, None), (1, 2, 350.0, 8.0)]
    rows = []
    for made, pairs, scale in ((short, PAIRS[:1], 99.0), (long, PAIRS, 2.0), (coca, strict, 3.0)):
        made = with_raw(directory, "angles", made, angle_lines(pairs))
        rows.append(with_raw(directory, "decay", made, decay_lines(scale)))
    figures = read_page([write_rows(directory, *rows)]).figures()
    return {figure.name: draw(figure.drawing, 5, figure.height, True).axes[0] for figure in figures}


def drawn(axes):
    """The points of each line by its name."""
    return {
        line.get_label(): line.get_xydata().tolist()
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def test_the_histogram_of_angles_has_the_share_of_each_bin_from_edge_to_edge(axes):
    curves = drawn(axes["boundary-angle"])
    assert curves.keys() == {"llama", "coca"}
    angles = [degrees for _, _, degrees, _ in PAIRS]
    expected = []
    for low in range(0, 360, 10):
        share = sum(low <= angle < low + 10 for angle in angles) / len(angles)
        expected += [[low, share], [low + 10, share]]
    assert curves["llama"] == [pytest.approx(point) for point in expected]
    ends = [[0, 0.5], [10, 0.5], [10, 0], [350, 0.5], [360, 0.5]]
    assert curves["coca"][:3] + curves["coca"][-2:] == ends
    assert axes["boundary-angle"].get_xscale() == "linear"


def test_the_curve_of_tau_is_the_share_of_pairs_that_rise_over_at_least_so_many_tokens(axes):
    curves = drawn(axes["boundary-tau"])
    taus = [tau for _, _, _, tau in PAIRS if tau is not None]
    places = [2**power for power in range(23)]
    expected = [[place, sum(tau >= place for tau in taus) / len(PAIRS)] for place in places]
    assert expected[0][1] == 7 / 12
    assert expected[-1][1] == 2 / 12
    assert curves["llama"] == [pytest.approx(point) for point in expected]
    assert curves["coca"] == [[place, 0.5 if place <= 8 else 0] for place in places]


def test_the_line_of_decay_is_the_mean_bound_over_layers_of_rope_or_of_strict_coca(axes):
    curves = drawn(axes["boundary-decay"])
    assert curves["llama"] == [[s, pytest.approx(2.0 * 1.5 / (s + 1))] for s in (1, 4, 16)]
    assert curves["coca"] == [[s, pytest.approx(21.0 + 0.5 + s)] for s in (1, 4, 16)]


def test_a_kept_layer_of_strict_has_the_bound_of_rope(tmp_path):
    made = row("coca", value=0.5, task="boundary", coca_constraint="strict", coca_kept_layers=[1])
    made = with_raw(tmp_path / "run", "decay", made, decay_lines(3.0))
    (figure,) = read_page([write_rows(tmp_path / "run", made)]).figures()
    (curve,) = drawn(draw(figure.drawing, 5, figure.height, True).axes[0]).values()
    assert curve == [[s, pytest.approx((21.0 + s + 6.0 / (s + 1)) / 2)] for s in (1, 4, 16)]


def test_the_heat_map_has_the_share_of_scenario_d_by_layer_and_head(axes):
    (mesh,) = axes["boundary-layers-of-1"].collections
    expected = [[1 / 3, 1], [1, 2 / 3], [0, 1]]  # heads down, layers across
    np.testing.assert_allclose(mesh.get_array().reshape(HEADS, LAYERS), expected)
    (mesh,) = axes["boundary-layers-of-2"].collections
    of_coca = mesh.get_array().reshape(HEADS, LAYERS).filled(-1).tolist()
    assert of_coca == [[0, -1], [-1, -1], [-1, 1]]
