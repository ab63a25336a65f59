"""Initial angles of queries and keys: counts and bounds against closed forms, and rows."""

import cmath
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from coca_hf import CocaError, patch_
from coca_hf.evaluate.boundary import (
    ANGLE_BINS,
    TAU_BINS,
    boundary_rows,
    count_angles,
    decay_distances,
    draw_positions,
    largest_steps,
    partial_sums,
)
from coca_hf.evaluate.sample import draw_sample
from tests.evaluate.runs import raw_of, run_of
from tests.evaluate.test_query_key_products import NEOX

SUMS = ("sum_magnitude", "sum_magnitude_d", "sum_magnitude_absolute", "sum_abs_angle")


def test_positions_are_causal_seeded_and_uniform():
    m, n = draw_positions(7, 4000, "seed")
    assert (m > n).all()
    assert m.max() == 6
    assert n.min() == 0
    assert torch.equal(m, draw_positions(7, 4000, "seed")[0])
    counts = (m * 7 + n).bincount()
    counts = counts[counts > 0]
    assert len(counts) == 21
    assert 130 < counts.min() <= counts.max() < 250


def measure(loaded, books, out, ropes="default", **options):
    sample = draw_sample(loaded, str(books), 100)
    return list(boundary_rows(run_of(loaded, out, 100, ropes=ropes), sample, **options))


def assert_row_is_of(row, angles):
    """Every number of the row, again from its raw table."""
    total = {name: sum(line[name] for line in angles) for name in ("abnormal", *SUMS)}
    rises = sum(sum(line["tau_counts"]) for line in angles)
    falls = sum(sum(line["angle_counts"]) for line in angles) - rises
    assert (row["share_b"], row["value"]) == (falls / (falls + rises), rises / (falls + rises))
    assert row["share_abnormal"] == total["abnormal"] / (falls + rises)
    magnitude, absolute = total["sum_magnitude"], total["sum_magnitude_absolute"]
    for name, expected in {
        "share_d_weighted": total["sum_magnitude_d"] / magnitude,
        "share_absolute": absolute / (magnitude + absolute),
        "mean_abs_angle": total["sum_abs_angle"] / (falls + rises),
    }.items():
        assert row[name] == pytest.approx(expected, rel=1e-12)


def test_strict_starts_at_exactly_zero(coca, books, tmp_path):
    coca.model.config.coca_constraint = "strict"
    (row,) = measure(coca, books, tmp_path)
    none = {"value", "mean_abs_angle", "share_abnormal", "share_absolute"}
    assert ({row[name] for name in none}, row["share_b"]) == ({0.0}, 1.0)
    angles = raw_of(row, tmp_path, "angles")
    assert_row_is_of(row, angles)
    assert not any(sum(line["angle_counts"][1:] + line["tau_counts"]) for line in angles)
    assert sum(line["angle_counts"][0] for line in angles) > 0
    assert all(line["bound_coca"] > 0 for line in raw_of(row, tmp_path, "decay"))


def test_slack_has_angles_below_a_quarter_turn_an_absolute_part_and_no_bound(coca, books, tmp_path):
    (row,) = measure(coca, books, tmp_path)
    angles = raw_of(row, tmp_path, "angles")
    assert_row_is_of(row, angles)
    assert sum(sum(line["angle_counts"][9:27]) for line in angles) == 0
    assert 0.2 < row["value"] < 0.8
    assert 0.2 < row["share_absolute"] < 0.8
    assert list(row["raw"]) == ["angles"]


def test_a_partial_coca_model_counts_rotated_pairs_only(books, tmp_path, llama):
    config = GPTNeoXConfig(**NEOX, vocab_size=259, initializer_range=0.4, rotary_pct=0.5)
    llama.model = patch_(GPTNeoXForCausalLM(config), "strict").eval()
    (row,) = measure(llama, books, tmp_path)
    assert len(raw_of(row, tmp_path, "angles")) == 2 * 3 * 4
    assert row["mean_abs_angle"] == 0.0


