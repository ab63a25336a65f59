"""Attention from the half-width cache against attention by keys made of it, in float64."""

import copy
import random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from coca_hf import kernels
from coca_hf.kernels.decode import decode_attention
from coca_hf.models.attention import CACHE, coca_key
from coca_hf.models.cache import CocaCache, CocaStaticCache
from tests.kernels.conftest import DEVICE, HEAD_DIMS
from tests.models.families import tiny_model, tokens

LIMITS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def inputs(b, h, g, n, d, dtype=torch.float32, seed=0):
    """A query, the cache (t after its ReLU, values as projected, angles of every row), a mask with
    holes.
    """
    generator = torch.Generator().manual_seed(seed)
    query = 3 * torch.randn(b, h, 1, d, generator=generator)
    t = torch.randn(b, g, n, d // 2, generator=generator).relu()
    value = torch.randn(b, n, g, d, generator=generator).transpose(1, 2)
    angle = 100 * torch.randn(b, 1, n, d // 2, generator=generator)
    mask = torch.rand(b, 1, 1, n, generator=generator) > 0.3
    mask[..., -1] = True
    cache = [x.to(dtype).to(DEVICE) for x in (query, t, value, angle.cos(), angle.sin())]
    return [*cache, mask.to(DEVICE)]


def check(query, t, value, cos, sin, mask, strict, scaling=None):
    scaling = scaling or query.shape[-1] ** -0.5
    got = decode_attention(query, t, value, cos, sin, mask, scaling, strict)
    key = coca_key(t.double(), cos.double(), sin.double(), "strict" if strict else "slack")
    groups = query.shape[1] // t.shape[1]
    key, wide = (x.double().repeat_interleave(groups, dim=1) for x in (key, value))
    options = {"attn_mask": mask, "scale": scaling}
    expected = scaled_dot_product_attention(query.double(), key, wide, **options)
    assert got.dtype == query.dtype
    assert got.shape == expected.shape
    assert (got.double() - expected).norm() <= LIMITS[query.dtype] * expected.norm()


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("heads", [(5, 5), (6, 2), (12, 1)], ids=["mha", "gqa", "mqa"])
def test_it_is_attention_by_the_keys_that_the_cache_stands_for(dtype, heads):
    *cache, mask = inputs(2, *heads, 37, 24, dtype)
    check(*cache, mask, strict=False)
    check(*cache, None, strict=True)


def test_large_queries_and_a_large_scale_do_not_overflow_in_fp16():
    query, t, *rest, mask = inputs(2, 6, 2, 37, 24, torch.float16)
    check(300 * query, t / 300 / 256, *rest, mask, strict=False, scaling=256 * 24**-0.5)


def test_angles_may_be_wider_as_autocast_leaves_them():
    query, t, value, cos, sin, mask = inputs(2, 6, 2, 137, 24, torch.bfloat16)
    check(query, t, value, cos.float(), sin.float(), mask, strict=True)


@pytest.mark.gpu
@pytest.mark.parametrize("strict", [False, True], ids=["slack", "strict"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_head_sizes_of_all_families_on_a_gpu(strict, dtype, head_dim):
    *cache, mask = inputs(2, 8, 2, 1100, head_dim, dtype)
    check(*cache, mask, strict)


@pytest.mark.parametrize("length", [1, 32, 33, 300])
def test_any_length(length):
    check(*inputs(1, 4, 2, length, 16), strict=False)


@pytest.mark.parametrize("seed", range(6))
def test_any_shape(seed):
    draw = random.Random(seed)
    g, d = draw.randint(1, 4), 8 * draw.randint(1, 20)
    shape = (draw.randint(1, 3), g * draw.randint(1, 5), g, draw.randint(1, 90), d)
    query, t, value, cos, sin, mask = inputs(*shape, draw.choice(list(LIMITS)), seed)
    if draw.random() < 0.5:  # one row of angles, and of the mask, for the whole batch
        cos, sin, mask = cos[:1], sin[:1], mask[:1]
    check(query, t, value, cos, sin, mask, draw.random() < 0.5)


def test_any_strides():
    query, t, value, cos, sin, mask = inputs(2, 6, 3, 40, 16)
    longer = torch.nn.functional.pad(t, (0, 0, 5, 9))[..., 5:-9, :]
    spread = torch.stack((value, value), dim=-1).flatten(-2)[..., ::2]
    projected = query.transpose(1, 2).contiguous().transpose(1, 2)
    check(projected, longer, spread, cos, sin.mT.contiguous().mT, mask, False)
    check(query, t, value, cos, sin, mask.repeat(1, 1, 1, 2)[..., ::2], True)


def test_a_row_that_may_attend_to_nothing_is_zero():
    *cache, mask = inputs(2, 4, 2, 70, 16)
    mask[0] = False
    output = decode_attention(*cache, mask, 0.25, False)
    assert (output[0] == 0).all()
    assert (output[1] != 0).all()


def test_the_operator_is_what_torch_compile_expects():
    torch.library.opcheck(decode_attention, (*inputs(2, 4, 2, 33, 16), 0.25, False))


@pytest.fixture
def decoded(monkeypatch):
    """The kernel, put in its place for this machine; the lengths of the caches that it attended
    from.
    """
    lengths = []

    def counted(query, t, *rest):
        lengths.append(t.shape[-2])
        return decode_attention(query, t, *rest)

    monkeypatch.setitem(kernels.DECODERS, DEVICE, counted)
    return lengths


def test_a_model_decodes_with_it_as_near_the_truth_as_with_sdpa(decoded):
    """Left padding, grouped queries; the truth is the same model in float64 without a cache."""
    model = tiny_model(coca_content_pairs=1, coca_content_layers=[1]).to(torch.bfloat16)
    ids = tokens(2, 34)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    truth = copy.deepcopy(model).double()(ids, attention_mask=mask).logits[:, 30:]
    errors = {}
    for attention in ("sdpa", "coca"):
        each = copy.deepcopy(model).to(DEVICE)
        each.set_attn_implementation(attention)
        cache, logits = CocaCache(each.config), []
        with torch.no_grad():
            for start, end in [(0, 30), *((i, i + 1) for i in range(30, 34))]:
                chunk, seen = ids[:, start:end].to(DEVICE), mask[:, :end].to(DEVICE)
                output = each(chunk, attention_mask=seen, **{CACHE: cache})
                logits.append(output.logits[:, -1:])
        error = torch.cat(logits[1:], 1).cpu().double() - truth
        errors[attention] = (error.norm() / truth.norm()).item()
    assert decoded == [length for length in range(31, 35) for _ in range(3)]
    assert errors["coca"] < 1.3 * errors["sdpa"]


def test_a_static_cache_decodes_with_it_in_one_graph(decoded, monkeypatch):
    # float32 here, to compare
    monkeypatch.setattr(kernels, "_can_decode", lambda query, mask: query.shape[-2] == 1)
    monkeypatch.setitem(kernels.DECODERS, DEVICE, decode_attention)
    model = tiny_model(num_hidden_layers=1).to(DEVICE)
    ids = tokens(1, 12).to(DEVICE)
    expected = model(ids).logits[:, 10:]
    model.set_attn_implementation("coca")
    cache = CocaStaticCache(model.config, 17)
    step = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager", dynamic=False)
    got = []
    with torch.no_grad():
        model(ids[:, :10], **{CACHE: cache})
        for i in (10, 11):
            position = torch.tensor([[i]], device=DEVICE)
            got.append(step(ids[:, i : i + 1], position_ids=position, **{CACHE: cache}).logits)
    assert (torch.cat(got, dim=1) - expected).abs().max() < (1e-4 if DEVICE == "cpu" else 1e-1)
