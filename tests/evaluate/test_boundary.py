"""Initial angles and borders against closed forms, direct sums, and the attention that models really compute."""

import cmath
import itertools
import json
import math

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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
    visiting_products,
)
from coca_hf.evaluate.rope import Rope, rotary_modules
from coca_hf.evaluate.rows import RowStore
from coca_hf.evaluate.sample import draw_sample
from tests.conftest import TINY

DEFAULT = Rope("default")
SIZE = {"vocab_size": 53, "initializer_range": 0.4}
NEOX = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 40}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**TINY, **SIZE)),
    "mistral": (MistralForCausalLM, MistralConfig(**TINY, **SIZE, sliding_window=None)),
    "qwen2, biases": (Qwen2ForCausalLM, Qwen2Config(**TINY, **SIZE)),
    "qwen3, norms": (Qwen3ForCausalLM, Qwen3Config(**TINY, **SIZE, head_dim=12)),
    "gpt_neox, partial": (GPTNeoXForCausalLM, GPTNeoXConfig(**NEOX, **SIZE, rotary_pct=0.5)),
    "cohere, neighbours": (CohereForCausalLM, CohereConfig(**{**TINY, "pad_token_id": 0}, **SIZE)),
}


def theta_of(model):
    return rotary_modules(model)[0][2].inv_freq.double()


@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_products_give_the_scores_that_attention_really_has(family):
    """a(m, n) = sum_j |h_j| cos(Theta_j + (m - n) theta_j), plus what unturned dimensions add, is softmax's input."""
    torch.manual_seed(1)
    model_class, config = MODELS[family]
    model = model_class._from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "q_norm" in name or "k_norm" in name:
            nn.init.normal_(parameter)
    ids = torch.randint(53, (1, 11), generator=torch.Generator().manual_seed(2))
    m, n = torch.tril_indices(11, 11).unbind()
    products = {}
    with visiting_products(model, theta_of(model), lambda layer, h: products.update({layer: h(m, n)})):
        attentions = model(ids, output_attentions=True).attentions
    assert sorted(products) == list(range(config.num_hidden_layers))
    for layer, weights in enumerate(attentions):
        h = products[layer].to(torch.complex128)
        angle = h.angle() + (m - n)[:, None] * theta_of(model)
        scores = torch.full(weights.shape[1:], -math.inf, dtype=torch.float64)
        scores[:, m, n] = (h.abs() * angle.cos()).sum(-1)
        d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        scores[:, m, n] *= d**-0.5
        if "neox" in family:
            scores[:, m, n] += unturned(model, layer, ids, m, n) * d**-0.5
        torch.testing.assert_close(scores.softmax(-1), weights[0].double(), rtol=1e-3, atol=1e-5)


def unturned(model, layer, ids, m, n):
    """The part of a GPT-NeoX score that does not depend on positions: dimensions 8 to 15 of 16."""
    seen = {}
    attention = model.gpt_neox.layers[layer].attention.query_key_value
    hook = attention.register_forward_hook(lambda module, inputs, output: seen.update(qkv=output))
    model(ids)
    hook.remove()
    q, k, _ = seen["qkv"].view(11, 3, 3 * 16).transpose(0, 1).double().chunk(3, dim=-1)
    return (q[:, m, 8:] * k[:, n, 8:]).sum(-1)


def test_the_model_is_as_it_was_afterwards(llama, coca):
    for model in (llama.model, coca.model):
        ids = torch.arange(9)[None]
        before = model(ids).logits
        with visiting_products(model, theta_of(model), lambda layer, h: None):
            during = model(ids).logits
        assert torch.equal(before, during)
        assert torch.equal(before, model(ids).logits)
        assert all("project" not in vars(module) for module in model.modules())


THETA = torch.tensor([1.0, 0.25, 0.001], dtype=torch.float64)


