"""The fused fold against the plain one in float64: forward, both gradients, any shape, layout and
dtype.
"""

import copy
import random

import pytest
import torch

from coca_hf.kernels.fold import _fold, fused_fold
from coca_hf.models.attention import FOLDS, NO_CONTENT, ContentPairs, plain_fold
from coca_hf.models.rotary import CocaRotaryEmbedding
from tests.kernels.conftest import DEVICE, HEAD_DIMS
from tests.models.families import tiny_model, tokens

LIMITS = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "as projected": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second number": lambda x: torch.stack((x, x + 1), dim=-1).flatten(-2)[..., ::2],
    "inside a larger one": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 4))[
        ..., 1 : 1 + x.shape[2], 3:-2
    ],
    "heads of one fused projection": lambda x: (
        torch.cat((x, x), 1).transpose(1, 2).contiguous().transpose(1, 2)[:, x.shape[1] :]
    ),
}


def inputs(b, h, g, m, d, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(b, h, m, d, generator=generator, dtype=torch.float64)
    t = torch.randn(b, g, m, d // 2, generator=generator, dtype=torch.float64)
    angle = 100 * torch.randn(b, 1, m, d // 2, generator=generator, dtype=torch.float64)
    return [x.to(dtype).to(DEVICE) for x in (q, t, angle.cos(), angle.sin())]


def results(fold, q, t, cos, sin, constraint, content):
    """Query, key, and the gradients of q and t under weights that tell all numbers apart."""
    q, t = (x.detach().requires_grad_() for x in (q, t))
    outputs = fold(q, t, cos, sin, constraint, content)
    spread = (torch.linspace(-1, 2, x.numel(), device=x.device) for x in outputs)
    weights = [w.view(x.shape).to(x.dtype) for w, x in zip(spread, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, (q, t), weights)
    return [x.detach() for x in (*outputs, *gradients)]


def check(q, t, cos, sin, constraint, content=NO_CONTENT):
    got = results(fused_fold, q, t, cos, sin, constraint, content)
    expected = results(plain_fold, *(x.double() for x in (q, t, cos, sin)), constraint, content)
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == q.dtype
        assert (one.double() - other).norm() <= LIMITS[q.dtype] * other.norm()


@pytest.mark.parametrize("constraint", ["slack", "strict"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("heads", [(5, 5), (6, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("content", [NO_CONTENT, ContentPairs(5), ContentPairs(4, True)], ids=str)
def test_forward_and_gradients_are_those_of_the_plain_fold(constraint, dtype, heads, content):
    check(*inputs(2, *heads, 11, 24, dtype), constraint, content)


@pytest.mark.gpu
@pytest.mark.parametrize("constraint", ["slack", "strict"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_head_sizes_of_all_families_on_a_gpu(constraint, dtype, head_dim):
    content = ContentPairs(head_dim // 8, every_second=True)
    check(*inputs(2, 8, 2, 130, head_dim, dtype), constraint, content)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    q, t, cos, sin = inputs(2, 6, 3, 7, 16)
    check(LAYOUTS[layout](q), LAYOUTS[layout](t), cos, LAYOUTS[layout](sin), "slack")
    check(q, LAYOUTS[layout](t), LAYOUTS["contiguous"](cos), sin.expand(2, 1, 7, 8), "strict")


@pytest.mark.parametrize("seed", range(8))
def test_any_shape(seed):
    draw = random.Random(seed)
    g, d = draw.randint(1, 4), 8 * draw.randint(1, 20)
    shape = (draw.randint(1, 3), g * draw.randint(1, 5), g, draw.randint(1, 70), d)
    q, t, cos, sin = inputs(*shape, draw.choice(list(LIMITS)), seed)
    if draw.random() < 0.5:  # one row of angles for the whole batch
        cos, sin = cos[:1], sin[:1]
    content = ContentPairs(draw.randint(0, d // 2), draw.random() < 0.5)
    check(q, t, cos, sin, draw.choice(["slack", "strict"]), content)


def test_more_rows_than_a_program_takes():
    check(*inputs(1, 3, 2, 200, 128), "slack")


@pytest.mark.parametrize(
    "shape", [(0, 4, 2, 5, 8), (2, 4, 2, 0, 8), (1, 0, 2, 5, 8), (1, 4, 0, 5, 8)], ids=str
)
def test_nothing_to_fold(shape):
    check(*inputs(*shape), "slack")


@pytest.mark.parametrize("constraint", ["slack", "strict"])
def test_positions_up_to_131072(constraint):
    config = tiny_model(max_position_embeddings=131072).config
    position_ids = torch.tensor([[0, 1, 2047, 2048, 32767, 65535, 65536, 131070, 131071]])
    q, t, _, _ = inputs(1, 6, 2, 9, config.head_dim)
    cos, sin = CocaRotaryEmbedding(config).to(DEVICE)(q, position_ids.to(DEVICE))
    check(q, t, cos[:, None], sin[:, None], constraint)


def test_a_number_that_is_none_stays_visible():
    q, t, cos, sin = inputs(1, 2, 2, 3, 8)
    t[0, 1, 2, 3] = float("nan")
    _, key = fused_fold(q, t, cos, sin, "slack")
    assert key.isnan().nonzero().tolist() == [[0, 1, 2, 3], [0, 1, 2, 7]]


def test_angles_that_learn_are_refused():
    q, t, cos, sin = inputs(1, 2, 2, 3, 8)
    with pytest.raises(ValueError, match="angles that need a gradient"):
        fused_fold(q, t, cos.requires_grad_(), sin, "slack")


def test_the_operator_is_what_torch_compile_expects():
    q, t, cos, sin = inputs(2, 4, 2, 5, 8)
    q.requires_grad_()
    q = LAYOUTS["as projected"](q)
    torch.library.opcheck(_fold, (q, t.requires_grad_(), cos, sin, False, 1, True))


@pytest.mark.parametrize("constraint", ["slack", "strict"])
@pytest.mark.parametrize("content", [{}, {"coca_content_pairs": 2, "coca_content_layers": [0]}])
def test_a_model_has_the_logits_gradients_and_tokens_of_the_plain_fold(
    constraint, content, monkeypatch
):
    model = tiny_model(constraint, num_hidden_layers=1, **content).to(DEVICE)
    ids, calls = tokens().to(DEVICE), []

    def counted(*arguments):
        calls.append(1)
        return fused_fold(*arguments)

    runs = []
    for fold in (plain_fold, counted):
        monkeypatch.setitem(FOLDS, DEVICE, fold)
        model.zero_grad()
        output = model(ids, labels=ids)
        output.loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        generated = model.generate(ids[:, :7], max_new_tokens=5, do_sample=False)
        runs.append((output.logits.detach(), gradients, generated))
    assert len(calls) == 1 + 5
    for got, expected in zip(runs[1][:2], runs[0][:2], strict=True):
        assert (got - expected).norm() < 1e-5 * expected.norm()
    assert torch.equal(runs[1][2], runs[0][2])


def test_a_model_compiles_to_one_graph_around_it(monkeypatch):
    monkeypatch.setitem(FOLDS, DEVICE, fused_fold)
    model, ids = tiny_model(num_hidden_layers=1).to(DEVICE), tokens().to(DEVICE)
    whole = {"fullgraph": True, "backend": "aot_eager", "dynamic": False}
    compiled = torch.compile(copy.deepcopy(model), **whole)
    runs = []
    for each in (model, compiled):
        output = each(ids, labels=ids, use_cache=False)
        output.loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in each.parameters()])
        runs.append((output.logits.detach(), gradients))
    for got, expected in zip(*runs, strict=True):
        assert (got - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("constraint", ["slack", "strict"])
def test_float16_holds_what_the_plain_fold_holds(constraint):
    q, t, cos, sin = inputs(2, 6, 2, 11, 24, torch.float16)
    check(700 * torch.nn.functional.normalize(q.float(), dim=-1).half(), t, cos, sin, constraint)
