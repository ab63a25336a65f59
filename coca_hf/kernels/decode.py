"""Attention of one new token to the half-width cache, without building keys in memory or in
registers.

A score is linear in t, with weights that depend only on the key's angles and on the query (q', k'
of `models/attention.py`, written out over pairs j):

    score(n) = sum_j t_nj (a_j cos_nj + b_j sin_nj)    slack  a = q'_j + q'_(j + d/2), b = q'_(j + d/2) - q'_j
                                                       strict a = q'_j,               b = q'_(j + d/2)

A program reads t, values and angles once and computes on ordinary floating-point units, because
with one query per head tensor cores would multiply mostly zeros. Keys are cut into splits, so a
single sequence fills the GPU. A program takes one split of HEADS key/value heads, which share their
angles. Each of its KEYS slots keeps its own softmax over every KEYS-th key, so threads exchange
nothing until the end of the split. A second kernel joins the splits. All sums are in fp32. Letters:
see `models/attention.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 8  # key/value heads of a program, at most
GROUPS = 4  # query heads that share a key/value head in a program, at most
SUMS_PER_THREAD = 32  # sums of values in the registers of a thread
WARPS = 4
PROGRAMS_PER_PROCESSOR = 8
# splits that a thread block joins at a time; hundreds at once would not fit into its registers
JOINED = 64
LOG2_E = 1.4426950408889634


@torch.library.custom_op("coca::decode", mutates_args=())
def decode_attention(
    query: Tensor,
    t: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None,
    scaling: float,
    strict: bool,
) -> Tensor:
    """`softmax(query . coca_key(t, cos, sin) * scaling) value`, (b, h, 1, d), in the dtype of the
    query; no gradient.

    query: (b, h, 1, d), folded; t: (b, g, n, j), after its ReLU; value: (b, g, n, d);
    cos, sin: (b or 1, 1, n, j); mask: (b or 1, 1, 1, n), True where attention is allowed, or None.
    All may have any strides, in fp16, bf16 or fp32.
    """
    batch, heads, _, head_dim = query.shape
    kv_heads, length, pairs = t.shape[1:]
    groups = heads // kv_heads
    block_dim = max(16, triton.next_power_of_2(head_dim))
    together = min(HEADS, triton.next_power_of_2(kv_heads))
    block_groups = min(GROUPS, triton.next_power_of_2(groups))
    keys = max(1, SUMS_PER_THREAD * 32 * WARPS // (together * block_groups * block_dim))
    chunks = triton.cdiv(kv_heads, together) * triton.cdiv(groups, block_groups)
    blocks = triton.cdiv(length, keys)
    splits = max(1, min(blocks, PROGRAMS_PER_PROCESSOR * _processors(query) // (batch * chunks)))
    split_keys = triton.cdiv(blocks, splits) * keys
    splits = triton.cdiv(length, split_keys)

    partial = query.new_empty(batch, heads, splits, head_dim, dtype=torch.float32)
    log_sum = query.new_empty(batch, heads, splits, dtype=torch.float32)
    output = query.new_empty(batch, heads, 1, head_dim)
    cos, sin = (x.expand(batch, 1, length, pairs) for x in (cos, sin))
    allowed = query if mask is None else mask.expand(batch, 1, 1, length).view(torch.uint8)
    with torch.cuda.device_of(query):
        _split_kernel[(chunks, splits, batch)](
            query, t, value, cos, sin, allowed, partial, log_sum,
            *(query.stride(i) for i in (0, 1, 3)), *t.stride(), *value.stride(),
            *(x.stride(i) for x in (cos, sin) for i in (0, 2, 3)), allowed.stride(0), allowed.stride(3),
            length, split_keys, splits, scaling * LOG2_E,
            KV_HEADS=kv_heads, GROUPS=groups, PAIRS=pairs, HEADS=together, BLOCK_GROUPS=block_groups, KEYS=keys,
            BLOCK_PAIRS=block_dim // 2, MASKED=mask is not None, STRICT=strict, num_warps=WARPS,
        )  # fmt: skip
        _join_kernel[(batch * heads,)](
            partial, log_sum, output, splits,
            HEAD_DIM=head_dim, BLOCK_DIM=block_dim, BLOCK_SPLITS=JOINED, num_warps=8,
        )  # fmt: skip
    return output


@decode_attention.register_fake
def _(query, t, value, cos, sin, mask, scaling, strict):
    return query.new_empty(query.shape)


def _processors(x: Tensor) -> int:
    if not x.is_cuda:  # Triton's interpreter
        return 2
    return torch.cuda.get_device_properties(x.device).multi_processor_count


# These change with every token; specialising on their divisibility would recompile.
@triton.jit(do_not_specialize=["length", "splits", "mask_b", "cos_b", "sin_b"])
def _split_kernel(
    query_ptr, t_ptr, value_ptr, cos_ptr, sin_ptr, mask_ptr, partial_ptr, log_sum_ptr,
    query_b, query_h, query_d, t_b, t_g, t_n, t_d, value_b, value_g, value_n, value_d,
    cos_b, cos_n, cos_d, sin_b, sin_n, sin_d, mask_b, mask_n,
    length, split_keys, splits, scale,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, KEYS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, MASKED: tl.constexpr,
    STRICT: tl.constexpr,
):  # fmt: skip
    # Axes of every tile: key (slot), key/value head, query head that shares it, pair or dimension.
    # 64-bit offsets: a long cache has more numbers than 32 bits can count
    chunk, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.arange(0, KEYS)[:, None, None, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, None, None, :]
    dim = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, None, :]
    group_blocks: tl.constexpr = (GROUPS + BLOCK_GROUPS - 1) // BLOCK_GROUPS
    head = (chunk // group_blocks * HEADS + tl.arange(0, HEADS)[None, :, None, None]).to(tl.int64)
    group = chunk % group_blocks * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)[None, None, :, None]
    query_head = head * GROUPS + group
    head_there, group_there = head < KV_HEADS, (group < GROUPS) & (head < KV_HEADS)
    pair_there, dim_there = pair < PAIRS, dim < 2 * PAIRS

    query_ptr += b * query_b + query_head * query_h
    of_query = group_there & pair_there
    with_cos = tl.load(query_ptr + pair * query_d, mask=of_query, other=0.0).to(tl.float32) * scale
    with_sin = (
        tl.load(query_ptr + (pair + PAIRS) * query_d, mask=of_query, other=0.0).to(tl.float32)
        * scale
    )
    if not STRICT:
        with_cos, with_sin = with_cos + with_sin, with_sin - with_cos

    t_ptr += b * t_b + head * t_g + pair * t_d
    value_ptr += b * value_b + head * value_g + dim * value_d
    cos_ptr += b * cos_b + pair * cos_d
    sin_ptr += b * sin_b + pair * sin_d
    mask_ptr += b * mask_b

    greatest = tl.full((KEYS, HEADS, BLOCK_GROUPS, 1), float("-inf"), tl.float32)
    total = tl.zeros((KEYS, HEADS, BLOCK_GROUPS, 1), tl.float32)
    sums = tl.zeros((KEYS, HEADS, BLOCK_GROUPS, 2 * BLOCK_PAIRS), tl.float32)
    for start in range(split * split_keys, min((split + 1) * split_keys, length), KEYS):
        key = (start + slot).to(tl.int64)
        there = key < length
        cos = tl.load(cos_ptr + key * cos_n, mask=there & pair_there, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + key * sin_n, mask=there & pair_there, other=0.0).to(tl.float32)
        t = tl.load(t_ptr + key * t_n, mask=there & head_there & pair_there, other=0.0).to(
            tl.float32
        )
        value = tl.load(
            value_ptr + key * value_n, mask=there & head_there & dim_there, other=0.0
        ).to(tl.float32)
        if MASKED:
            there &= tl.load(mask_ptr + key * mask_n, mask=there, other=0) != 0

        scores = tl.sum(t * (with_cos * cos + with_sin * sin), axis=3, keep_dims=True)
        scores = tl.where(there, scores, float("-inf"))
        above = tl.maximum(greatest, scores)
        origin = tl.where(above == float("-inf"), 0.0, above)  # no key of this slot is allowed yet
        weights, fade = tl.exp2(scores - origin), tl.exp2(greatest - origin)
        total = total * fade + weights
        sums = sums * fade + weights * value
        greatest = above

    above = tl.max(greatest, axis=0, keep_dims=True)
    origin = tl.where(above == float("-inf"), 0.0, above)
    fade = tl.exp2(greatest - origin)
    total = tl.sum(total * fade, axis=0, keep_dims=True)
    sums = tl.sum(sums * fade, axis=0, keep_dims=True) / tl.where(total == 0, 1.0, total)
    place = (b * KV_HEADS * GROUPS + query_head) * splits + split
    tl.store(log_sum_ptr + place, above + tl.log2(total), mask=group_there)
    tl.store(partial_ptr + place * (2 * PAIRS) + dim, sums, mask=group_there & dim_there)


@triton.jit(do_not_specialize=["splits"])
def _join_kernel(
    partial_ptr, log_sum_ptr, output_ptr, splits,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot, dim = tl.arange(0, BLOCK_SPLITS)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
    greatest = tl.full((BLOCK_SPLITS, 1), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_SPLITS, 1), tl.float32)
    sums = tl.zeros((BLOCK_SPLITS, BLOCK_DIM), tl.float32)
    for start in range(0, splits, BLOCK_SPLITS):
        split = start + slot
        log_sum = tl.load(
            log_sum_ptr + row * splits + split, mask=split < splits, other=float("-inf")
        )
        there = (split < splits) & (dim < HEAD_DIM)
        partial = tl.load(
            partial_ptr + (row * splits + split) * HEAD_DIM + dim, mask=there, other=0.0
        )
        above = tl.maximum(greatest, log_sum)
        origin = tl.where(above == float("-inf"), 0.0, above)
        weights, fade = tl.exp2(log_sum - origin), tl.exp2(greatest - origin)
        total = total * fade + weights
        sums = sums * fade + weights * partial
        greatest = above

    above = tl.max(greatest, axis=0, keep_dims=True)
    fade = tl.exp2(greatest - tl.where(above == float("-inf"), 0.0, above))
    total = tl.sum(total * fade, axis=0, keep_dims=True)
    output = tl.sum(sums * fade, axis=0, keep_dims=True) / tl.where(total == 0, 1.0, total)
    tl.store(
        output_ptr + row * HEAD_DIM + dim,
        output.to(output_ptr.dtype.element_ty),
        mask=dim < HEAD_DIM,
    )
