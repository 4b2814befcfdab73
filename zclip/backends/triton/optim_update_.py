"""Triton backend of zclip::optim_update_: csrc/math/optim.h once more.

Chunks are updated, one launch for every group of parameters and every pair of dtypes; then one
launch closes the tensors (ledger, steps, telemetry) and one makes the summary. A blocked step
reads the verdict and writes rows of zeros, nothing else.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip import layout
from zclip.backends.triton.chunk import FORMAT_OF, aligned_pointer
from zclip.backends.triton.launch import OPTIONS, THREADS, bits_of, on_device
from zclip.backends.triton.number import float64_of, is_finite, narrow, pointer_to, widen
from zclip.backends.triton.scale_ import REFUSE, SMALLEST_NORMAL_FLOAT
from zclip.backends.triton.table import CHUNK
from zclip.backends.triton.update_table import (
    ADAM_KIND,
    AMSGRAD_KIND,
    LION_KIND,
    MOMENTUM_KIND,
    NESTEROV_KIND,
    SGD_KIND,
    Lists,
    update_table_of,
)
from zclip.layout import NUM_LEDGER, NUM_OPTIM_SETTINGS, NUM_SUMMARY, NUM_TELEMETRY, OPTIM_FLAGS

LANES_OF = {torch.float32: 1024, torch.bfloat16: 1024, torch.float16: 1024, torch.float64: 512}
"""Elements that a program updates at a time: 16 bytes per thread of the arithmetic's numbers."""

ONE_NUMBER, VERDICT = 1, 2
"""What ``blocked`` is; 0 if there is none."""

SLOT_BLOCK = 256
LANES_KEPT = tl.constexpr(THREADS)
NUM_SUMS, NUM_WORDS = 2, 9
ADAM_K, AMSGRAD_K, SGD_K = (tl.constexpr(k) for k in (ADAM_KIND, AMSGRAD_KIND, SGD_KIND))
MOMENTUM_K, NESTEROV_K = tl.constexpr(MOMENTUM_KIND), tl.constexpr(NESTEROV_KIND)
LION_K = tl.constexpr(LION_KIND)
IS_NUMBER, IS_VERDICT = tl.constexpr(ONE_NUMBER), tl.constexpr(VERDICT)
BLOCKED, FLAGS = tl.constexpr(layout.BLOCKED), tl.constexpr(layout.FLAGS)
MAXIMIZE, DECOUPLED = tl.constexpr(layout.MAXIMIZE), tl.constexpr(layout.DECOUPLED)
DROP_NON_FINITE = tl.constexpr(layout.DROP_NON_FINITE)
COLUMNS, LEDGER = tl.constexpr(NUM_TELEMETRY), tl.constexpr(NUM_LEDGER)
IS_KNOWN, UPDATES = tl.constexpr(layout.IS_KNOWN), tl.constexpr(layout.UPDATES)
BAD, FOREIGN = tl.constexpr(layout.WEIGHT_BAD), tl.constexpr(layout.FOREIGN)
BAD_WEIGHT, BAD_STATE = tl.constexpr(layout.BAD_WEIGHT), tl.constexpr(layout.BAD_STATE)
FOREIGN_WRITE = tl.constexpr(layout.FOREIGN_WRITE)
WORD = tl.constexpr(0xFFFFFFFF)
LEAST_FLOAT = tl.constexpr(torch.finfo(torch.float32).min)
LEAST_DOUBLE = tl.constexpr(torch.finfo(torch.float64).min)
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def is_blocked(blocked, skip_flags, BLOCKED_BY: tl.constexpr):
    """Whether the step must be skipped."""
    skipped = False
    if BLOCKED_BY == IS_NUMBER:
        skipped = tl.load(blocked) != 0.0
    if BLOCKED_BY == IS_VERDICT:
        flags = tl.load(blocked + FLAGS).to(tl.int32)
        skipped = (tl.load(blocked + BLOCKED) != 0.0) | ((flags & skip_flags) != 0)
    return skipped


@triton.jit
def power(base, exponent):
    """A whole power in float64, by squaring: the same bits wherever it runs."""
    result = base * 0.0 + 1.0
    for _ in range(32):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def random_bits(key, element):
    """See csrc/math/optim.h. Both are uint32."""
    x = element ^ key
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def divided(x, y):
    """Rounded to nearest: the operator / of Triton is not."""
    if x.dtype == tl.float64:
        result = x / y
    else:
        result = tl.div_rn(x, y)
    return result


