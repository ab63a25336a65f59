"""Attention of one new token from the half-width cache: keys are made from t in registers and never stored.

The keys are cut into splits, so that a single sequence fills the GPU. A program attends from one split for HEADS
key/value heads together, because all heads share their angles, which would else be read HEADS times: their t and
values lie side by side, (n, HEADS * j) and (n, HEADS * d), and each query is zero outside its own head, so that one
matrix product scores all of them. A second kernel joins the splits. Softmax and sums are fp32. Letters: see
`models/attention.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_KEYS = 32
PROGRAMS_PER_PROCESSOR = 2
SHARED_BYTES = 320  # of a processor's shared memory, for each of the HEADS * d numbers of a program's values
LOG2_E = 1.4426950408889634


@torch.library.custom_op("coca::decode", mutates_args=())
def decode_attention(
    query: Tensor, t: Tensor, value: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, scaling: float, strict: bool
) -> Tensor:
    """`softmax(query . coca_key(t, cos, sin) * scaling) value`, (b, h, 1, d), in the dtype of the query; no gradient.

    query: (b, h, 1, d), folded; t: (b, g, n, j), before its ReLU; value: (b, g, n, d); cos, sin: (b or 1, 1, n, j);
    mask: (b or 1, 1, 1, n), True where attention is allowed, or None. Any strides. fp16 or bf16 (fp32 as tf32).
    """
    batch, heads, _, head_dim = query.shape
    kv_heads, length, pairs = t.shape[1:]
    groups = heads // kv_heads
    block_dim = triton.next_power_of_2(head_dim)
    processors, width = _gpu(query)
    most = max(1, min(width // block_dim, triton.next_power_of_2(kv_heads), 16 // groups))
    together = 1 << (most.bit_length() - 1)
    programs = batch * triton.cdiv(kv_heads, together)
    blocks = triton.cdiv(length, BLOCK_KEYS)
    splits = max(1, min(blocks, triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, programs)))
    split_keys = triton.cdiv(blocks, splits) * BLOCK_KEYS
    splits = triton.cdiv(length, split_keys)

    partial = query.new_empty(batch, heads, splits, head_dim, dtype=torch.float32)
    log_sum = query.new_empty(batch, heads, splits, dtype=torch.float32)
    output = query.new_empty(batch, heads, 1, head_dim)
    cos, sin = (x.expand(batch, 1, length, pairs) for x in (cos, sin))
    allowed = query if mask is None else mask.expand(batch, 1, 1, length).view(torch.uint8)
    with torch.cuda.device_of(query):
        _split_kernel[(triton.cdiv(kv_heads, together), splits, batch)](
            query, t, value, cos, sin, allowed, partial, log_sum,
            *(query.stride(i) for i in (0, 1, 3)), *t.stride(), *value.stride(),
            *(x.stride(i) for x in (cos, sin) for i in (0, 2, 3)), allowed.stride(0), allowed.stride(3),
            length, split_keys, splits, scaling * LOG2_E,
            KV_HEADS=kv_heads, GROUPS=groups, PAIRS=pairs, HEADS=together,
            ROWS=max(16, triton.next_power_of_2(together * groups)), BLOCK_KEYS=BLOCK_KEYS,
            BLOCK_PAIRS=max(16 // together, block_dim // 2), MASKED=mask is not None, STRICT=strict,
            num_warps=4, num_stages=3,
        )  # fmt: skip
        _join_kernel[(batch * heads,)](
            partial, log_sum, output, splits,
            HEAD_DIM=head_dim, BLOCK_DIM=block_dim, BLOCK_SPLITS=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return output


@decode_attention.register_fake
def _(query, t, value, cos, sin, mask, scaling, strict):
    return query.new_empty(query.shape)


def _gpu(x: Tensor) -> tuple[int, int]:
    """How many processors the device has, and how many numbers of values a program may hold."""
    if not x.is_cuda:  # Triton's interpreter
        return 2, 512
    gpu = torch.cuda.get_device_properties(x.device)
    shared = getattr(gpu, "shared_memory_per_multiprocessor", 1 << 16)  # ROCm does not say
    return gpu.multi_processor_count, shared // SHARED_BYTES


# Numbers that change from token to token would else be compiled anew for what divides them.
@triton.jit(do_not_specialize=["length", "splits", "mask_b", "cos_b", "sin_b"])
def _split_kernel(
    query_ptr, t_ptr, value_ptr, cos_ptr, sin_ptr, mask_ptr, partial_ptr, log_sum_ptr,
    query_b, query_h, query_d, t_b, t_g, t_n, t_d, value_b, value_g, value_n, value_d,
    cos_b, cos_n, cos_d, sin_b, sin_n, sin_d, mask_b, mask_n,
    length, split_keys, splits, scale,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, MASKED: tl.constexpr, STRICT: tl.constexpr,
):  # fmt: skip
    # 64 bits: a long cache has more numbers than 32 bits count
    first_head, split, b = tl.program_id(0).to(tl.int64) * HEADS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    HALF: tl.constexpr = HEADS * BLOCK_PAIRS
    row = tl.arange(0, ROWS)  # a query: its head among those together, times GROUPS, and its place in the group
    half = tl.arange(0, HALF)  # a number of t: its head, and its pair
    column = tl.arange(0, 2 * HALF)  # a number of a value: its head, and its dimension
    half_head, pair = half // BLOCK_PAIRS, half % BLOCK_PAIRS
    column_head, dim = column // (2 * BLOCK_PAIRS), column % (2 * BLOCK_PAIRS)
    half_there = (pair < PAIRS) & (first_head + half_head < KV_HEADS)
    column_there = (dim < 2 * PAIRS) & (first_head + column_head < KV_HEADS)

    own = (row[:, None] // GROUPS == half_head[None, :]) & half_there[None, :]
    query_ptr += b * query_b + (first_head * GROUPS + row[:, None]) * query_h
    query_first = tl.load(query_ptr + pair[None, :] * query_d, mask=own, other=0.0)
    query_second = tl.load(query_ptr + (pair[None, :] + PAIRS) * query_d, mask=own, other=0.0)

    one_head = tl.arange(0, BLOCK_PAIRS)
    t_ptr += b * t_b + (first_head + half_head[None, :]) * t_g + pair[None, :] * t_d
    value_ptr += b * value_b + (first_head + column_head[None, :]) * value_g + dim[None, :] * value_d
    cos_ptr += b * cos_b + one_head[None, :] * cos_d
    sin_ptr += b * sin_b + one_head[None, :] * sin_d
    mask_ptr += b * mask_b

    greatest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, 2 * HALF), tl.float32)
    for start in range(split * split_keys, min((split + 1) * split_keys, length), BLOCK_KEYS):
        key = (start + tl.arange(0, BLOCK_KEYS)).to(tl.int64)
        there = key < length
        angle_there = there[:, None] & (one_head[None, :] < PAIRS)
        cos = tl.load(cos_ptr + key[:, None] * cos_n, mask=angle_there, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + key[:, None] * sin_n, mask=angle_there, other=0.0).to(tl.float32)
        t = tl.load(t_ptr + key[:, None] * t_n, mask=there[:, None] & half_there[None, :], other=0.0)
        value = tl.load(value_ptr + key[:, None] * value_n, mask=there[:, None] & column_there[None, :], other=0.0)
        if MASKED:
            there &= tl.load(mask_ptr + key * mask_n, mask=there, other=0) != 0

        if not STRICT:
            cos, sin = cos - sin, cos + sin
        cos = tl.reshape(tl.broadcast_to(cos[:, None, :], (BLOCK_KEYS, HEADS, BLOCK_PAIRS)), (BLOCK_KEYS, HALF))
        sin = tl.reshape(tl.broadcast_to(sin[:, None, :], (BLOCK_KEYS, HEADS, BLOCK_PAIRS)), (BLOCK_KEYS, HALF))
        positive = tl.where(t < 0, 0.0, t.to(tl.float32))
        key_first, key_second = (positive * cos).to(t.dtype), (positive * sin).to(t.dtype)
        scores = tl.dot(query_first, tl.trans(key_first))
        scores = tl.dot(query_second, tl.trans(key_second), scores) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))

        above = tl.maximum(greatest, tl.max(scores, axis=1))
        origin = tl.where(above == float("-inf"), 0.0, above)  # no key is allowed yet
        weights = tl.exp2(scores - origin[:, None])
        fade = tl.exp2(greatest - origin)
        total = total * fade + tl.sum(weights, axis=1)
        sums = tl.dot(weights.to(value.dtype), value, sums * fade[:, None])
        greatest = above

    query_head = first_head * GROUPS + row
    row_there = (row < HEADS * GROUPS) & (query_head < KV_HEADS * GROUPS)
    place = (b * KV_HEADS * GROUPS + query_head) * splits + split
    tl.store(log_sum_ptr + place, greatest + tl.log2(total), mask=row_there)
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    own = (row[:, None] // GROUPS == column_head[None, :]) & column_there[None, :] & row_there[:, None]
    tl.store(partial_ptr + place[:, None] * (2 * PAIRS) + dim[None, :], sums, mask=own)


@triton.jit(do_not_specialize=["splits"])
def _join_kernel(
    partial_ptr, log_sum_ptr, output_ptr, splits,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_DIM)
    log_sum = tl.load(log_sum_ptr + row * splits + split, mask=split < splits, other=float("-inf"))
    greatest = tl.max(log_sum, axis=0)
    weights = tl.exp2(log_sum - tl.where(greatest == float("-inf"), 0.0, greatest))
    there = (split[:, None] < splits) & (dim[None, :] < HEAD_DIM)
    partial = tl.load(partial_ptr + (row * splits + split[:, None]) * HEAD_DIM + dim[None, :], mask=there, other=0.0)
    total = tl.sum(weights, axis=0)
    output = tl.sum(partial * weights[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    tl.store(output_ptr + row * HEAD_DIM + dim, output.to(output_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
