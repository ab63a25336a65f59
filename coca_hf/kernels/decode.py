"""Attention of one new token to the half-width cache, without building keys in memory.

A score is linear in t cos and t sin, with weights that depend only on the query (q', k' of
`models/attention.py`, written out over pairs j):

    score(n) = sum_j t_nj (a_j cos_nj + b_j sin_nj)    slack  a = q'_j + q'_(j + d/2), b = q'_(j + d/2) - q'_j
                                                       strict a = q'_j,               b = q'_(j + d/2)

Keys are cut into splits, so a single sequence fills the GPU; a second kernel joins the splits. A
program attends to one split of HEADS key/value heads. It copies blocks of t, values and angles to
shared memory while it works on the block before, and multiplies on tensor cores: rows of a product
are the keys of its heads, columns are the query heads that share them, and a score of another head
than the key's counts as masked. So the angles, which all heads share, are read once for HEADS of
them, and a step takes one product whatever the number of heads. a and b are each two numbers, the
rounded one and what rounding left, because products round only t cos, t sin and the weights. All
sums are in fp32. Letters: see `models/attention.py`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 2  # key/value heads of a program, if there is an even number and few query heads share one
COLUMNS = 8  # query heads of a program: the fewest that tensor cores multiply by
TILE = 8192  # numbers of t in a block, at most
STAGES = 3  # of Triton's pipeline; one block less is in shared memory
WARPS = 4
PROGRAMS_PER_PROCESSOR = 1
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
    All may have any strides, in fp16 or bf16, and angles in fp32, too. All in fp32, heads of more
    than 128 dimensions may not fit into the GPU's shared memory.
    """
    batch, heads, _, head_dim = query.shape
    kv_heads, length, pairs = t.shape[1:]
    groups = heads // kv_heads
    block_pairs = max(16, triton.next_power_of_2(pairs))
    together = HEADS if kv_heads % HEADS == 0 and groups * HEADS <= COLUMNS else 1
    processors, shared_memory = _gpu(query.device)
    keys = _keys(together, block_pairs, value.element_size(), cos.element_size(), shared_memory)
    chunks = kv_heads // together * triton.cdiv(groups, COLUMNS // together)
    blocks = triton.cdiv(length, keys)
    splits = _splits(blocks, batch * chunks, PROGRAMS_PER_PROCESSOR * processors)
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
            KV_HEADS=kv_heads, GROUPS=groups, PAIRS=pairs, HEADS=together, COLUMNS=COLUMNS, KEYS=keys,
            BLOCK_PAIRS=block_pairs, MASKED=mask is not None, STRICT=strict, STAGES=STAGES, num_warps=WARPS,
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


def _keys(heads: int, block_pairs: int, width: int, angle_width: int, shared_memory: int) -> int:
    """Keys of a block: as many as TILE allows and fit into shared memory.

    width: bytes of a number of t and of values; angle_width: of an angle, which autocast leaves in fp32.
    """
    keys = TILE // block_pairs // heads
    of_key = (3 * heads * width + 2 * angle_width) * block_pairs
    blocks = STAGES - 1 if width == 2 else STAGES  # products of fp32 are not made in registers
    while keys > 16 and keys * of_key * blocks > 0.9 * shared_memory:  # fewer cannot be multiplied
        keys //= 2
    return keys


@functools.cache  # ask the driver once, not for every layer and token
def _gpu(device: torch.device) -> tuple[int, int]:
    """Its processors, and the bytes of shared memory that a program may have."""
    if device.type == "cpu":  # Triton's interpreter
        return 2, 227 << 10
    found = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return found["multiprocessor_count"], found["max_shared_mem"]