def test_angles_tau_and_scenarios_of_constructed_pairs():
    """One head, two sampled pairs of positions, three rotary pairs, with angles chosen by hand."""
    degrees = torch.tensor([[5.0, 180.0, 355.0], [95.0, 270.0, 190.0]])
    h = torch.polar(torch.full((2, 3), 2.0), degrees.deg2rad())[None]
    h[0, 0, 1] = -2.0  # exactly pi: still scenario b
    counts = count_angles(h, THETA, torch.tensor([100, 6]))
    assert counts["scenario_b"].tolist() == [[2, 1, 0]]
    assert counts["scenario_d"].tolist() == [[0, 1, 2]]
    found = {(pair, bin_) for pair in range(3) for bin_ in counts["angle_counts"][0, pair].nonzero().flatten().tolist()}
    assert found == {(0, 0), (0, 9), (1, 18), (1, 27), (2, 35), (2, 19)}
    # tau = (2 pi - Theta) / theta: pair 1: 90 degrees / 0.25 = 6.28; pair 2: 5 degrees / 0.001 = 87, 170 degrees: 2967
    assert counts["tau_counts"][0, 1].nonzero().flatten().tolist() == [3]  # [4, 8)
    assert counts["tau_counts"][0, 2].nonzero().flatten().tolist() == [7, 12]  # [64, 128), [2048, 4096)
    # fall = (pi - Theta) / theta: pair 0: 175 degrees: 3.05, 85 degrees: 1.48; pair 1: 0
    assert counts["fall_counts"][0, 0].nonzero().flatten().tolist() == [1, 2]
    assert counts["fall_counts"][0, 1].nonzero().flatten().tolist() == [0]
    # distances 100 and 6: nearer than tau are 6 < 6.28 and 6 < 2967, not 100 < 87
    assert counts["abnormal"].tolist() == [[0, 1, 1]]
    assert counts["magnitude"].tolist() == [pytest.approx([4.0, 4.0, 4.0])]
    assert counts["magnitude_d"].tolist() == [pytest.approx([0.0, 2.0, 4.0])]
    assert counts["abs_angle"][0].rad2deg().tolist() == pytest.approx([100.0, 270.0, 175.0], abs=1e-3)


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
        assert sum_s[i].item() == pytest.approx(sum(abs(sum(turns[: j + 1])) for j in range(3)), rel=1e-9)
        assert sum_c[i].item() == pytest.approx(sum(abs(sum(turns[: j + 1]).real) for j in range(3)), rel=1e-9)


def test_the_bounds_hold_and_that_of_coca_is_the_tighter():
    generator = torch.Generator().manual_seed(3)
    theta = 10000.0 ** -(torch.arange(16, dtype=torch.float64) / 16)
    h = torch.randn(200, 16, dtype=torch.complex128, generator=generator)
    distances = decay_distances(300)
    sum_s, sum_c = partial_sums(theta, distances)
    assert (sum_c <= sum_s).all()
    assert (largest_steps(h.abs()) <= largest_steps(h) + 1e-12).all()  # eq. 11 of the appendix
    for products, bound in ((h, largest_steps(h)[:, None] * sum_s), (h.abs(), largest_steps(h.abs())[:, None] * sum_c)):
        for i, s in enumerate(distances):
            score = sum(products[:, j] * cmath.exp(1j * s * theta[j].item()) for j in range(16)).real.abs()
            assert (score <= bound[:, i] + 1e-9).all()


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


def measure(subject, books, out, lengths=(100,), ropes=(DEFAULT,), **options):
    sample = draw_sample(subject, str(books), max(lengths))
    return list(boundary_rows(subject, sample, list(lengths), list(ropes), RowStore(out), **options))


@pytest.mark.parametrize("constraint", ["slack", "strict"])
def test_a_coca_model_starts_at_exactly_zero(coca, books, tmp_path, constraint):
    coca.model.config.coca_constraint = constraint
    (row,) = measure(coca, books, tmp_path)
    assert (row["value"], row["mean_abs_angle"], row["share_b"], row["share_abnormal"]) == (0.0, 0.0, 1.0, 0.0)
    assert 0 < row["share_undefined"] < 1  # where ReLU made t zero
    angles = pq.read_table(tmp_path / row["raw"]["angles"]).to_pylist()
    assert all(sum(line["angle_counts"][1:]) == 0 and sum(line["tau_counts"]) == 0 for line in angles)
    assert sum(line["angle_counts"][0] for line in angles) > 0


