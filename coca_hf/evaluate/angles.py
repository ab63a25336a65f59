"""Initial angles of query and key, counted, and the bounds of long-term decay: pure functions of
h_j.

Letters and definitions are those of `boundary.py`: h query heads, p sampled pairs of positions, j
rotary pairs, s distances; h_j = q_j * conj(k_j), whose argument is the initial angle.
"""

import math

import torch
from torch import Tensor

ANGLE_BINS = 36
TAU_BINS = 24


def count_angles(h: Tensor, theta: Tensor, distance: Tensor) -> dict[str, Tensor]:
    """Histograms of the initial angles, and of the positions where monotonicity breaks.

    h: (h, p, j) complex; theta: (j,) radians per position; distance: (p,) tokens. Returns tensors
    (h, j, ...).
    """
    heads, _, num_pairs = h.shape
    finite = h.isfinite()
    defined = finite & (h != 0)
    # (h, p, j); in float32 pi is above pi
    angle = torch.atan2(h.imag.double(), h.real.double()) % (2 * math.pi)
    angle = torch.where(defined, angle, 0.0)
    falls, rises = defined & (angle <= math.pi), defined & (angle > math.pi)
    tau = (2 * math.pi - angle) / theta
    place = (
        torch.arange(heads * num_pairs, device=h.device).view(heads, 1, num_pairs).expand(h.shape)
    )

    def histogram(bins: Tensor, among: Tensor, num_bins: int) -> Tensor:
        index = (place * num_bins + bins.clamp(0, num_bins - 1))[among]
        return index.bincount(minlength=heads * num_pairs * num_bins).view(
            heads, num_pairs, num_bins
        )

    def octave(positions: Tensor) -> Tensor:
        return positions.clamp(min=2**-1).log2().floor().long() + 1

    magnitude = torch.where(defined, h.abs(), 0.0).double()
    wrapped = torch.where(angle > math.pi, angle - 2 * math.pi, angle).abs()
    return {
        "angle_counts": histogram((angle / (2 * math.pi) * ANGLE_BINS).long(), defined, ANGLE_BINS),
        "tau_counts": histogram(octave(tau), rises, TAU_BINS),
        "fall_counts": histogram(octave((math.pi - angle) / theta), falls, TAU_BINS),
        "scenario_b": falls.sum(1),
        "scenario_d": rises.sum(1),
        "abnormal": (rises & (distance[:, None] < tau)).sum(1),
        "undefined": (h == 0).sum(1),
        "not_finite": (~finite).sum(1),
        "abs_angle": torch.where(defined, wrapped, 0.0).sum(1),
        "magnitude": magnitude.sum(1),
        "magnitude_d": torch.where(rises, magnitude, 0.0).sum(1),
    }


def decay_distances(longest: int) -> list[int]:
    """Distances on a grid of half octaves up to four times `longest`."""
    steps = math.ceil(2 * math.log2(4 * longest))
    return sorted({round(2 ** (step / 2)) for step in range(steps + 1)})


def partial_sums(theta: Tensor, distances: list[int]) -> tuple[Tensor, Tensor]:
    """sum_j |S_{j+1}| and sum_j |C_{j+1}| at every distance, each (s,), for the bounds of appendix
    B.1.

    S_j = sum_{k<j} exp(i s theta_k), and C_j is its real part. theta: (j,).
    """
    angles = torch.tensor(distances, device=theta.device).double()[:, None] * theta  # (s, j)
    turns = torch.polar(torch.ones_like(angles), angles).cumsum(-1)
    return turns.abs().sum(-1), turns.real.abs().sum(-1)


def largest_steps(h: Tensor) -> Tensor:
    """max_j |h_{j+1} - h_j|, where the one after the last is 0 (Su et al. 2021). h: (..., j).
    Returns (...).
    """
    after = torch.cat((h[..., 1:], torch.zeros_like(h[..., :1])), dim=-1)
    return (after - h).abs().amax(-1)


def decay_sums(h: Tensor, theta: Tensor, distances: list[int]) -> dict[str, Tensor]:
    """Means over heads and sampled pairs: `max_h`, `max_l` (), and |a(s)| (s,)."""
    angles = torch.tensor(distances, device=h.device).double()[:, None] * theta
    turns = torch.polar(torch.ones_like(angles), angles).to(h.dtype)  # (s, j)
    return {
        "max_h": largest_steps(h).double().mean(),
        "max_l": largest_steps(h.abs()).double().mean(),
        "score": (h @ turns.mT).real.abs().double().mean((0, 1)),
    }
