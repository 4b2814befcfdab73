"""What each PTX opcode does, as a table: from its name to a function of arrays, one entry per lane.

PTX ISA 8. Arithmetic is IEEE, rounded once, as ``.rn`` demands; a NaN has whatever payload numpy
gives it, so compare NaN with NaN.
"""

import ctypes
import ctypes.util

import numpy as np

_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fma.restype, _libm.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
_libm.fmaf.restype, _libm.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3

TYPES = {
    **{f"{kind}{bits}": np.dtype(f"{code}{bits // 8}")
       for kind, code in (("u", "u"), ("b", "u"), ("s", "i"))
       for bits in (8, 16, 32, 64)},
    "f16": np.dtype("f2"),
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "pred": np.dtype("?"),
}  # fmt: skip
DIRECTED = ("rz", "rm", "rp")
"""Roundings of arithmetic that only cvt has here; all else is ``.rn``, or not in the table."""

ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def fma(dtype):
    """Multiply and add with one rounding."""
    call = _libm.fma if dtype == TYPES["f64"] else _libm.fmaf
    return lambda a, b, c: np.frompyfunc(call, 3, 1)(a, b, c).astype(dtype)


def divide(a, b):
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    quotient = np.abs(a) // np.abs(safe) if a.dtype.kind == "i" else a // safe
    if a.dtype.kind == "i":
        quotient = np.where((a < 0) ^ (b < 0), -quotient, quotient)
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient).astype(a.dtype)


def remainder(a, b):
    return (a - divide(a, b) * b).astype(a.dtype)


def shift_left(a, n):
    width = a.dtype.itemsize * 8
    return np.where(n < width, a << np.minimum(n, width - 1).astype(a.dtype), 0).astype(a.dtype)


def shift_right(a, n):
    width = a.dtype.itemsize * 8
    shifted = a >> np.minimum(n, width - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(n < width, shifted, 0).astype(a.dtype)


def smaller(a, b):
    return np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b)


def larger(a, b):
    return np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b)


def multiply_high(a, b):
    wide = a.astype(object) * b.astype(object)
    return (wide >> (a.dtype.itemsize * 8)).astype(a.dtype)


def count_bits(a):
    return np.array([int(x).bit_count() for x in a], dtype="u4")


def leading_zeros(a):
    width = a.dtype.itemsize * 8
    return np.array([width - int(x).bit_length() for x in a], dtype="u4")


def reverse_bits(a):
    width = a.dtype.itemsize * 8
    return np.array([int(f"{int(x):0{width}b}"[::-1], 2) for x in a], dtype=a.dtype)


def rough_reciprocal(a):
    """rcp.approx.ftz.f64: the upper half of the bits; subnormals are zero."""
    tiny = np.abs(a) < np.finfo("f8").tiny
    result = 1.0 / np.where(tiny, np.copysign(0.0, a), a)
    return (result.view("u8") & np.uint64(0xFFFFFFFF00000000)).view("f8")


def permute(a, b, selector):
    """prmt.b32 in its default mode: four bytes out of eight, or copies of their signs."""
    both = a.astype("u8") | b.astype("u8") << np.uint64(32)
    result = np.zeros_like(a)
    for place in range(4):
        choice = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = (both >> (choice & np.uint32(7)).astype("u8") * np.uint64(8)) & np.uint64(0xFF)
        sign = np.where(byte >> np.uint64(7), np.uint64(0xFF), np.uint64(0))
        byte = np.where(choice & np.uint32(8), sign, byte)
        result |= byte.astype("u4") << np.uint32(8 * place)
    return result


def logic3(a, b, c, table):
    """lop3: the truth table is a number."""
    number, result = int(table[0]), np.zeros_like(a)
    for row in range(8):
        if number >> row & 1:
            x, y, z = (v if row >> (2 - i) & 1 else ~v for i, v in enumerate((a, b, c)))
            result |= x & y & z
    return result


def funnel(left, clamped):
    def shift(low, high, n):
        n = np.minimum(n, 32) if clamped else n & np.uint32(31)
        both = low.astype("u8") | high.astype("u8") << np.uint64(32)
        n = n.astype("u8")
        moved = (both << n) >> np.uint64(32) if left else both >> n
        return (moved & np.uint64(0xFFFFFFFF)).astype("u4")

    return shift


def extract_field(a, start, length):
    width = a.dtype.itemsize * 8
    result = []
    for x, s, n in zip(a, start & 255, length & 255, strict=True):
        field = (int(x) & (2**width - 1)) >> int(s) & (1 << int(n)) - 1
        if a.dtype.kind == "i" and n and int(x) >> min(int(s) + int(n) - 1, width - 1) & 1:
            field -= 1 << int(n)
        result.append(field & (2**width - 1))
    return np.array(result, dtype=f"u{a.dtype.itemsize}").view(a.dtype)


def insert_field(a, b, start, length):
    width = b.dtype.itemsize * 8
    result = []
    for x, y, s, n in zip(a, b, start & 255, length & 255, strict=True):
        mask = ((1 << int(n)) - 1) << int(s) & (2**width - 1)
        result.append(int(y) & ~mask | int(x) << int(s) & mask)
    return np.array(result, dtype=b.dtype)


