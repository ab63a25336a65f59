"""Attention of one new token to the half-width cache, without building keys in memory or in
registers.

A score is linear in t, with weights that depend only on the key's angles and on the query (q', k'
of `models/attention.py`, written out over pairs j):

    score(n) = sum_j t_nj (a_j cos_nj + b_j sin_nj)    slack  a = q'_j + q'_(j + d/2), b = q'_(j + d/2) - q'_j
                                                       strict a = q'_j,               b = q'_(j + d/2)

A program reads t, values and angles once and computes on ordinary floating-point units. Keys are cut
into splits, so a single sequence fills the GPU; a second kernel joins the splits. A program takes one
split of SHARES x HEADS key/value heads. Its warps divide the heads and the keys among themselves:
each attends with its own HEADS heads to its own keys, and each group of threads, which holds a whole
key, keeps its own softmax. So all tiles have one layout over threads, and nothing is exchanged until
the end of the split but the sum of a score. The angles, which all heads share, are read from memory
once for a program; its other warps find them in the L1 cache. The next keys are loaded while the
present ones are attended to. All sums are in fp32. Letters: see `models/attention.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 4  # pairs of a key/value head and a query head that shares it, in a warp
SHARES = 4  # warps with different heads, at most
WARPS = 4
PROGRAMS_PER_PROCESSOR = 2  # that run at once
CACHE = ".cg"  # of t and values: only in L2
JOINED = 128  # splits that a thread block joins at a time, at most
JOINED_DIMS = 32
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
    block_pairs = max(8, triton.next_power_of_2(pairs))
    block_groups = min(HEADS, triton.next_power_of_2(groups))
    together = min(HEADS // block_groups, triton.next_power_of_2(kv_heads))
    shares = min(SHARES, triton.next_power_of_2(triton.cdiv(kv_heads, together)))
    keys = max(1, 8 * 32 // block_pairs) * WARPS // shares  # a thread loads 16 bytes
    chunks = triton.cdiv(kv_heads, shares * together) * triton.cdiv(groups, block_groups)
    split_keys = keys * _blocks(triton.cdiv(length, keys), batch * chunks, _processors(query))
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
            KV_HEADS=kv_heads, GROUPS=groups, PAIRS=pairs, SHARES=shares, HEADS=together, BLOCK_GROUPS=block_groups,
            KEYS=keys, BLOCK_PAIRS=block_pairs, MASKED=mask is not None, STRICT=strict, CACHE=CACHE, num_warps=WARPS,
        )  # fmt: skip
        _join_kernel[(batch * heads, triton.cdiv(head_dim, JOINED_DIMS))](
            partial, log_sum, output, splits,
            HEAD_DIM=head_dim, BLOCK_DIM=JOINED_DIMS, BLOCK_SPLITS=JOINED, num_warps=4,
        )  # fmt: skip
    return output


@decode_attention.register_fake
def _(query, t, value, cos, sin, mask, scaling, strict):
    return query.new_empty(query.shape)


def _blocks(blocks: int, rows: int, processors: int) -> int:
    """How many of the `blocks` of keys a program takes, so that the programs of all `rows` fill the GPU once,
    or up to four times if that leaves less of it idle.
    """
    slots = PROGRAMS_PER_PROCESSOR * processors
    choices = [max(1, min(blocks, times * slots // rows)) for times in (1, 2, 3, 4)]
    splits = max(choices, key=lambda n: n * rows / (triton.cdiv(n * rows, slots) * slots))
    return triton.cdiv(blocks, splits)


def _processors(x: Tensor) -> int:
    if not x.is_cuda:  # Triton's interpreter
        return 2
    return torch.cuda.get_device_properties(x.device).multi_processor_count


# These change with every token; specialising on their divisibility would recompile.
@triton.jit(do_not_specialize=["length", "split_keys", "splits", "mask_b", "cos_b", "sin_b"])
def _split_kernel(
    query_ptr, t_ptr, value_ptr, cos_ptr, sin_ptr, mask_ptr, partial_ptr, log_sum_ptr,
    query_b, query_h, query_d, t_b, t_g, t_n, t_d, value_b, value_g, value_n, value_d,
    cos_b, cos_n, cos_d, sin_b, sin_n, sin_d, mask_b, mask_n,
    length, split_keys, splits, scale,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, SHARES: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, KEYS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, MASKED: tl.constexpr,
    STRICT: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    # Axes of every tile: key (slot), share, key/value head in it, query head that shares it, pair.
    # 64-bit offsets: a long cache has more numbers than 32 bits can count
    chunk, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group_blocks: tl.constexpr = (GROUPS + BLOCK_GROUPS - 1) // BLOCK_GROUPS
    slot = tl.arange(0, KEYS)[:, None, None, None, None]
    share = chunk // group_blocks * SHARES + tl.arange(0, SHARES)[None, :, None, None, None]
    head = (share * HEADS + tl.arange(0, HEADS)[None, None, :, None, None]).to(tl.int64)
    group = (
        chunk % group_blocks * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)[None, None, None, :, None]
    )
    query_head = head * GROUPS + group
    pair = tl.arange(0, BLOCK_PAIRS)[None, None, None, None, :]
    pair_there, head_there = pair < PAIRS, (head < KV_HEADS) & (pair < PAIRS)
    group_there = (group < GROUPS) & (head < KV_HEADS)

    query_ptr += b * query_b + query_head * query_h + pair * query_d
    of_query = group_there & pair_there
    with_cos = tl.load(query_ptr, mask=of_query, other=0.0).to(tl.float32) * scale
    with_sin = tl.load(query_ptr + PAIRS * query_d, mask=of_query, other=0.0).to(tl.float32) * scale
    if not STRICT:
        with_cos, with_sin = with_cos + with_sin, with_sin - with_cos

    t_ptr += b * t_b + head * t_g + slot * t_n + pair * t_d
    value_ptr += b * value_b + head * value_g + slot * value_n + pair * value_d
    cos_ptr += b * cos_b + share * 0 + slot * cos_n + pair * cos_d
    sin_ptr += b * sin_b + share * 0 + slot * sin_n + pair * sin_d
    mask_ptr += b * mask_b + slot * mask_n

    greatest = tl.full((KEYS, SHARES, HEADS, BLOCK_GROUPS, 1), float("-inf"), tl.float32)
    total = tl.zeros((KEYS, SHARES, HEADS, BLOCK_GROUPS, 1), tl.float32)
    first_sums = tl.zeros((KEYS, SHARES, HEADS, BLOCK_GROUPS, BLOCK_PAIRS), tl.float32)
    second_sums = tl.zeros((KEYS, SHARES, HEADS, BLOCK_GROUPS, BLOCK_PAIRS), tl.float32)
    start, end = split * split_keys, min((split + 1) * split_keys, length)
    there = start + slot < end
    key = start.to(tl.int64)
    cos = tl.load(cos_ptr + key * cos_n, mask=there & pair_there, other=0.0)
    sin = tl.load(sin_ptr + key * sin_n, mask=there & pair_there, other=0.0)
    t = tl.load(t_ptr + key * t_n, mask=there & head_there, other=0.0, cache_modifier=CACHE)
    first = tl.load(
        value_ptr + key * value_n, mask=there & head_there, other=0.0, cache_modifier=CACHE
    )
    second = tl.load(
        value_ptr + key * value_n + PAIRS * value_d,
        mask=there & head_there,
        other=0.0,
        cache_modifier=CACHE,
    )
    for start in range(split * split_keys, end, KEYS):
        there = start + KEYS + slot < end
        key = tl.cast(start, tl.int64) + KEYS
        next_cos = tl.load(cos_ptr + key * cos_n, mask=there & pair_there, other=0.0)
        next_sin = tl.load(sin_ptr + key * sin_n, mask=there & pair_there, other=0.0)
        next_t = tl.load(
            t_ptr + key * t_n, mask=there & head_there, other=0.0, cache_modifier=CACHE
        )
        next_first = tl.load(
            value_ptr + key * value_n, mask=there & head_there, other=0.0, cache_modifier=CACHE
        )
        next_second = tl.load(
            value_ptr + key * value_n + PAIRS * value_d,
            mask=there & head_there,
            other=0.0,
            cache_modifier=CACHE,
        )

        allowed = start + slot < end
        if MASKED:
            allowed &= (
                tl.load(mask_ptr + tl.cast(start, tl.int64) * mask_n, mask=allowed, other=0) != 0
            )
        weights = with_cos * cos.to(tl.float32) + with_sin * sin.to(tl.float32)
        scores = tl.sum(t.to(tl.float32) * weights, axis=4, keep_dims=True)
        scores = tl.where(allowed, scores, float("-inf"))
        above = tl.maximum(greatest, scores)
        origin = tl.where(above == float("-inf"), 0.0, above)  # no key of this slot is allowed yet
        weights, fade = tl.exp2(scores - origin), tl.exp2(greatest - origin)
        total = total * fade + weights
        first_sums = first_sums * fade + weights * first.to(tl.float32)
        second_sums = second_sums * fade + weights * second.to(tl.float32)
        greatest = above
        cos, sin, t, first, second = next_cos, next_sin, next_t, next_first, next_second

    above = tl.max(greatest, axis=0, keep_dims=True)
    fade = tl.exp2(greatest - tl.where(above == float("-inf"), 0.0, above))
    total = tl.sum(total * fade, axis=0, keep_dims=True)
    fade /= tl.where(total == 0, 1.0, total)
    place = (b * KV_HEADS * GROUPS + query_head) * splits + split
    tl.store(log_sum_ptr + place, above + tl.log2(total), mask=group_there)
    partial_ptr += place * (2 * PAIRS) + pair
    tl.store(partial_ptr, tl.sum(first_sums * fade, axis=0, keep_dims=True), mask=of_query)
    tl.store(partial_ptr + PAIRS, tl.sum(second_sums * fade, axis=0, keep_dims=True), mask=of_query)


@triton.jit(do_not_specialize=["splits"])
def _join_kernel(
    partial_ptr, log_sum_ptr, output_ptr, splits,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_SPLITS)[:, None]
    dim = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)[None, :]
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