# These change with every token; specialising on their divisibility would recompile. The strides of
# everything but the mask are specialised: without it, copies are of one number at a time.
@triton.jit(do_not_specialize=["length", "split_keys", "splits", "mask_b"])
def _split_kernel(
    query_ptr, t_ptr, value_ptr, cos_ptr, sin_ptr, mask_ptr, partial_ptr, log_sum_ptr,
    query_b, query_h, query_d, t_b, t_g, t_n, t_d, value_b, value_g, value_n, value_d,
    cos_b, cos_n, cos_d, sin_b, sin_n, sin_d, mask_b, mask_n,
    length, split_keys, splits, scale,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, MASKED: tl.constexpr, STRICT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # 64-bit offsets: a long cache has more numbers than 32 bits can count
    chunk, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    ROWS: tl.constexpr = HEADS * KEYS
    of_head: tl.constexpr = COLUMNS // HEADS  # columns
    group_blocks: tl.constexpr = (GROUPS + of_head - 1) // of_head
    first_head = (chunk // group_blocks * HEADS).to(tl.int64)
    dtype: tl.constexpr = value_ptr.dtype.element_ty
    pair, dim = tl.arange(0, BLOCK_PAIRS), tl.arange(0, 2 * BLOCK_PAIRS)

    column = tl.arange(0, COLUMNS)[None, :]
    group = chunk % group_blocks * of_head + column % of_head
    of_query = group < GROUPS
    query_head = (first_head + column // of_head) * GROUPS + group
    query_ptr += b * query_b + query_head * query_h + pair[:, None] * query_d
    of_pair = of_query & (pair < PAIRS)[:, None]
    with_cos = tl.load(query_ptr, mask=of_pair, other=0.0).to(tl.float32)
    with_sin = tl.load(query_ptr + PAIRS * query_d, mask=of_pair, other=0.0).to(tl.float32)
    if not STRICT:
        with_cos, with_sin = with_cos + with_sin, with_sin - with_cos
    rounded_cos, rounded_sin = with_cos.to(dtype), with_sin.to(dtype)
    rest_cos, rest_sin = (with_cos - rounded_cos).to(dtype), (with_sin - rounded_sin).to(dtype)

    begin, end = split * split_keys, min((split + 1) * split_keys, length)
    head, slot = tl.arange(0, ROWS) // KEYS, tl.arange(0, ROWS) % KEYS  # of a row
    row_head, key = first_head + head, tl.cast(begin, tl.int64) + slot
    t_ptr += b * t_b + (row_head * t_g + key * t_n)[:, None] + pair[None, :] * t_d
    value_ptr += (
        b * value_b + (row_head * value_g + key * value_n)[None, :] + dim[:, None] * value_d
    )
    mask_ptr += b * mask_b + key[:, None] * mask_n
    of_angle = tl.arange(0, KEYS)
    angle_key = (tl.cast(begin, tl.int64) + of_angle)[:, None]
    cos_ptr += b * cos_b + angle_key * cos_n + pair[None, :] * cos_d
    sin_ptr += b * sin_b + angle_key * sin_n + pair[None, :] * sin_d
    own_head = head[:, None] == column // of_head

    greatest = tl.full((1, COLUMNS), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    sums = tl.zeros((2 * BLOCK_PAIRS, COLUMNS), tl.float32)
    if MASKED:
        unmasked = tl.load(mask_ptr, mask=(slot < end - begin)[:, None], other=0)
    for start in tl.range(0, end - begin, KEYS, num_stages=STAGES):
        left = end - begin - start
        angle_there = (of_angle < left)[:, None] & (pair < PAIRS)[None, :]
        cos = tl.load(cos_ptr, mask=angle_there, other=0.0)[None].to(tl.float32)
        sin = tl.load(sin_ptr, mask=angle_there, other=0.0)[None].to(tl.float32)
        t_there = (slot < left)[:, None] & (pair < PAIRS)[None, :]
        t = tl.load(t_ptr, mask=t_there, other=0.0).to(tl.float32)
        value_there = (slot < left)[None, :] & (dim < 2 * PAIRS)[:, None]
        value = tl.load(value_ptr, mask=value_there, other=0.0)
        allowed = (slot < left)[:, None]
        # Triton copies nothing as narrow as a mask ahead of its use: the next block's is loaded here
        if MASKED:
            allowed &= unmasked != 0
            mask_ptr += KEYS * mask_n
            unmasked = tl.load(mask_ptr, mask=(slot < left - KEYS)[:, None], other=0)

        cos = cos.broadcast_to(HEADS, KEYS, BLOCK_PAIRS).reshape(ROWS, BLOCK_PAIRS)
        sin = sin.broadcast_to(HEADS, KEYS, BLOCK_PAIRS).reshape(ROWS, BLOCK_PAIRS)
        t_cos, t_sin = (t * cos).to(dtype), (t * sin).to(dtype)
        scores = tl.dot(t_cos, rounded_cos, input_precision="ieee")
        scores = tl.dot(t_sin, rounded_sin, scores, input_precision="ieee")
        scores = tl.dot(t_cos, rest_cos, scores, input_precision="ieee")
        scores = tl.dot(t_sin, rest_sin, scores, input_precision="ieee")
        # fp16 has room for a query, but not for one that is scaled
        scores = tl.where(allowed & own_head, scores * scale, float("-inf"))
        above = tl.maximum(greatest, tl.max(scores, axis=0, keep_dims=True))
        origin = tl.where(above == float("-inf"), 0.0, above)  # no key is allowed yet
        weights, fade = tl.exp2(scores - origin), tl.exp2(greatest - origin)
        total = total * fade + weights
        sums = tl.dot(value, weights.to(dtype), sums * fade, input_precision="ieee")
        greatest = above
        t_ptr += KEYS * t_n
        value_ptr += KEYS * value_n
        cos_ptr += KEYS * cos_n
        sin_ptr += KEYS * sin_n

    total = tl.sum(total, axis=0, keep_dims=True)
    sums /= tl.where(total == 0, 1.0, total)
    result = (b * KV_HEADS * GROUPS + query_head) * splits + split
    tl.store(log_sum_ptr + result, greatest + tl.log2(total), mask=of_query)
    partial_ptr += result * (2 * PAIRS) + dim[:, None]
    tl.store(partial_ptr, sums, mask=of_query & (dim < 2 * PAIRS)[:, None])


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