def to_bfloat16(a):
    """The bits of a float32 rounded to bfloat16, to nearest, ties to even."""
    bits = a.view("u4")
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(np.isnan(a), np.uint32(0x7FFF0000), rounded).view("u4") >> np.uint32(16)


BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": divide,
    "rem": remainder,
    "min": smaller,
    "max": larger,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "copysign": lambda a, b: np.copysign(b, a),
}
UNARY = {
    "neg": lambda a: -a,
    "abs": np.abs,
    "not": lambda a: ~a,
    "cnot": lambda a: (a == 0).astype(a.dtype),
    "sqrt": np.sqrt,
    "rsqrt": lambda a: (1 / np.sqrt(a)).astype(a.dtype),
    "ex2": lambda a: np.exp2(a).astype(a.dtype),
    "lg2": lambda a: np.log2(a).astype(a.dtype),
    "brev": reverse_bits,
}
COUNTING = {"popc": count_bits, "clz": leading_zeros}
COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & ~_unordered(a, b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lo": lambda a, b: a < b,
    "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b,
    "hs": lambda a, b: a >= b,
    "equ": lambda a, b: (a == b) | _unordered(a, b),
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~_unordered(a, b),
    "nan": lambda a, b: _unordered(a, b),
}
REDUCTIONS = {
    "popc": lambda votes: int(votes.sum()),
    "or": lambda votes: bool(votes.any()),
    "and": lambda votes: bool(votes.all()),
}
ATOMICS = {
    "add": lambda old, b, c: old + b,
    "exch": lambda old, b, c: b,
    "cas": lambda old, b, c: c if old == b else old,
    "min": lambda old, b, c: min(old, b),
    "max": lambda old, b, c: max(old, b),
    "and": lambda old, b, c: old & b,
    "or": lambda old, b, c: old | b,
    "xor": lambda old, b, c: old ^ b,
    "inc": lambda old, b, c: old.dtype.type(0) if old >= b else old + old.dtype.type(1),
}
NOTHING = {"membar", "fence", "prefetch", "prefetchu", "nanosleep", "griddepcontrol", "pragma"}


def _unordered(a, b):
    if a.dtype.kind != "f":
        return np.zeros(a.shape, dtype=bool)
    return np.isnan(a) | np.isnan(b)


def convert(tokens):
    """Return the function of a cvt, and the types of its result and source."""
    kinds = [t for t in tokens if t in TYPES or t in ("bf16", "bf16x2", "f16x2")]
    target, source = kinds[0], kinds[1]
    rounding = next((ROUNDINGS[t] for t in tokens if t in ROUNDINGS), None)
    if target in ("bf16x2", "f16x2"):
        half = to_bfloat16 if target == "bf16x2" else lambda a: a.astype("f2").view("u2")
        return (
            lambda high, low: half(high).astype("u4") << np.uint32(16) | half(low).astype("u4"),
            TYPES["b32"],
            TYPES[source],
        )
    if target == "bf16":
        return lambda a: to_bfloat16(a).astype("u2"), TYPES["b16"], TYPES[source]
    if source == "bf16":
        widen = lambda a: (a.astype("u4") << np.uint32(16)).view("f4").astype(TYPES[target])  # noqa: E731
        return widen, TYPES[target], TYPES["b16"]
    into, out_of = TYPES[target], TYPES[source]
    if out_of.kind == "f" and into.kind != "f":
        return _to_integer(into, out_of, rounding or np.trunc), into, out_of
    if out_of.kind == "f" and rounding is not None:
        return lambda a: rounding(a).astype(into), into, out_of
    if out_of.kind == "f" and out_of.itemsize > into.itemsize:
        return _narrowed(into, next((t for t in tokens if t in DIRECTED), None)), into, out_of
    if "sat" in tokens and into.kind == "f":
        return lambda a: np.clip(np.nan_to_num(a), 0, 1).astype(into), into, out_of
    return lambda a: a.astype(into), into, out_of


def _narrowed(into, direction):
    """Round to a shorter format: to nearest, ties to even, unless a direction is given."""

    def turn(a):
        nearest = a.astype(into)
        if direction is None:
            return nearest
        toward = {"rz": into.type(0), "rm": into.type(-np.inf), "rp": into.type(np.inf)}[direction]
        back = nearest.astype(a.dtype)
        too_far = {"rz": np.abs(back) > np.abs(a), "rm": back > a, "rp": back < a}[direction]
        return np.where(too_far, np.nextafter(nearest, toward), nearest)

    return turn


def _to_integer(into, out_of, rounding):
    limits = np.iinfo(into)
    is_wide = out_of.itemsize == 8 and into.itemsize == 8
    of_nan = limits.min if into.kind == "i" else 1 << 63
    of_nan = np.array(of_nan if is_wide else 0).astype(into)

    def turn(a):
        whole = rounding(a.astype("f8"))
        inside = np.isfinite(whole) & (whole >= float(limits.min)) & (whole < float(limits.max))
        result = np.where(inside, whole, 0).astype(into)
        result = np.where(whole >= float(limits.max), into.type(limits.max), result)
        result = np.where(whole < float(limits.min), into.type(limits.min), result)
        return np.where(np.isnan(a), of_nan, result).astype(into)

    return turn
