"""Jitted functions from raw products of the head to logits, shared by all kernels.

A jitted function cannot read a Python number of its module: constants are `tl.constexpr`. A Python
float argument arrives as fp32 from eager code and as fp64 from Inductor, so kernels convert it with
`as_fp32` before the first use.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Stands for -inf where an infinity times zero would make a NaN; e^LOWEST is 0 all the same.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def as_fp32(number):
    """A numeric argument in fp32, whatever the launcher made of it."""
    return tl.full((), number, tl.float32)


@triton.jit
def inverse_temperature_of(rows, mask, temperature, ROW_TEMPERATURE: tl.constexpr):
    """1 / temperature in fp32: of each row, or of all of them."""
    if ROW_TEMPERATURE:
        inverse = 1.0 / tl.load(temperature + rows, mask=mask, other=1.0).to(tl.float32)
    else:
        inverse = 1.0 / as_fp32(temperature)
    return inverse


@triton.jit
def tanh_and_slope(x):
    """tanh x to 3e-7 relative, and its derivative 1 - tanh^2 x without cancellation."""
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    inverse = 1.0 / (1.0 + decay)
    square = x * x
    # 1 - decay cancels near 0: the odd polynomial there.
    near_zero = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0)))
    far = tl.where(x < 0, decay - 1.0, 1.0 - decay) * inverse
    return tl.where(square < 0.0225, x * near_zero, far), 4.0 * decay * inverse * inverse


@triton.jit
def fast_tanh_and_slope(x):
    """tanh x to 1e-7 absolute and its derivative, in few instructions and registers."""
    bounded = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))
    return bounded, 1.0 - bounded * bounded


@triton.jit
def logit_and_slope(product, inverse_temperature, softcap, logit_scale, HAS_SOFTCAP: tl.constexpr):
    """z = cap(logit_scale product) / temperature, and its slope dz / d product."""
    scaled = product * logit_scale
    slope = logit_scale * inverse_temperature
    if HAS_SOFTCAP:
        bounded, cap_slope = tanh_and_slope(scaled / softcap)
        scaled = bounded * softcap
        slope = cap_slope * slope
    return scaled * inverse_temperature, slope