@triton.jit
def root(x):
    """Rounded to nearest."""
    if x.dtype == tl.float64:
        result = tl.sqrt(x)
    else:
        result = tl.sqrt_rn(x)
    return result


@triton.jit
def steps_taken(step, is_double, ledger):
    """How many updates a tensor has had: its own count, or that of the ledger."""
    taken = tl.load(ledger + UPDATES)
    if step != 0:
        if is_double != 0:
            taken = tl.load(step.to(tl.pointer_type(tl.float64))).to(tl.int64)
        else:
            taken = tl.load(step.to(tl.pointer_type(tl.float32))).to(tl.int64)
    return taken


@triton.jit
def load_wide(address, i, here, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """Load without a mask where there is nothing to mask: 16 bytes at a time."""
    if FULL:
        value = tl.load(aligned_pointer(address, DTYPE) + i)
    else:
        value = tl.load(pointer_to(address, DTYPE) + i, mask=here, other=0)
    return value


@triton.jit
def store_wide(address, i, value, here, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """As :func:`load_wide`."""
    if FULL:
        tl.store(aligned_pointer(address, DTYPE) + i, value)
    else:
        tl.store(pointer_to(address, DTYPE) + i, value, mask=here)


@triton.jit
def pattern_of(x, here, DTYPE: tl.constexpr):
    """Return the rotated bits of what lies in memory, as ``csrc/math/optim.h``; zero outside."""
    if DTYPE == tl.float64:
        bits = x.to(tl.uint64, bitcast=True)
        turned = ((bits << 12) | (bits >> 52)).to(tl.int64, bitcast=True)
    else:
        MANTISSA: tl.constexpr = 23 if DTYPE == tl.float32 else 7 if DTYPE == tl.bfloat16 else 10
        if DTYPE == tl.float32:
            bits = x.to(tl.uint32, bitcast=True)
        else:  # bfloat16 travels as int16
            bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
        turned = ((bits << (32 - MANTISSA)) | (bits >> MANTISSA)).to(tl.int32, bitcast=True)
    return tl.where(here, turned, 0)


@triton.jit
def by_thread(x, LANES: tl.constexpr):
    """Add up what one thread holds: sums over all lanes would need four times the registers."""
    return tl.sum(tl.reshape(x, [LANES_KEPT, LANES // LANES_KEPT]), axis=1)


@triton.jit
def square_of(x, here):
    """Return the square in float64, zero for NaN, Inf and what lies outside."""
    wide = tl.where(is_finite(x) & here, x, 0.0).to(tl.float64)
    return wide * wide


@triton.jit
def update_row(
    p_at,
    g_at,
    m_at,
    v_at,
    largest_at,
    start,
    length,
    first_element,
    scalars,
    sums,
    KIND: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TELEMETRY: tl.constexpr,
    DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    LANES: tl.constexpr,
    FULL: tl.constexpr,
):
    """Update LANES elements; return the sums with what they added."""
    VALUE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    HAS_FIRST: tl.constexpr = KIND != SGD_K
    HAS_SECOND: tl.constexpr = (KIND == ADAM_K) | (KIND == AMSGRAD_K)
    rate, decay, l2, weight1, weight2, eps, scale, momentum, keep, give, coef, drops, key = scalars
    squares, bad, loaded, stored = sums
    i = start + tl.arange(0, LANES)
    here = i < length
    raw = load_wide(p_at, i, here, DTYPE, FULL)
    p = widen(raw, DTYPE)
    g = widen(load_wide(g_at, i, here, GRAD_DTYPE, FULL), GRAD_DTYPE)
    finite = is_finite(g)
    if (tl.abs(coef) < SMALLEST_NORMAL_FLOAT) & (coef != 0.0):
        scaled = (g.to(tl.float64) * coef).to(VALUE)
    else:
        scaled = g.to(VALUE) * coef.to(VALUE)
    g = tl.where(finite | (drops == 0), scaled, 0.0)
    if l2 != 0.0:
        g = g + l2 * p
    m = p
    v = p
    if HAS_FIRST:
        m = load_wide(m_at, i, here, VALUE, FULL)
    if HAS_SECOND:
        v = load_wide(v_at, i, here, VALUE, FULL)
    if TELEMETRY:
        weights = by_thread(pattern_of(raw, here, DTYPE), LANES)
        first = by_thread(pattern_of(m, here & HAS_FIRST, VALUE), LANES)
        second = by_thread(pattern_of(v, here & HAS_SECOND, VALUE), LANES)
        loaded = (loaded[0] + weights, loaded[1] + first, loaded[2] + second)
    if HAS_SECOND:
        m = m + (g - m) * weight1
        gap = g * g - v
        LEAST: tl.constexpr = LEAST_DOUBLE if DTYPE == tl.float64 else LEAST_FLOAT
        v = v + tl.where(gap < LEAST, LEAST, gap) * weight2  # an infinite v stays what it is
        second_moment = v
        if KIND == AMSGRAD_K:
            largest = load_wide(largest_at, i, here, VALUE, FULL)
            second_moment = tl.where(largest >= v, largest, v)
            store_wide(largest_at, i, second_moment, here, VALUE, FULL)
        denominator = root(second_moment) * scale + eps
        change = decay * p + divided(rate * m, denominator)
    elif KIND == LION_K:
        direction = m + (g - m) * weight1
        sign = tl.where(direction > 0, 1.0, 0.0) - tl.where(direction < 0, 1.0, 0.0)
        change = decay * p + rate * sign.to(VALUE)
        m = m + (g - m) * weight2
    else:
        direction = g
        if HAS_FIRST:
            m = keep * m + give * g
            direction = m
        if KIND == NESTEROV_K:
            direction = g + momentum * m
        change = decay * p + rate * direction
    result = p - change
    if STOCHASTIC:
        element = first_element + i.to(tl.uint32)
        bits = result.to(tl.int32, bitcast=True)
        random = (random_bits(key, element) & 0xFFFF).to(tl.int32)
        cut = ((bits + random) >> 16).to(tl.int16)
        rounded = tl.where(is_finite(result), cut, narrow(result, DTYPE))
    else:
        rounded = narrow(result, DTYPE)
    store_wide(p_at, i, rounded, here, DTYPE, FULL)
    if HAS_FIRST:
        store_wide(m_at, i, m, here, VALUE, FULL)
    if HAS_SECOND:
        store_wide(v_at, i, v, here, VALUE, FULL)
    if TELEMETRY:
        weight = widen(rounded, DTYPE)
        squares = (
            squares[0] + by_thread(square_of(weight, here), LANES),
            squares[1] + by_thread(square_of(change, here), LANES),
        )
        # Three counts in one word: a thread sees 64 elements of a chunk.
        count = tl.where(here & (is_finite(weight) == 0), 1, 0)
        if HAS_FIRST:
            count += tl.where(here & (is_finite(m) == 0), 1 << 8, 0)
        if HAS_SECOND:
            count += tl.where(here & (is_finite(v) == 0), 1 << 16, 0)
        bad += by_thread(count, LANES)
        weights = by_thread(pattern_of(rounded, here, DTYPE), LANES)
        first = by_thread(pattern_of(m, here & HAS_FIRST, VALUE), LANES)
        second = by_thread(pattern_of(v, here & HAS_SECOND, VALUE), LANES)
        stored = (stored[0] + weights, stored[1] + first, stored[2] + second)
    return squares, bad, loaded, stored


@triton.jit
def write_slots(found, sums, words, num_chunks, TELEMETRY: tl.constexpr):
    """Add up the lanes of a chunk; each kind of sum has a row of its own."""
    if TELEMETRY:
        squares, bad, loaded, stored = found
        for k in tl.static_range(2):
            tl.store(sums + k * num_chunks, tl.sum(squares[k], axis=0))
        for k in tl.static_range(3):
            count = ((bad >> (8 * k)) & 0xFF).to(tl.int64)
            tl.store(words + k * num_chunks, tl.sum(count, axis=0))
            tl.store(words + (3 + k) * num_chunks, tl.sum(loaded[k].to(tl.int64), axis=0))
            tl.store(words + (6 + k) * num_chunks, tl.sum(stored[k].to(tl.int64), axis=0))


@triton.jit(
    do_not_specialize=[
        "first_chunk",
        "num_chunks",
        "group",
        "flags",
        "skip_flags",
        "lr_bits",
        "beta1_bits",
        "beta2_bits",
        "eps_bits",
        "weight_decay_bits",
        "seed_bits",
    ]
)
def update_chunks(
    weights,  # int64 [num_tensors]: addresses, as the next five; 0 is none
    grads,
    firsts,
    seconds,
    maxima,
    steps,
    is_double,  # int64 [num_tensors]: whether a step is float64
    tensors,  # int64 [num_chunks]: whose chunk it is
    begins,  # int64 [num_chunks]: number of its first element
    lengths,  # int64 [num_chunks]: negative if an address is not aligned
    ledger,  # int64 [num_tensors, 5]
    coefs,  # float64 [num_tensors], if HAS_COEFS
    blocked,  # float32 [1] or [14], as BLOCKED_BY says
    grad_scale,  # float64 [1], if HAS_SCALE
    rates,  # float64 [num_groups], if HAS_RATES
    sums,  # float64 [2, num_chunks]: written, one column per program
    words,  # int64 [9, num_chunks]: likewise
    first_chunk,
    num_chunks,
    group,
    flags,
    skip_flags,
    lr_bits: tl.int64,
    beta1_bits: tl.int64,
    beta2_bits: tl.int64,
    eps_bits: tl.int64,
    weight_decay_bits: tl.int64,
    seed_bits: tl.int64,
    HAS_COEFS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_RATES: tl.constexpr,
    BLOCKED_BY: tl.constexpr,
    KIND: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TELEMETRY: tl.constexpr,
    DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per chunk of one group, kind and pair of dtypes. Steps are only read."""
    VALUE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    if is_blocked(blocked, skip_flags, BLOCKED_BY) == 0:
        chunk = first_chunk + tl.program_id(0)
        tensor = tl.load(tensors + chunk)
        begin = tl.load(begins + chunk)
        length = tl.load(lengths + chunk).to(tl.int32)
        taken = steps_taken(
            tl.load(steps + tensor), tl.load(is_double + tensor), ledger + tensor * LEDGER
        )
        lr = float64_of(lr_bits)
        if HAS_RATES:
            lr = tl.load(rates + group)
        beta1 = float64_of(beta1_bits)
        beta2 = float64_of(beta2_bits)
        decay = float64_of(weight_decay_bits)
        decoupled = (flags & DECOUPLED) != 0
        rate = lr
        scale = lr * 0.0 + 1.0
        if (KIND == ADAM_K) | (KIND == AMSGRAD_K):
            rate = lr / (1.0 - power(beta1, taken + 1))
            scale = 1.0 / tl.sqrt(1.0 - power(beta2, taken + 1))
        coef = lr * 0.0 + 1.0
        if HAS_COEFS:
            coef = tl.load(coefs + tensor)
        refused = coef == REFUSE
        drops = refused | ((flags & DROP_NON_FINITE) != 0)
        if HAS_SCALE:
            coef = coef / tl.load(grad_scale)
        coef = tl.where(refused, 0.0, tl.where((flags & MAXIMIZE) != 0, -coef, coef))
        key = tl.full([], 0, tl.uint32)
        if STOCHASTIC:
            seed = seed_bits.to(tl.int64)
            key = random_bits((seed & WORD).to(tl.uint32), ((seed >> 32) & WORD).to(tl.uint32))
            key = random_bits(key, taken.to(tl.uint32))
            key = random_bits(key, tensor.to(tl.uint32))
        scalars = (
            rate.to(VALUE),
            tl.where(decoupled, lr * decay, 0.0).to(VALUE),
            tl.where(decoupled, 0.0, decay).to(VALUE),
            (1.0 - beta1).to(VALUE),
            (1.0 - beta2).to(VALUE),
            float64_of(eps_bits).to(VALUE),
            scale.to(VALUE),
            beta1.to(VALUE),
            tl.where(taken > 0, beta1, 0.0).to(VALUE),
            tl.where(taken > 0, 1.0 - beta2, 1.0).to(VALUE),
            coef,
            drops,
            key,
        )
        p_at = tl.load(weights + tensor) + begin * (DTYPE.primitive_bitwidth // 8)
        g_at = tl.load(grads + tensor) + begin * (GRAD_DTYPE.primitive_bitwidth // 8)
        m_at = tl.load(firsts + tensor) + begin * (VALUE.primitive_bitwidth // 8)
        v_at = tl.load(seconds + tensor) + begin * (VALUE.primitive_bitwidth // 8)
        largest_at = tl.load(maxima + tensor) + begin * (VALUE.primitive_bitwidth // 8)
        zeros = tl.zeros([LANES_KEPT], tl.float64)
        counts = tl.zeros([LANES_KEPT], tl.int32)
        patterns = tl.zeros([LANES_KEPT], tl.int64 if DTYPE == tl.float64 else tl.int32)
        three = (patterns, patterns, patterns)
        found = ((zeros, zeros), counts, three, three)
        first_element = begin.to(tl.uint32)
        if length == CHUNK:
            for start in range(0, CHUNK, LANES):
                found = update_row(
                    p_at,
                    g_at,
                    m_at,
                    v_at,
                    largest_at,
                    start,
                    CHUNK,
                    first_element,
                    scalars,
                    found,
                    KIND,
                    STOCHASTIC,
                    TELEMETRY,
                    DTYPE,
                    GRAD_DTYPE,
                    LANES,
                    True,
                )
            # In both branches, lest the sums change layout where they join.
            write_slots(found, sums + chunk, words + chunk, num_chunks, TELEMETRY)
        else:
            length = tl.abs(length)
            for start in range(0, length, LANES // 2):  # masks take registers
                found = update_row(
                    p_at,
                    g_at,
                    m_at,
                    v_at,
                    largest_at,
                    start,
                    length,
                    first_element,
                    scalars,
                    found,
                    KIND,
                    STOCHASTIC,
                    TELEMETRY,
                    DTYPE,
                    GRAD_DTYPE,
                    LANES // 2,
                    False,
                )
            write_slots(found, sums + chunk, words + chunk, num_chunks, TELEMETRY)


@triton.jit(do_not_specialize=["num_chunks", "skip_flags"])
def update_finish(
    sums,  # float64 [2, num_chunks]
    words,  # int64 [9, num_chunks]
    tensor_chunks,  # int64 [num_tensors + 1]: where the chunks of each tensor begin
    owners,  # int64 [num_tensors]: the tensor's place in the list that the caller gave
    takes_part,  # int64 [num_tensors]: whether a parameter has a gradient
    is_double,  # int64 [num_tensors]
    is_wide,  # int64 [num_tensors]: whether a parameter is float64
    steps,  # int64 [num_tensors]: addresses; one is added where they point
    ledger,  # int64 [num_tensors, 5]: moved on
    blocked,
    rows,  # float64 [num_tensors, 6]: written if TELEMETRY
    num_chunks,
    skip_flags,
    BLOCKED_BY: tl.constexpr,
    TELEMETRY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per tensor; chunks in a fixed order."""
    member = tl.program_id(0)
    owner = tl.load(owners + member)
    row = rows + owner * COLUMNS
    entry = ledger + owner * LEDGER
    works = (is_blocked(blocked, skip_flags, BLOCKED_BY) == 0) & (tl.load(takes_part + owner) != 0)
    if works:
        mask = tl.where(tl.load(is_wide + owner) != 0, tl.full([], -1, tl.int64), WORD)
        known = tl.load(entry + IS_KNOWN)
        foreign = tl.full([], 0, tl.int32)
        if TELEMETRY:
            begin = tl.load(tensor_chunks + member)
            end = tl.load(tensor_chunks + member + 1)
            for k in tl.static_range(2):
                total = tl.zeros([BLOCK], tl.float64)
                for start in range(begin, end, BLOCK):
                    chunk = start + tl.arange(0, BLOCK)
                    total += tl.load(sums + k * num_chunks + chunk, mask=chunk < end, other=0.0)
                tl.store(row + k, tl.sum(total, axis=0))
            for k in tl.static_range(3):
                bad = tl.zeros([BLOCK], tl.int64)
                loaded = tl.zeros([BLOCK], tl.int64)
                stored = tl.zeros([BLOCK], tl.int64)
                for start in range(begin, end, BLOCK):
                    chunk = start + tl.arange(0, BLOCK)
                    column = words + chunk
                    here = chunk < end
                    bad += tl.load(column + k * num_chunks, mask=here, other=0)
                    loaded += tl.load(column + (3 + k) * num_chunks, mask=here, other=0)
                    stored += tl.load(column + (6 + k) * num_chunks, mask=here, other=0)
                was = tl.load(entry + k)
                differs = (tl.sum(loaded, axis=0) & mask) != was
                foreign += tl.where(differs & (known != 0), 1 << k, 0)
                tl.store(row + BAD + k, tl.sum(bad, axis=0).to(tl.float64))
                tl.debug_barrier()  # every thread has read the old entry
                tl.store(entry + k, tl.sum(stored, axis=0) & mask)
            tl.store(row + FOREIGN, foreign.to(tl.float64))
        else:
            tl.debug_barrier()
            for k in tl.static_range(3):
                tl.store(entry + k, tl.full([], 0, tl.int64))
        step = tl.load(steps + owner)
        taken = steps_taken(step, tl.load(is_double + owner), entry)
        updates = tl.load(entry + UPDATES)
        tl.debug_barrier()
        tl.store(entry + IS_KNOWN, tl.full([], 1 if TELEMETRY else 0, tl.int64))
        tl.store(entry + UPDATES, updates + 1)
        if step != 0:
            if tl.load(is_double + owner) != 0:
                tl.store(step.to(tl.pointer_type(tl.float64)), (taken + 1).to(tl.float64))
            else:
                tl.store(step.to(tl.pointer_type(tl.float32)), (taken + 1).to(tl.float32))
    elif TELEMETRY:
        for c in tl.static_range(6):
            tl.store(row + c, tl.full([], 0.0, tl.float64))


@triton.jit(do_not_specialize=["num_tensors", "skip_flags"])
def update_summary(
    rows,  # float64 [num_tensors, 6], if TELEMETRY
    blocked,
    summary,  # float32 [6]: written
    num_tensors,
    skip_flags,
    BLOCKED_BY: tl.constexpr,
    TELEMETRY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program."""
    weights = tl.zeros([BLOCK], tl.float64)
    updates = tl.zeros([BLOCK], tl.float64)
    flags = tl.zeros([BLOCK], tl.int32)
    first_bad = tl.full([BLOCK], NOWHERE, tl.int32)
    first_foreign = tl.full([BLOCK], NOWHERE, tl.int32)
    if TELEMETRY:
        for start in range(0, num_tensors, BLOCK):
            i = start + tl.arange(0, BLOCK)
            here = i < num_tensors
            row = rows + i.to(tl.int64) * COLUMNS
            weights += tl.load(row, mask=here, other=0.0)
            updates += tl.load(row + 1, mask=here, other=0.0)
            bad_weight = tl.load(row + BAD, mask=here, other=0.0) > 0.0
            bad_first = tl.load(row + BAD + 1, mask=here, other=0.0)
            bad_state = bad_first + tl.load(row + BAD + 2, mask=here, other=0.0) > 0.0
            foreign = tl.load(row + FOREIGN, mask=here, other=0.0) > 0.0
            flags |= tl.where(bad_weight, BAD_WEIGHT, 0) | tl.where(bad_state, BAD_STATE, 0)
            flags |= tl.where(foreign, FOREIGN_WRITE, 0)
            first_bad = tl.minimum(first_bad, tl.where(bad_weight | bad_state, i, NOWHERE))
            first_foreign = tl.minimum(first_foreign, tl.where(foreign, i, NOWHERE))
    skipped = is_blocked(blocked, skip_flags, BLOCKED_BY)
    bad_at = tl.min(first_bad, axis=0)
    foreign_at = tl.min(first_foreign, axis=0)
    health = tl.max(flags & BAD_WEIGHT, axis=0) | tl.max(flags & BAD_STATE, axis=0)
    health |= tl.max(flags & FOREIGN_WRITE, axis=0)
    taken = tl.full([], 1.0, tl.float32)
    tl.store(summary, tl.where(skipped, 0.0, taken))
    tl.store(summary + 1, health.to(tl.float32))
    tl.store(summary + 2, tl.where(bad_at == NOWHERE, -1, bad_at).to(tl.float32))
    tl.store(summary + 3, tl.where(foreign_at == NOWHERE, -1, foreign_at).to(tl.float32))
    tl.store(summary + 4, tl.sqrt(tl.sum(weights, axis=0)).to(tl.float32))
    tl.store(summary + 5, tl.sqrt(tl.sum(updates, axis=0)).to(tl.float32))


def optim_update_(
    params: list[Tensor],
    grads: list[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    maxima: list[Tensor],
    steps: list[Tensor],
    ledger: Tensor,
    coefs: Tensor,
    blocked: Tensor,
    grad_scale: Tensor,
    rates: Tensor,
    algorithm: int,
    sizes: list[int],
    settings: list[float],
    seed: int,
    telemetry: bool,
    skip_flags: int,
) -> tuple[Tensor, Tensor]:
    """See :func:`zclip.reference.optim_update_`."""
    if len(settings) != len(sizes) * NUM_OPTIM_SETTINGS or sum(sizes) != len(params):
        raise RuntimeError(
            f"zclip::optim_update_: expected {NUM_OPTIM_SETTINGS} settings for each of "
            f"{len(sizes)} groups and sizes that add up to {len(params)} params, got "
            f"{len(settings)} settings and {sum(sizes)}"
        )
    own = [
        settings[g * NUM_OPTIM_SETTINGS : (g + 1) * NUM_OPTIM_SETTINGS] for g in range(len(sizes))
    ]
    flags_of = list(map(int, settings[OPTIM_FLAGS::NUM_OPTIM_SETTINGS]))
    lists = Lists(params, grads, firsts, seconds, maxima, steps)
    rows = ledger.new_empty((len(params) if telemetry else 0, NUM_TELEMETRY), dtype=torch.float64)
    summary = ledger.new_empty(NUM_SUMMARY, dtype=torch.float32)
    common = {"BLOCKED_BY": min(blocked.numel(), VERDICT), "TELEMETRY": telemetry, **OPTIONS}
    blocked = blocked.to(torch.float32) if blocked.numel() else summary  # else never read
    with on_device(ledger.device):
        if params:
            table = update_table_of(lists, algorithm, sizes, flags_of)
            sums = rows.new_empty((NUM_SUMS, max(1, table.num_chunks)))
            words = ledger.new_empty((NUM_WORDS, max(1, table.num_chunks)))
            given = _given(coefs, grad_scale, rates, sums)
            for launched in table.groups:
                lr, beta1, beta2, eps, decay, flags = own[launched.group]
                update_chunks[(launched.num_chunks,)](
                    table.params,
                    table.grads,
                    table.firsts,
                    table.seconds,
                    table.maxima,
                    table.steps,
                    table.is_double,
                    table.tensors,
                    table.begins,
                    table.lengths,
                    ledger,
                    given["coefs"],
                    blocked,
                    given["grad_scale"],
                    given["rates"],
                    sums,
                    words,
                    launched.first_chunk,
                    table.num_chunks,
                    launched.group,
                    int(flags),
                    skip_flags,
                    *map(bits_of, (lr, beta1, beta2, eps, decay)),
                    seed,
                    HAS_COEFS=coefs.numel() > 0,
                    HAS_SCALE=grad_scale.numel() > 0,
                    HAS_RATES=rates.numel() > 0,
                    KIND=launched.kind,
                    STOCHASTIC=bool(int(flags) & layout.STOCHASTIC)
                    and launched.param_dtype == torch.bfloat16,
                    DTYPE=FORMAT_OF[launched.param_dtype],
                    GRAD_DTYPE=FORMAT_OF[launched.grad_dtype],
                    CHUNK=CHUNK,
                    LANES=LANES_OF[launched.param_dtype],
                    **common,
                )
            update_finish[(len(params),)](
                sums,
                words,
                table.tensor_chunks,
                table.owners,
                table.takes_part,
                table.is_double,
                table.is_wide,
                table.steps,
                ledger,
                blocked,
                rows if telemetry else sums,
                table.num_chunks,
                skip_flags,
                BLOCK=SLOT_BLOCK,
                **common,
            )
        update_summary[(1,)](
            rows if len(rows) else rows.new_empty(1),
            blocked,
            summary,
            len(rows),
            skip_flags,
            BLOCK=SLOT_BLOCK,
            **common,
        )
    return rows, summary


def _given(coefs: Tensor, grad_scale: Tensor, rates: Tensor, unread: Tensor) -> dict[str, Tensor]:
    """Return float64 tensors that a kernel can be handed; ``unread`` for what is not given."""
    found = {"coefs": coefs, "grad_scale": grad_scale, "rates": rates}
    return {
        name: tensor.to(torch.float64).contiguous() if tensor.numel() else unread
        for name, tensor in found.items()
    }
