"""Attention of one new token to the half-width cache, without building keys in memory or in
registers.

A score is linear in t, with weights that depend only on the key's angles and on the query (q', k'
of `models/attention.py`, written out over pairs j):

    score(n) = sum_j t_nj (a_j cos_nj + b_j sin_nj)    slack  a = q'_j + q'_(j + d/2), b = q'_(j + d/2) - q'_j
                                                       strict a = q'_j,               b = q'_(j + d/2)

A program reads t, values and angles once and computes on ordinary floating-point units. Keys are cut
into splits, so a single sequence fills the GPU; a second kernel joins the splits. A program takes one
split of SHARES x HEADS key/value heads. Each of its warps attends with HEADS of them to some of the
keys, and each group of threads that holds a whole key keeps its own softmax: until the end of the
split, threads exchange nothing but the parts of a score. The angles, which all heads share, are read
from memory once for a program; its other warps find them in the L1 cache. The next keys are loaded
while the present ones are attended to. All sums are in fp32. Letters: see `models/attention.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 2  # key/value heads of a warp, or one if several query heads share it
GROUPS = 4  # query heads of a warp that share a key/value head, at most
SHARES = 2  # warps with different heads, at most
WARPS = 4
PROGRAMS_PER_PROCESSOR = 4  # that run at once, or two if a warp has more than two query heads
JOINED, JOINED_DIMS = 128, 32  # splits and dimensions that a thread block joins at a time
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
    block_groups = min(GROUPS, triton.next_power_of_2(groups))
    together = min(HEADS, triton.next_power_of_2(kv_heads)) if groups == 1 else 1
    shares = min(SHARES, triton.next_power_of_2(triton.cdiv(kv_heads, together)))
    keys = max(1, 8 * 32 // block_pairs) * WARPS // shares  # a thread loads 16 bytes
    chunks = triton.cdiv(kv_heads, shares * together) * triton.cdiv(groups, block_groups)
    programs = PROGRAMS_PER_PROCESSOR if together * block_groups <= 2 else 2
    blocks = triton.cdiv(length, keys)
    splits = _splits(blocks, batch * chunks, programs * _processors(query))
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
            KV_HEADS=kv_heads, GROUPS=groups, PAIRS=pairs, SHARES=shares, HEADS=together, BLOCK_GROUPS=block_groups,
            KEYS=keys, BLOCK_PAIRS=block_pairs, MASKED=mask is not None, STRICT=strict, num_warps=WARPS,
        )  # fmt: skip
        _join_kernel[(batch * heads, triton.cdiv(head_dim, JOINED_DIMS))](
            partial, log_sum, output, splits,
            HEAD_DIM=head_dim, BLOCK_DIM=JOINED_DIMS, BLOCK_SPLITS=JOINED, num_warps=4,
        )  # fmt: skip
    return output


@decode_attention.register_fake
def _(query, t, value, cos, sin, mask, scaling, strict):
    return query.new_empty(query.shape)


def _splits(blocks: int, rows: int, slots: int) -> int:
    """Into how many splits to cut `blocks` of keys, so that the programs of all `rows` fill the `slots` of
    the GPU once, or up to four times if that leaves clearly less of it idle.
    """
    choices = [max(1, min(blocks, times * slots // rows)) for times in (1, 2, 3, 4)]
    busy = [n * rows / (triton.cdiv(n * rows, slots) * slots) for n in choices]
    return next(n for n, share in zip(choices, busy, strict=True) if share > 0.95 * max(busy))


def _processors(x: Tensor) -> int:
    if not x.is_cuda:  # Triton's interpreter
        return 2
    return torch.cuda.get_device_properties(x.device).multi_processor_count


# These change with every token; specialising on their divisibility would recompile. The strides of
# everything but the mask are specialised: without it, loads are of one number at a time.
@triton.jit(do_not_specialize=["length", "split_keys", "splits", "mask_b"])
def _split_kernel(
    query_ptr, t_ptr, value_ptr, cos_ptr, sin_ptr, mask_ptr, partial_ptr, log_sum_ptr,
    query_b, query_h, query_d, t_b, t_g, t_n, t_d, value_b, value_g, value_n, value_d,
    cos_b, cos_n, cos_d, sin_b, sin_n, sin_d, mask_b, mask_n,
    length, split_keys, splits, scale,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, SHARES: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, KEYS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, MASKED: tl.constexpr,
    STRICT: tl.constexpr,
):  # fmt: skip
    # Tiles are loaded in two dimensions, (.., pair), which threads share out in one way, and then have the
    # axes: key/value head of a warp, query head that shares it, row (share and slot of a key), pair.
    # 64-bit offsets: a long cache has more numbers than 32 bits can count
    chunk, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    ROWS: tl.constexpr = SHARES * KEYS
    STORED: tl.constexpr = HEADS * BLOCK_GROUPS * SHARES  # query heads of the program
    group_blocks: tl.constexpr = (GROUPS + BLOCK_GROUPS - 1) // BLOCK_GROUPS
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    pair_there = pair < PAIRS

    place = tl.arange(0, HEADS * BLOCK_GROUPS * ROWS)[:, None]
    head = _head(
        chunk // group_blocks, place // (BLOCK_GROUPS * ROWS), place % ROWS, SHARES, HEADS, KEYS
    )
    group = chunk % group_blocks * BLOCK_GROUPS + place // ROWS % BLOCK_GROUPS
    of_query = (group < GROUPS) & (head < KV_HEADS)
    query_head = head * GROUPS + group
    query_ptr += b * query_b + query_head * query_h + pair * query_d
    with_cos = tl.load(query_ptr, mask=of_query & pair_there, other=0.0).to(tl.float32) * scale
    with_sin = (
        tl.load(query_ptr + PAIRS * query_d, mask=of_query & pair_there, other=0.0).to(tl.float32)
        * scale
    )
    if not STRICT:
        with_cos, with_sin = with_cos + with_sin, with_sin - with_cos
    with_cos = with_cos.reshape(HEADS, BLOCK_GROUPS, ROWS, BLOCK_PAIRS)
    with_sin = with_sin.reshape(HEADS, BLOCK_GROUPS, ROWS, BLOCK_PAIRS)

    place = tl.arange(0, HEADS * ROWS)[:, None]
    head = _head(chunk // group_blocks, place // ROWS, place % ROWS, SHARES, HEADS, KEYS)
    slot, of_t = place % KEYS, (head < KV_HEADS) & pair_there
    t_ptr += b * t_b + head * t_g + slot * t_n + pair * t_d
    value_ptr += b * value_b + head * value_g + slot * value_n + pair * value_d
    row = tl.arange(0, ROWS)[:, None]
    cos_ptr += b * cos_b + row % KEYS * cos_n + pair * cos_d
    sin_ptr += b * sin_b + row % KEYS * sin_n + pair * sin_d
    mask_ptr += b * mask_b + row % KEYS * mask_n

    greatest = tl.full((HEADS, BLOCK_GROUPS, ROWS, 1), float("-inf"), tl.float32)
    total = tl.zeros((HEADS, BLOCK_GROUPS, ROWS, 1), tl.float32)
    first_sums = tl.zeros((HEADS, BLOCK_GROUPS, ROWS, BLOCK_PAIRS), tl.float32)
    second_sums = tl.zeros((HEADS, BLOCK_GROUPS, ROWS, BLOCK_PAIRS), tl.float32)
    begin, end = split * split_keys, min((split + 1) * split_keys, length)
    cos, sin, t, first, second = _load(
        cos_ptr, sin_ptr, t_ptr, value_ptr, value_ptr + PAIRS * value_d, cos_n, sin_n, t_n, value_n,
        begin, (begin + row % KEYS < end) & pair_there, (begin + slot < end) & of_t,
    )  # fmt: skip
    for start in range(begin, end, KEYS):
        following = start + KEYS
        next_cos, next_sin, next_t, next_first, next_second = _load(
            cos_ptr, sin_ptr, t_ptr, value_ptr, value_ptr + PAIRS * value_d, cos_n, sin_n, t_n, value_n,
            following, (following + row % KEYS < end) & pair_there, (following + slot < end) & of_t,
        )  # fmt: skip

        allowed = start + row % KEYS < end
        if MASKED:
            allowed &= (
                tl.load(mask_ptr + tl.cast(start, tl.int64) * mask_n, mask=allowed, other=0) != 0
            )
        t = t.to(tl.float32).reshape(HEADS, 1, ROWS, BLOCK_PAIRS)
        weights = (
            with_cos * cos.to(tl.float32)[None, None] + with_sin * sin.to(tl.float32)[None, None]
        )
        scores = tl.where(
            allowed[None, None], tl.sum(t * weights, axis=3, keep_dims=True), float("-inf")
        )
        above = tl.maximum(greatest, scores)
        origin = tl.where(above == float("-inf"), 0.0, above)  # no key of this slot is allowed yet
        weights, fade = tl.exp2(scores - origin), tl.exp2(greatest - origin)
        total = total * fade + weights
        first_sums = first_sums * fade + weights * first.to(tl.float32).reshape(
            HEADS, 1, ROWS, BLOCK_PAIRS
        )
        second_sums = second_sums * fade + weights * second.to(tl.float32).reshape(
            HEADS, 1, ROWS, BLOCK_PAIRS
        )
        greatest = above
        cos, sin, t, first, second = next_cos, next_sin, next_t, next_first, next_second

    # The slots of a share are joined, and the axes are: (key/value head, query head, share), slot, pair
    greatest = greatest.reshape(STORED, KEYS, 1)
    above = tl.max(greatest, axis=1, keep_dims=True)
    fade = tl.exp2(greatest - tl.where(above == float("-inf"), 0.0, above))
    total = tl.sum(total.reshape(STORED, KEYS, 1) * fade, axis=1, keep_dims=True)
    fade /= tl.where(total == 0, 1.0, total)
    first_sums = tl.sum(first_sums.reshape(STORED, KEYS, BLOCK_PAIRS) * fade, axis=1)
    second_sums = tl.sum(second_sums.reshape(STORED, KEYS, BLOCK_PAIRS) * fade, axis=1)
    place = tl.arange(0, STORED)[:, None]
    head = _head(
        chunk // group_blocks,
        place // (BLOCK_GROUPS * SHARES),
        place % SHARES * KEYS,
        SHARES,
        HEADS,
        KEYS,
    )
    group = chunk % group_blocks * BLOCK_GROUPS + place // SHARES % BLOCK_GROUPS
    of_query = (group < GROUPS) & (head < KV_HEADS)
    result = (b * KV_HEADS * GROUPS + head * GROUPS + group) * splits + split
    tl.store(log_sum_ptr + result, (above + tl.log2(total)).reshape(STORED, 1), mask=of_query)
    partial_ptr += result * (2 * PAIRS) + pair
    tl.store(partial_ptr, first_sums, mask=of_query & pair_there)
    tl.store(partial_ptr + PAIRS, second_sums, mask=of_query & pair_there)


@triton.jit
def _head(chunk, head, row, SHARES: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr):
    """The key/value head of a row of the program's `chunk`: the `head`-th of the row's share."""
    return ((chunk * SHARES + row // KEYS) * HEADS + head).to(tl.int64)


@triton.jit
def _load(
    cos_ptr, sin_ptr, t_ptr, first_ptr, second_ptr, cos_n, sin_n, t_n, value_n, key, angle_there, there
):  # fmt: skip
    """What a block of keys needs from `key` on; the two halves of values apart, because a half has t's shape."""
    key = tl.cast(key, tl.int64)
    cos = tl.load(cos_ptr + key * cos_n, mask=angle_there, other=0.0)
    sin = tl.load(sin_ptr + key * sin_n, mask=angle_there, other=0.0)
    t = tl.load(t_ptr + key * t_n, mask=there, other=0.0)
    first = tl.load(first_ptr + key * value_n, mask=there, other=0.0)
    second = tl.load(second_ptr + key * value_n, mask=there, other=0.0)
    return cos, sin, t, first, second


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
