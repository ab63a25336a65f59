"""Counts of angles, and bounds, against closed forms and direct sums."""

import cmath
import itertools
import math

import pytest
import torch

from coca_hf.evaluate.boundary import count_angles, decay_distances, largest_steps, partial_sums

THETA = torch.tensor([1.0, 0.25, 0.001], dtype=torch.float64)


def test_angles_tau_and_scenarios_of_constructed_pairs():
    """One head, two sampled pairs of positions, three rotary pairs, with angles chosen by hand."""
    degrees = torch.tensor([[5.0, 180.0, 355.0], [95.0, 270.0, 190.0]])
    h = torch.polar(torch.full((2, 3), 2.0), degrees.deg2rad())[None]
    h[0, 0, 1] = -2.0  # exactly pi: still scenario b
    counts = count_angles(h, THETA, torch.tensor([100, 6]))
    assert counts["scenario_b"].tolist() == [[2, 1, 0]]
    assert counts["scenario_d"].tolist() == [[0, 1, 2]]
    found = {
        (pair, bin_)
        for pair in range(3)
        for bin_ in counts["angle_counts"][0, pair].nonzero().flatten().tolist()
    }
    assert found == {(0, 0), (0, 9), (1, 18), (1, 27), (2, 35), (2, 19)}
    # tau = (2 pi - Theta) / theta: pair 1: 90 degrees / 0.25 = 6.28; pair 2: 5 degrees / 0.001 =
    # 87, 170 degrees: 2967
    assert counts["tau_counts"][0, 1].nonzero().flatten().tolist() == [3]  # [4, 8)
    # [64, 128), [2048, 4096)
    assert counts["tau_counts"][0, 2].nonzero().flatten().tolist() == [7, 12]
    # fall = (pi - Theta) / theta: pair 0: 175 degrees: 3.05, 85 degrees: 1.48; pair 1: 0
    assert counts["fall_counts"][0, 0].nonzero().flatten().tolist() == [1, 2]
    assert counts["fall_counts"][0, 1].nonzero().flatten().tolist() == [0]
    # distances 100 and 6: nearer than tau are 6 < 6.28 and 6 < 2967, not 100 < 87
    assert counts["abnormal"].tolist() == [[0, 1, 1]]
    assert counts["magnitude"].tolist() == [pytest.approx([4.0, 4.0, 4.0])]
    assert counts["magnitude_d"].tolist() == [pytest.approx([0.0, 2.0, 4.0])]
    assert counts["abs_angle"][0].rad2deg().tolist() == pytest.approx(
        [100.0, 270.0, 175.0], abs=1e-3
    )


def test_a_score_rises_up_to_tau_and_falls_after_it():
    """The claim of section 2.2, by evaluating the cosine itself."""
    for theta in (0.01, 0.0031):
        for start in (math.pi + 0.2, 4.0, 6.0):
            tau = (2 * math.pi - start) / theta
            scores = [math.cos(start + s * theta) for s in range(int(tau) + 200)]
            steps = [after > before for before, after in itertools.pairwise(scores)]
            assert all(steps[: int(tau)])
            assert not any(steps[int(tau) + 1 :])


def test_zero_queries_or_keys_have_no_angle_and_nan_is_counted_apart():
    h = torch.tensor([[[0j, 1 + 1j, complex(math.nan, 1)]]])
    counts = count_angles(h, THETA, torch.tensor([5]))
    assert counts["undefined"].tolist() == [[1, 0, 0]]
    assert counts["not_finite"].tolist() == [[0, 0, 1]]
    assert counts["angle_counts"].sum() == 1


def test_partial_sums_equal_a_direct_sum():
    distances = decay_distances(50)
    assert distances[:5] == [1, 2, 3, 4, 6]
    assert 200 <= distances[-1] < 300
    sum_s, sum_c = partial_sums(THETA, distances)
    for i, s in enumerate(distances):
        turns = [cmath.exp(1j * s * theta) for theta in THETA.tolist()]
        assert sum_s[i].item() == pytest.approx(
            sum(abs(sum(turns[: j + 1])) for j in range(3)), rel=1e-9
        )
        assert sum_c[i].item() == pytest.approx(
            sum(abs(sum(turns[: j + 1]).real) for j in range(3)), rel=1e-9
        )


def test_the_bounds_hold_and_that_of_coca_is_the_tighter():
    generator = torch.Generator().manual_seed(3)
    theta = 10000.0 ** -(torch.arange(16, dtype=torch.float64) / 16)
    h = torch.randn(200, 16, dtype=torch.complex128, generator=generator)
    distances = decay_distances(300)
    sum_s, sum_c = partial_sums(theta, distances)
    assert (sum_c <= sum_s).all()
    assert (largest_steps(h.abs()) <= largest_steps(h) + 1e-12).all()  # eq. 11 of the appendix
    for products, bound in (
        (h, largest_steps(h)[:, None] * sum_s),
        (h.abs(), largest_steps(h.abs())[:, None] * sum_c),
    ):
        for i, s in enumerate(distances):
            score = sum(
                products[:, j] * cmath.exp(1j * s * theta[j].item()) for j in range(16)
            ).real.abs()
            assert (score <= bound[:, i] + 1e-9).all()
