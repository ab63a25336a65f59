"""`models.attention.plain_fold` as one Triton kernel, forward and backward: each number is read
once and written once.

A row is one head of one token, of the query or of t; a program computes BLOCK_ROWS of them, in fp32
(fp64 for fp64), and rounds once. Letters: see `models/attention.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coca_hf.models.attention import NO_CONTENT, QUERY_SCALE, ContentPairs

TILE = 4096  # numbers that a program holds of each half
SCALE = tl.constexpr(QUERY_SCALE)


def fused_fold(
    q: Tensor,
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    constraint: str,
    content: ContentPairs = NO_CONTENT,
) -> tuple[Tensor, Tensor]:
    """`plain_fold` with the same arguments, the same results up to rounding, and gradients of q and
    t. The last axis may have any stride.

    Raises ValueError in backward if cos or sin need a gradient, which `CocaRotaryEmbedding` never
    asks for.
    """
    return _fold(q, t, cos, sin, constraint == "strict", *content)


@torch.library.custom_op("coca::fold", mutates_args=())
def _fold(
    q: Tensor, t: Tensor, cos: Tensor, sin: Tensor, strict: bool, slowest: int, every_second: bool
) -> tuple[Tensor, Tensor]:
    query, key = _like_tokens(q, q.shape[-1]), _like_tokens(t, q.shape[-1])
    _launch(_fold_kernel, (q, query), (t, key), cos, sin, strict, slowest, every_second)
    return query, key


@_fold.register_fake
def _(q, t, cos, sin, strict, slowest, every_second):
    return _like_tokens(q, q.shape[-1]), _like_tokens(t, q.shape[-1])


@torch.library.custom_op("coca::fold_backward", mutates_args=())
def _fold_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    q: Tensor,
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    strict: bool,
    slowest: int,
    every_second: bool,
) -> tuple[Tensor, Tensor]:
    grad_q, grad_t = _like_tokens(q, q.shape[-1]), _like_tokens(t, t.shape[-1])
    of_query, of_t = (q, grad_query, grad_q), (t, grad_key, grad_t)
    _launch(_fold_backward_kernel, of_query, of_t, cos, sin, strict, slowest, every_second)
    return grad_q, grad_t


@_fold_backward.register_fake
def _(grad_query, grad_key, q, t, cos, sin, strict, slowest, every_second):
    return _like_tokens(q, q.shape[-1]), _like_tokens(t, t.shape[-1])


def _save(ctx, inputs, output) -> None:
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        raise ValueError(
            "coca fold: got angles that need a gradient, expected constants; use plain_fold"
        )
    q, t, cos, sin, *ctx.form = inputs
    ctx.save_for_backward(q, t, cos, sin)


def _backward(ctx, grad_query: Tensor, grad_key: Tensor):
    gradients = _fold_backward(grad_query, grad_key, *ctx.saved_tensors, *ctx.form)
    return *gradients, None, None, None, None, None


_fold.register_autograd(_backward, setup_context=_save)


def _like_tokens(x: Tensor, width: int) -> Tensor:
    """Uninitialised (b, heads, m, width), stored by token, like the output of a projection."""
    batch, heads, length, _ = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def _launch(
    kernel,
    of_query: tuple[Tensor, ...],
    of_t: tuple[Tensor, ...],
    cos: Tensor,
    sin: Tensor,
    strict: bool,
    slowest: int,
    every_second: bool,
):
    """Run `kernel` over the rows of the query's tensors, then over those of t's. It writes the last
    tensor of each.
    """
    q, t = of_query[0], of_t[0]
    batch, heads, length, head_dim = q.shape
    pairs = head_dim // 2
    block_pairs = triton.next_power_of_2(pairs)
    block_rows = max(1, TILE // block_pairs)
    query_rows, t_rows = batch * heads * length, batch * t.shape[1] * length
    query_blocks, t_blocks = triton.cdiv(query_rows, block_rows), triton.cdiv(t_rows, block_rows)
    if not query_blocks + t_blocks:
        return
    angles = [x.expand(batch, 1, length, pairs) for x in (cos, sin)]
    with torch.cuda.device_of(q):
        kernel[(query_blocks + t_blocks,)](
            *of_query,
            *of_t,
            *angles,
            *(stride for x in (*of_query, *of_t) for stride in x.stride()),
            *(stride for x in angles for stride in (x.stride(0), x.stride(2), x.stride(3))),
            query_blocks,
            query_rows,
            t_rows,
            length,
            QUERY_HEADS=heads,
            T_HEADS=t.shape[1],
            PAIRS=pairs,
            STRICT=strict,
            SLOWEST=slowest,
            EVERY_SECOND=every_second,
            BLOCK_ROWS=block_rows,
            BLOCK_PAIRS=block_pairs,
            COMPUTE=tl.float64 if q.dtype == torch.float64 else tl.float32,
            num_warps=8,
        )


# Numbers that change from prompt to prompt would otherwise be compiled again for each divisor.
UNSPECIALIZED = ["query_blocks", "query_rows", "t_rows", "length"]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _fold_kernel(
    q_ptr, query_ptr, t_ptr, key_ptr, cos_ptr, sin_ptr,
    q_b, q_h, q_m, q_d, query_b, query_h, query_m, query_d,
    t_b, t_h, t_m, t_d, key_b, key_h, key_m, key_d,
    cos_b, cos_m, cos_d, sin_b, sin_m, sin_d,
    query_blocks, query_rows, t_rows, length,
    QUERY_HEADS: tl.constexpr, T_HEADS: tl.constexpr, PAIRS: tl.constexpr, STRICT: tl.constexpr,
    SLOWEST: tl.constexpr, EVERY_SECOND: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    still = _content_pairs(PAIRS - SLOWEST, EVERY_SECOND, BLOCK_PAIRS)
    if block < query_blocks:
        b, h, m, pair, inside = _rows(
            block, query_rows, length, QUERY_HEADS, PAIRS, BLOCK_ROWS, BLOCK_PAIRS
        )
        cos = _load(cos_ptr, b * cos_b + m * cos_m, pair * cos_d, inside, COMPUTE)
        sin = _load(sin_ptr, b * sin_b + m * sin_m, pair * sin_d, inside, COMPUTE)
        cos, sin = _own_angles(cos, sin, still)
        row = b * q_b + h * q_h + m * q_m
        real = _load(q_ptr, row, pair * q_d, inside, COMPUTE)
        imag = _load(q_ptr, row, (pair + PAIRS) * q_d, inside, COMPUTE)
        if STRICT:
            energy = tl.where(still, real + imag, real * real + imag * imag)
            first, second = energy * cos, energy * sin
        else:
            first = tl.where(still, 1.0, real) * (real * cos - imag * sin)
            second = tl.where(still, 1.0, imag) * (imag * cos + real * sin)
        row = b * query_b + h * query_h + m * query_m
        _store(query_ptr, row, pair * query_d, first * SCALE, inside)
        _store(query_ptr, row, (pair + PAIRS) * query_d, second * SCALE, inside)
    else:
        b, h, m, pair, inside = _rows(
            block - query_blocks, t_rows, length, T_HEADS, PAIRS, BLOCK_ROWS, BLOCK_PAIRS
        )
        cos = _load(cos_ptr, b * cos_b + m * cos_m, pair * cos_d, inside, COMPUTE)
        sin = _load(sin_ptr, b * sin_b + m * sin_m, pair * sin_d, inside, COMPUTE)
        cos, sin = _own_angles(cos, sin, still)
        t = _load(t_ptr, b * t_b + h * t_h + m * t_m, pair * t_d, inside, COMPUTE)
        t = tl.where((t < 0) & ~still, 0.0, t)  # not maximum, which would hide a NaN
        if STRICT:
            first, second = t * cos, t * sin
        else:
            first, second = t * (cos - sin), t * (cos + sin)
        row = b * key_b + h * key_h + m * key_m
        _store(key_ptr, row, pair * key_d, first, inside)
        _store(key_ptr, row, (pair + PAIRS) * key_d, second, inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _fold_backward_kernel(
    q_ptr, grad_query_ptr, grad_q_ptr, t_ptr, grad_key_ptr, grad_t_ptr, cos_ptr, sin_ptr,
    q_b, q_h, q_m, q_d, query_b, query_h, query_m, query_d, grad_q_b, grad_q_h, grad_q_m, grad_q_d,
    t_b, t_h, t_m, t_d, key_b, key_h, key_m, key_d, grad_t_b, grad_t_h, grad_t_m, grad_t_d,
    cos_b, cos_m, cos_d, sin_b, sin_m, sin_d,
    query_blocks, query_rows, t_rows, length,
    QUERY_HEADS: tl.constexpr, T_HEADS: tl.constexpr, PAIRS: tl.constexpr, STRICT: tl.constexpr,
    SLOWEST: tl.constexpr, EVERY_SECOND: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    still = _content_pairs(PAIRS - SLOWEST, EVERY_SECOND, BLOCK_PAIRS)
    if block < query_blocks:
        b, h, m, pair, inside = _rows(
            block, query_rows, length, QUERY_HEADS, PAIRS, BLOCK_ROWS, BLOCK_PAIRS
        )
        cos = _load(cos_ptr, b * cos_b + m * cos_m, pair * cos_d, inside, COMPUTE)
        sin = _load(sin_ptr, b * sin_b + m * sin_m, pair * sin_d, inside, COMPUTE)
        cos, sin = _own_angles(cos, sin, still)
        row = b * q_b + h * q_h + m * q_m
        real = _load(q_ptr, row, pair * q_d, inside, COMPUTE)
        imag = _load(q_ptr, row, (pair + PAIRS) * q_d, inside, COMPUTE)
        row = b * query_b + h * query_h + m * query_m
        grad_first = _load(grad_query_ptr, row, pair * query_d, inside, COMPUTE) * SCALE
        grad_second = _load(grad_query_ptr, row, (pair + PAIRS) * query_d, inside, COMPUTE) * SCALE
        if STRICT:
            grad_energy = grad_first * cos + grad_second * sin
            grad_real = grad_energy * tl.where(still, 1.0, 2 * real)
            grad_imag = grad_energy * tl.where(still, 1.0, 2 * imag)
        else:
            across = (grad_second - grad_first) * sin
            grad_real = tl.where(still, grad_first, 2 * grad_first * real * cos + across * imag)
            grad_imag = tl.where(still, grad_second, 2 * grad_second * imag * cos + across * real)
        row = b * grad_q_b + h * grad_q_h + m * grad_q_m
        _store(grad_q_ptr, row, pair * grad_q_d, grad_real, inside)
        _store(grad_q_ptr, row, (pair + PAIRS) * grad_q_d, grad_imag, inside)
    else:
        b, h, m, pair, inside = _rows(
            block - query_blocks, t_rows, length, T_HEADS, PAIRS, BLOCK_ROWS, BLOCK_PAIRS
        )
        cos = _load(cos_ptr, b * cos_b + m * cos_m, pair * cos_d, inside, COMPUTE)
        sin = _load(sin_ptr, b * sin_b + m * sin_m, pair * sin_d, inside, COMPUTE)
        cos, sin = _own_angles(cos, sin, still)
        t = _load(t_ptr, b * t_b + h * t_h + m * t_m, pair * t_d, inside, COMPUTE)
        row = b * key_b + h * key_h + m * key_m
        grad_first = _load(grad_key_ptr, row, pair * key_d, inside, COMPUTE)
        grad_second = _load(grad_key_ptr, row, (pair + PAIRS) * key_d, inside, COMPUTE)
        if STRICT:
            grad_t = grad_first * cos + grad_second * sin
        else:
            grad_t = grad_first * (cos - sin) + grad_second * (cos + sin)
        row = b * grad_t_b + h * grad_t_h + m * grad_t_m
        grad_t = tl.where((t > 0) | still, grad_t, 0.0)
        _store(grad_t_ptr, row, pair * grad_t_d, grad_t, inside)


@triton.jit
def _rows(
    block, rows, length,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Batch, head and token of a block's rows, (rows, 1), its pairs, (1, pairs), and a mask of
    those that exist.
    """
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    token = row // HEADS
    b, h, m = token // length, row % HEADS, token % length
    # 64-bit offsets: a long batch has more numbers, though not more rows, than 32 bits can count
    return b.to(tl.int64), h.to(tl.int64), m.to(tl.int64), pair, (row < rows) & (pair < PAIRS)


@triton.jit
def _content_pairs(others: tl.constexpr, EVERY_SECOND: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """Which pairs are content pairs, (1, pairs); others: how many are not among the slowest."""
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    still = pair >= others
    if EVERY_SECOND:
        still = still | ((others + pair) % 2 == 1)
    return still


@triton.jit
def _own_angles(cos, sin, still):
    return tl.where(still, 1.0, cos), tl.where(still, 0.0, sin)


@triton.jit
def _load(pointer, row, column, inside, COMPUTE: tl.constexpr):
    return tl.load(pointer + row + column, mask=inside, other=0.0).to(COMPUTE)


@triton.jit
def _store(pointer, row, column, value, inside):
    tl.store(pointer + row + column, value.to(pointer.dtype.element_ty), mask=inside)
