"""One persistent GEMM, h W^T, with four epilogues that keep the logits inside the chip.

The grid has one program per multiprocessor; each iterates over tiles [BLOCK_R, BLOCK_V] of the
product in an order that reads the weight once and the hidden states from the L2 cache. Operands are
loaded by TMA, products accumulate in fp32 registers, and an epilogue turns them into

- STATISTICS: m, s, u of the tile's rows (and z[label]): 12 bytes a row and tile written;
- PARTS: the same, with m a reference that is the same for most tiles instead of the maximum;
- EXPONENTIALS: the same as PARTS to the bit, and 2^(x - reference) in 16 bits, where reference is a
  power of two that rows rarely change from tile to tile: 2 bytes an element written;
- GRADIENT: dz from the statistics of whole rows, in 16 bits.

Inside, logits are in units of log 2, so that an exponential is one instruction.
"""

import triton
import triton.language as tl

from fastrl.kernels.transform import LN_2, LOG2_E, LOWEST, as_fp32, fast_tanh_and_slope

STATISTICS = tl.constexpr(0)
EXPONENTIALS = tl.constexpr(1)
GRADIENT = tl.constexpr(2)
PARTS = tl.constexpr(3)
# References are multiples of this: exponentials of a row whose logits stay within 2^-64 .. 2^64
# (44 nats) share the reference 0, and every element within 2^-62 of the largest keeps full bf16
# precision.
REFERENCE_STEP = tl.constexpr(128.0)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "total_columns",
        "num_columns",
        "depth",
        "first_column",
        "group",
    ]
)
def linear_kernel(
    hidden,  # descriptor of [R, D]
    weight,  # descriptor of [S, D]
    output,  # descriptor of [R, S], or None
    labels,  # [R]
    bias,  # [S]
    temperature,  # [R] or a number
    label_logits,  # [R] z[label] in nats
    partials,  # [tiles, 3, R] reference (nats), s, u of a tile
    logsumexp,  # [R], this and what follows: for GRADIENT
    entropy,  # [R]
    grad_logprobs,  # [R]
    grad_logsumexp,  # [R]
    grad_entropy,  # [R]
    num_rows,
    total_columns,
    num_columns,
    depth,
    first_column,
    group,
    softcap,
    logit_scale,
    EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_GRAD_LOGSUMEXP: tl.constexpr,
    IS_INCREASING: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One loop over the depth steps of all tiles of this program, an epilogue after a tile's last.

    A single loop lets the loads of the next tile run while an epilogue works on the last one.
    `group` row tiles together go through the columns: their hidden states stay in the L2 cache.
    """
    tiles_r = tl.cdiv(num_rows, BLOCK_R)
    tiles_v = tl.cdiv(total_columns, BLOCK_V)
    tiles_d = tl.cdiv(depth, BLOCK_D)
    group_tiles = group * tiles_v
    softcap = as_fp32(softcap)
    logit_scale = as_fp32(logit_scale)
    num_programs = tl.num_programs(0)
    tile = tl.program_id(0) - num_programs
    num_tiles = tl.cdiv(tiles_r * tiles_v - tl.program_id(0), num_programs)
    tile_d = tiles_d - 1
    tile_r = 0
    tile_v = 0
    product = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
    for _ in range(num_tiles * tiles_d):
        tile_d = tl.where(tile_d == tiles_d - 1, 0, tile_d + 1)
        if tile_d == 0:
            tile += num_programs
            first_r = (tile // group_tiles) * group
            group_size = tl.minimum(tiles_r - first_r, group)
            tile_r = first_r + (tile % group_tiles) % group_size
            tile_v = (tile % group_tiles) // group_size
        h = hidden.load([tile_r * BLOCK_R, tile_d * BLOCK_D])
        w = weight.load([tile_v * BLOCK_V, tile_d * BLOCK_D])
        product = tl.dot(h, w.T, product)
        if tile_d == tiles_d - 1:
            rows = tile_r * BLOCK_R + tl.arange(0, BLOCK_R)
            row_mask = rows < num_rows
            first = tile_v * BLOCK_V
            columns = first + tl.arange(0, BLOCK_V)
            if ROW_TEMPERATURE:
                row_temperature = tl.load(temperature + rows, mask=row_mask, other=1.0)
                inverse_temperature = 1.0 / row_temperature.to(tl.float32)[:, None]
            else:
                inverse_temperature = 1.0 / as_fp32(temperature)
            if HAS_BIAS:
                column_bias = tl.load(bias + columns, mask=columns < num_columns, other=0.0)
                product += column_bias.to(tl.float32)[None, :]
            slope = logit_scale * inverse_temperature
            scale = slope
            if HAS_SOFTCAP:
                product, cap_slope = fast_tanh_and_slope(product * (logit_scale / softcap))
                scale = inverse_temperature * softcap
            # product * scale is the logit, product * factor that in units of log 2. A branch must
            # not use the product itself: ptxas would serialise the matrix instructions of the loop
            # (C7515), since the wait for the last of them would stand in the branch. It must have
            # an effect: LLVM makes selects for every tile of one that only changes values. And no
            # second tile may stay alive beside the product, which has half of the registers.
            factor = scale * LOG2_E
            label = tl.load(labels + rows, mask=row_mask, other=-1) - first_column
            label = tl.where((label >= 0) & (label < num_columns), label, -1).to(tl.int32)
            label -= first
            has_label = (label >= 0) & (label < BLOCK_V)
            any_label = tl.max(has_label.to(tl.int32), 0) > 0
            stored = row_mask & has_label
            is_last = first + BLOCK_V > num_columns
            if EPILOGUE == GRADIENT:
                lse = tl.load(logsumexp + rows, mask=row_mask, other=0.0)
                lse = tl.where(lse == float("-inf"), 0.0, lse)
                g_logprob = tl.load(grad_logprobs + rows, mask=row_mask, other=0.0)
                g_p = -g_logprob
                if HAS_GRAD_LOGSUMEXP:
                    g_p += tl.load(grad_logsumexp + rows, mask=row_mask, other=0.0)
                shifted = product * factor - (lse * LOG2_E)[:, None]
                gradient = tl.exp2(shifted)
                if HAS_ENTROPY:
                    g_entropy = tl.load(grad_entropy + rows, mask=row_mask, other=0.0)
                    g_p -= g_entropy * tl.load(entropy + rows, mask=row_mask, other=0.0)
                    log_p = tl.maximum(shifted, LOWEST)
                    g_log = g_entropy[:, None] * (slope * LN_2)
                    gradient *= g_p[:, None] * slope - g_log * log_p
                else:
                    gradient *= g_p[:, None] * slope
                if HAS_SOFTCAP:
                    gradient *= cap_slope
                if is_last | any_label:
                    of_label = g_logprob[:, None] * slope
                    if HAS_SOFTCAP:
                        of_label *= cap_slope
                    gradient += tl.where(_is_label(label, BLOCK_V), of_label, 0.0)
                    gradient = tl.where((columns < num_columns)[None, :], gradient, 0.0)
                    _store_halves(output, gradient, tile_r * BLOCK_R, first)
                else:
                    _store_halves(output, gradient, tile_r * BLOCK_R, first)
            else:
                if IS_INCREASING:
                    # Rounding is monotonic too: the same bits for half of the instructions.
                    top = tl.max(product, 1)[:, None] * factor
                else:
                    top = tl.max(product * factor, 1)[:, None]
                is_empty, reference = _reference(tl.reshape(top, (BLOCK_R,)), EPILOGUE)
                # Products of padding must not have a say in it.
                reference = tl.where(is_last, 0.0, reference)
                # Explicitly: PARTS and EXPONENTIALS must not differ in what a compiler fuses.
                shifted = tl.fma(product, factor, -reference[:, None])
                if is_last:
                    is_valid = (columns < num_columns)[None, :]
                    shifted = tl.where(is_valid, shifted, float("-inf"))
                    is_empty, reference = _reference(tl.max(shifted, 1), EPILOGUE)
                    shifted -= reference[:, None]
                    _store_label(label_logits + rows, label, shifted, reference, stored)
                elif any_label:
                    _store_label(label_logits + rows, label, shifted, reference, stored)
                exponential = tl.exp2(shifted)
                stride = tl.cast(num_rows, tl.int64)
                target = partials + tile_v * 3 * stride + rows
                nats = tl.where(is_empty, float("-inf"), reference * LN_2)
                tl.store(target, nats, mask=row_mask)
                tl.store(target + stride, tl.sum(exponential, 1), mask=row_mask)
                if HAS_ENTROPY:
                    sum_shifted = tl.sum(tl.maximum(shifted, LOWEST) * exponential, 1) * LN_2
                    tl.store(target + 2 * stride, sum_shifted, mask=row_mask)
                if EPILOGUE == EXPONENTIALS:
                    if HAS_SOFTCAP:
                        exponential *= cap_slope
                    _store_halves(output, exponential, tile_r * BLOCK_R, first)
            product = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)


@triton.jit
def _is_label(label, BLOCK_V: tl.constexpr):
    """Which columns of the tile are the rows' labels."""
    return tl.arange(0, BLOCK_V)[None, :] == label[:, None]


@triton.jit
def _store_label(label_logits, label, shifted, reference, mask):
    """Stores the logits of the labels that are columns of the tile, in nats."""
    is_label = _is_label(label, shifted.shape[1])
    picked = tl.sum(tl.where(is_label, shifted, 0.0), 1) + reference
    tl.store(label_logits, picked * LN_2, mask=mask)


@triton.jit
def _reference(top, EPILOGUE: tl.constexpr):
    """Whether rows have no finite logit, and the reference of their largest."""
    is_empty = top == float("-inf")
    reference = top
    if EPILOGUE != STATISTICS:
        reference = nearest_reference(top)
    return is_empty, tl.where(is_empty, 0.0, reference)


@triton.jit
def nearest_reference(x):
    """The reference of a largest logit x, both in units of log 2."""
    return tl.floor(x * (1.0 / REFERENCE_STEP) + 0.5) * REFERENCE_STEP


@triton.jit
def _store_halves(output, tile, row, column):
    """Stores a tile as two halves: less shared memory beside the operands' pipeline."""
    BLOCK_R: tl.constexpr = tile.shape[0]
    HALF: tl.constexpr = tile.shape[1] // 2
    left, right = tl.split(tl.permute(tl.reshape(tile, (BLOCK_R, 2, HALF)), (0, 2, 1)))
    output.store([row, column], left.to(output.dtype))
    output.store([row, column + HALF], right.to(output.dtype))