def test_a_plain_row_adds_up_with_its_raw_tables(llama, books, tmp_path):
    (row,) = measure(llama, books, tmp_path, pairs_per_document=37)
    angles = raw_of(row, tmp_path, "angles")
    assert len(angles) == 3 * 6 * 4
    assert {line["row_id"] for line in angles} == {row["row_id"]}
    for line in angles:
        assert sum(line["angle_counts"]) == 3 * 37
        assert sum(line["tau_counts"]) == sum(line["angle_counts"][ANGLE_BINS // 2 :])
        assert (len(line["angle_counts"]), len(line["tau_counts"])) == (ANGLE_BINS, TAU_BINS)
    assert_row_is_of(row, angles)
    assert row["value"] == pytest.approx(0.5, abs=0.15)
    assert row["share_b"] + row["value"] == pytest.approx(1)
    assert row["share_absolute"] == 0
    decay = raw_of(row, tmp_path, "decay")
    assert {line["layer"] for line in decay} == {0, 1, 2}
    assert all(line["bound_coca"] <= line["bound_rope"] for line in decay)


def test_linear_multiplies_tau_by_its_factor(llama, books, tmp_path):
    one, two = measure(llama, books, tmp_path, ropes="linear:1,linear:4")
    first, second = (
        sorted(raw_of(row, tmp_path, "angles"), key=lambda line: line["pair"]) for row in (one, two)
    )
    for before, after in zip(first, second, strict=True):
        assert after["theta"] == pytest.approx(before["theta"] / 4)
    layer_0 = ([line for line in some if line["layer"] == 0] for some in (first, second))
    # Only the first layer's input does not depend on RoPE
    for before, after in zip(*layer_0, strict=True):
        assert before["angle_counts"] == after["angle_counts"]
        assert before["tau_counts"][2:18] == after["tau_counts"][4:20]


def test_a_model_without_rotary_embedding_is_refused(llama, books, tmp_path):
    config = GPT2Config(vocab_size=259, n_embd=12, n_head=2, n_layer=1, n_positions=300)
    llama.model = GPT2LMHeadModel(config).eval()
    with pytest.raises(CocaError, match="GPT2LMHeadModel: got no rotary embedding"):
        measure(llama, books, tmp_path)


THETA = torch.tensor([1.0, 0.25, 0.001], dtype=torch.float64)


def test_angles_tau_and_scenarios_of_constructed_pairs():
    """One head, two sampled pairs of positions, three rotary pairs, with angles chosen by hand."""
    degrees = torch.tensor([[5.0, 180.0, 355.0], [95.0, 270.0, 190.0]])
    h = torch.polar(torch.full((2, 3), 2.0), degrees.deg2rad())[None]
    h[0, 0, 1] = -2.0  # exactly pi: still scenario b
    counts = count_angles(h, THETA, torch.tensor([100, 6]))
    assert counts["scenario_b"].tolist() == [[2, 1, 0]]
    assert counts["scenario_d"].tolist() == [[0, 1, 2]]
    bins = {
        name: [pair.nonzero().flatten().tolist() for pair in counts[name][0]]
        for name in ("angle_counts", "tau_counts")
    }
    assert bins["angle_counts"] == [[0, 9], [18, 27], [19, 35]]
    # tau = (2 pi - Theta) / theta: pair 1: 90 degrees / 0.25 = 6.28, in [4, 8); pair 2: 5 degrees /
    # 0.001 = 87, in [64, 128), and 170 degrees: 2967, in [2048, 4096)
    assert bins["tau_counts"] == [[], [3], [7, 12]]
    # distances 100 and 6: nearer than tau are 6 < 6.28 and 6 < 2967, not 100 < 87
    assert counts["abnormal"].tolist() == [[0, 1, 1]]
    assert counts["magnitude"].tolist() == [pytest.approx([4.0, 4.0, 4.0])]
    assert counts["magnitude_d"].tolist() == [pytest.approx([0.0, 2.0, 4.0])]
    angles = counts["abs_angle"][0].rad2deg().tolist()
    assert angles == pytest.approx([100.0, 270.0, 175.0], abs=1e-3)


def test_zero_queries_or_keys_have_no_angle_and_nan_is_counted_apart():
    h = torch.tensor([[[0j, 1 + 1j, complex(math.nan, 1)]]])
    counts = count_angles(h, THETA, torch.tensor([5]))
    assert counts["not_finite"].tolist() == [[0, 0, 1]]
    assert counts["angle_counts"].sum((0, 2)).tolist() == [0, 1, 0]


def test_partial_sums_equal_a_direct_sum():
    distances = decay_distances(50)
    assert distances[:5] == [1, 2, 3, 4, 6]
    assert 200 <= distances[-1] < 300
    sum_s, sum_c = partial_sums(THETA, distances)
    for i, s in enumerate(distances):
        turns = [cmath.exp(1j * s * theta) for theta in THETA.tolist()]
        sums = [sum(turns[: j + 1]) for j in range(3)]
        assert sum_s[i].item() == pytest.approx(sum(map(abs, sums)), rel=1e-9)
        assert sum_c[i].item() == pytest.approx(sum(abs(each.real) for each in sums), rel=1e-9)


def test_the_bounds_hold_and_cocas_is_tighter():
    generator = torch.Generator().manual_seed(3)
    theta = 10000.0 ** -(torch.arange(16, dtype=torch.float64) / 16)
    h = torch.randn(200, 16, dtype=torch.complex128, generator=generator)
    distances = decay_distances(300)
    sum_s, sum_c = partial_sums(theta, distances)
    assert (sum_c <= sum_s).all()
    assert (largest_steps(h.abs()) <= largest_steps(h) + 1e-12).all()  # eq. 21
    for products, bound in (
        (h, largest_steps(h)[:, None] * sum_s),
        (h.abs(), largest_steps(h.abs())[:, None] * sum_c),
    ):
        for i, s in enumerate(distances):
            score = (products * (1j * s * theta).exp()).sum(-1).real.abs()
            assert (score <= bound[:, i] + 1e-9).all()
