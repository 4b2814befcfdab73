"""Number formats inside a kernel: csrc/math/number.h once more, in Triton.

bfloat16 travels as int16 and is widened and narrowed by hand. Triton's interpreter truncates where
the hardware rounds; this way it runs the very arithmetic that the device will.
"""

import triton
import triton.language as tl


@triton.jit
def pointer_to(address, DTYPE: tl.constexpr):
    """Return an address from the table as a pointer that load and store can use."""
    if DTYPE == tl.bfloat16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(DTYPE))
    return pointer


@triton.jit
def widen(x, DTYPE: tl.constexpr):
    """Return what was loaded as float32, or float64 if it is that. Exact."""
    if DTYPE == tl.bfloat16:
        value = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float64:
        value = x
    else:
        value = x.to(tl.float32)
    return value


@triton.jit
def narrow(value, DTYPE: tl.constexpr):
    """Return what to store, rounded once to nearest, ties to even."""
    if DTYPE == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        # Rounding a NaN could carry it into infinity; keep its sign and make it quiet.
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x00400000, rounded)
        stored = (rounded >> 16).to(tl.int16)
    else:
        stored = value.to(DTYPE)
    return stored


@triton.jit
def is_nan(value):
    """Tested on bits, as everywhere: the answer must survive fast-math."""
    if value.dtype == tl.float64:
        answer = (value.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF) > 0x7FF0000000000000
    else:
        answer = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000
    return answer


@triton.jit
def is_finite(value):
    """Neither NaN nor Inf."""
    if value.dtype == tl.float64:
        answer = (value.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF) < 0x7FF0000000000000
    else:
        answer = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    return answer


@triton.jit
def float64_of(bits):
    """Return the number that :func:`zclip.backends.triton.launch.bits_of` packed."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)