def test_a_partial_coca_model_counts_turned_pairs_only(books, tmp_path, llama):
    config = GPTNeoXConfig(**NEOX, vocab_size=259, initializer_range=0.4, rotary_pct=0.5)
    llama.model = patch_(GPTNeoXForCausalLM(config)).eval()
    (row,) = measure(llama, books, tmp_path)
    assert (row["layers"], row["heads"], row["rotary_pairs"], row["mean_abs_angle"]) == (2, 3, 4, 0.0)


def test_a_plain_row_adds_up_with_its_raw_tables(llama, books, tmp_path):
    (row,) = measure(llama, books, tmp_path, pairs_per_document=37)
    angles = pq.read_table(tmp_path / row["raw"]["angles"]).to_pylist()
    assert len(angles) == 3 * 6 * 4 == row["layers"] * row["heads"] * row["rotary_pairs"]
    assert {line["row_id"] for line in angles} == {row["row_id"]}
    for line in angles:
        assert sum(line["angle_counts"]) + line["undefined"] == 3 * 37
        assert sum(line["tau_counts"]) + sum(line["fall_counts"]) == sum(line["angle_counts"])
        assert (len(line["angle_counts"]), len(line["tau_counts"])) == (ANGLE_BINS, TAU_BINS)
    total = len(angles) * 3 * 37
    assert row["share_d"] == sum(sum(line["tau_counts"]) for line in angles) / total
    assert row["share_abnormal"] == sum(line["abnormal"] for line in angles) / total
    assert row["value"] == row["share_d"] == pytest.approx(0.5, abs=0.15)
    assert row["share_b"] + row["share_d"] == pytest.approx(1)
    decay = pq.read_table(tmp_path / row["raw"]["decay"]).to_pylist()
    assert {line["layer"] for line in decay} == {0, 1, 2}
    assert all(line["score"] <= line["bound_rope"] and line["bound_coca"] < line["bound_rope"] for line in decay)


def test_linear_moves_tau_out_by_its_factor(llama, books, tmp_path):
    one, two = measure(llama, books, tmp_path, ropes=(Rope("linear", 1.0), Rope("linear", 4.0)))
    first, second = (
        sorted(pq.read_table(tmp_path / row["raw"]["angles"]).to_pylist(), key=lambda line: line["pair"])
        for row in (one, two)
    )
    for before, after in zip(first, second, strict=True):
        assert after["theta"] == pytest.approx(before["theta"] / 4)
    layer_0 = [line for line in first if line["layer"] == 0], [line for line in second if line["layer"] == 0]
    for before, after in zip(*layer_0, strict=True):  # only the first layer's input does not depend on RoPE
        assert before["angle_counts"] == after["angle_counts"]
        assert before["tau_counts"][2:18] == after["tau_counts"][4:20]


def test_rows_already_there_are_not_measured_again(llama, books, tmp_path, monkeypatch):
    first = measure(llama, books, tmp_path)
    monkeypatch.setattr(llama.model.base_model, "forward", None)
    assert measure(llama, books, tmp_path) == first
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1


def test_a_model_that_emits_nan_gets_a_row_that_says_so(llama, books, tmp_path):
    nn.init.constant_(llama.model.model.layers[1].self_attn.k_proj.weight, math.nan)
    (row,) = measure(llama, books, tmp_path)
    assert row["value"] is None
    assert row["error"].endswith("products of queries and keys are not finite")
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == row


def test_a_model_without_rotary_embedding_is_refused(llama, books, tmp_path):
    llama.model = GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=12, n_head=2, n_layer=1, n_positions=300)).eval()
    with pytest.raises(CocaError, match="GPT2LMHeadModel: got no rotary embedding"):
        measure(llama, books, tmp_path)


def test_a_rotation_by_other_angles_is_refused(llama):
    with (
        pytest.raises(CocaError, match="turns 4 pairs of 8 dimensions, expected 4 pairs by the angles"),
        visiting_products(llama.model, theta_of(llama.model) * 2, lambda layer, h: None),
    ):
        llama.model(torch.arange(9)[None])
