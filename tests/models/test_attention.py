"""The folds against the three-operand contraction, and the properties that tell slack from strict."""

import pytest
import torch

from coca_hf.models.attention import NO_CONTENT, QUERY_SCALE, ContentPairs, coca_key, coca_query
from coca_hf.models.reference import coca_scores

B, M, D = 2, 11, 16
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
HEADS = {"mha": (5, 5), "gqa": (6, 3), "mqa": (7, 1)}


def angles(positions, dtype=torch.float64):
    inv_freq = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = positions.double()[:, None] * inv_freq
    return angle.cos().to(dtype)[None, None], angle.sin().to(dtype)[None, None]  # (1, 1, m, j)


def random_inputs(heads, kv_heads, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(B, heads, M, D, dtype=torch.float64, generator=generator)
    t = torch.randn(B, kv_heads, M, D // 2, dtype=torch.float64, generator=generator)
    return q.to(dtype), t.to(dtype)


def folded_scores(q, t, cos, sin, *form):
    key = coca_key(t, cos, sin, *form).repeat_interleave(q.shape[1] // t.shape[1], dim=1)
    return coca_query(q, cos, sin, *form) @ key.mT / QUERY_SCALE


def relative_error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("constraint", ["slack", "strict"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("content", [NO_CONTENT, ContentPairs(3), ContentPairs(1, True)], ids=str)
def test_fold_equals_contraction_in_forward_and_every_gradient(constraint, heads, dtype, content):
    results = []
    for function, kind in ((folded_scores, dtype), (coca_scores, torch.float64)):
        q, t = (x.to(kind).requires_grad_() for x in random_inputs(*heads, dtype))
        cos, sin = (x.to(dtype).to(kind) for x in angles(torch.arange(M)))
        still = content.mask(cos)
        cos[..., still], sin[..., still] = 1, 0
        scores = function(q, t, cos, sin, constraint, content)
        weight = torch.linspace(-1, 2, scores.numel(), dtype=torch.float64).view_as(scores)
        (scores.double() * weight).sum().backward()
        results.append((scores.detach(), q.grad, t.grad))
    for got, expected in zip(*results, strict=True):
        assert expected.norm() > 1
        assert relative_error(got, expected) < LIMITS[dtype]


@pytest.mark.parametrize("constraint", ["slack", "strict"])
@pytest.mark.parametrize(
    ("content", "still"),
    [(ContentPairs(3), [5, 6, 7]), (ContentPairs(3, True), [0, 2, 4, 5, 6, 7])],
    ids=["slowest", "and every second"],
)
def test_content_pairs_add_a_dot_product_that_no_distance_changes(constraint, content, still):
    q, t = random_inputs(6, 6)
    cos, sin = angles(torch.arange(M))
    both = coca_scores(q, t, cos, sin, constraint, content)
    turning = [pair for pair in range(D // 2) if pair not in still]
    rotated = q.unflatten(-1, (2, -1))[..., turning].flatten(-2)
    alone = coca_scores(rotated, *(x[..., turning] for x in (t, cos, sin)), constraint)
    first, second = q.chunk(2, -1)
    added = torch.einsum("bhmj,bhnj->bhmn", (first + second)[..., still], t[..., still])
    assert (added < 0).any()
    assert relative_error(both - alone, added) < 1e-12


def test_strict_reference_is_the_closed_form_of_eq_17():
    q, t = random_inputs(6, 3)
    distance = torch.arange(M)[:, None] - torch.arange(M)[None]
    inv_freq = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    cosine = (distance[..., None] * inv_freq).cos()  # (m, n, j)
    energy = q[..., : D // 2] ** 2 + q[..., D // 2 :] ** 2
    t_heads = t.relu().repeat_interleave(2, dim=1)
    expected = torch.einsum("bhmj,bhnj,mnj->bhmn", energy, t_heads, cosine)
    assert relative_error(coca_scores(q, t, *angles(torch.arange(M)), "strict"), expected) < 1e-12


def test_slack_reference_is_eq_10_term_by_term():
    """Sum over both halves of every pair of (R_m q) q (R_n [t, t]), written as loops."""
    q, t = random_inputs(5, 5)
    cos, sin = angles(torch.arange(M))
    expected = torch.zeros(B, 5, M, M, dtype=torch.float64)
    for m in range(M):
        for n in range(M):
            for j in range(D // 2):
                a, b, c = q[:, :, m, j], q[:, :, m, j + D // 2], t[:, :, n, j].relu()
                cos_m, sin_m, cos_n, sin_n = (x[0, 0, p, j] for p in (m, n) for x in (cos, sin))
                expected[:, :, m, n] += (a * cos_m - b * sin_m) * a * (c * cos_n - c * sin_n)
                expected[:, :, m, n] += (b * cos_m + a * sin_m) * b * (c * cos_n + c * sin_n)
    assert relative_error(coca_scores(q, t, cos, sin, "slack"), expected) < 1e-12


@pytest.mark.parametrize(("constraint", "invariant"), [("strict", True), ("slack", False)])
def test_strict_is_shift_invariant_and_slack_is_not(constraint, invariant):
    q, t = random_inputs(6, 3)
    here = folded_scores(q, t, *angles(torch.arange(M)), constraint)
    there = folded_scores(q, t, *angles(torch.arange(M) + 137), constraint)
    shift_error = relative_error(there, here)
    assert shift_error < 1e-12 if invariant else shift_error > 0.1


def test_query_and_key_of_a_pair_are_collinear_before_rotation():
    """The paper's constraint: with q_2j = q_2j+1 slack and strict are one function (theorem 1)."""
    q, t = random_inputs(5, 5)
    q = torch.cat((q[..., : D // 2], q[..., : D // 2]), dim=-1)
    position = angles(torch.arange(M))
    slack, strict = (folded_scores(q, t, *position, kind) for kind in ("slack", "strict"))
    assert relative_error(slack, strict) < 1e-12


@pytest.mark.parametrize("constraint", ["slack", "strict"])
@pytest.mark.parametrize("longest", [0.1, 30.0, 1000.0])
def test_pairs_of_queries_up_to_1000_long_are_folded_in_float16(constraint, longest):
    generator = torch.Generator().manual_seed(5)
    random = torch.rand(3, 2000, 1, 1, 1, dtype=torch.float64, generator=generator)
    length, direction, angle = random[0].sqrt(), 6.3 * random[1], 6.3 * random[2]
    q = longest * length * torch.cat((direction.cos(), direction.sin()), dim=-1)
    q, cos, sin = (x.half() for x in (q, angle.cos(), angle.sin()))
    got = coca_query(q, cos, sin, constraint).double()
    expected = coca_query(*(x.double() for x in (q, cos, sin)), constraint)
    assert ((got - expected).norm(dim=-1) <= 2e-3 * expected.norm(dim=-1) + 1e-7).all()
