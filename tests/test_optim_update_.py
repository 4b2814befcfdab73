"""One update of Adam, SGD and Lion on every backend, against the same in float64."""

import copy
import math

import pytest
import torch

from tests.backends import BACKENDS, CPU_PATHS
from zclip import layout
from zclip.layout import (
    ADAM,
    AMSGRAD,
    BAD_STATE,
    BAD_WEIGHT,
    DECOUPLED,
    DROP_NON_FINITE,
    FIRST_BAD,
    FIRST_BAD_TENSOR,
    FIRST_FOREIGN,
    FOREIGN,
    FOREIGN_FIRST,
    FOREIGN_SECOND,
    FOREIGN_WEIGHT,
    FOREIGN_WRITE,
    HEALTH_FLAGS,
    LION,
    MAXIMIZE,
    NESTEROV,
    SECOND_BAD,
    STOCHASTIC,
    TAKEN,
    UPDATE_SUM_SQ,
    WEIGHT_BAD,
    WEIGHT_SUM_SQ,
)

SGD = layout.SGD
NONE = torch.empty(0)
NO_COEFS = torch.empty(0, dtype=torch.float64)
SIZES = (0, 1, 7, 8, 65, 513, 16384 + 3)
CASES = [
    (ADAM, DECOUPLED),
    (ADAM, 0),
    (ADAM, DECOUPLED | AMSGRAD | MAXIMIZE),
    (SGD, 0),
    (SGD, NESTEROV),
    (LION, DECOUPLED),
]
EPS = {torch.float32: 2**-24, torch.float64: 2**-53, torch.bfloat16: 2**-8, torch.float16: 2**-11}


class Case:
    """Tensors of an update, and the arguments of the operator."""

    def __init__(self, algorithm, flags, numels=(70,), dtype=torch.float32, seed=0, lr=0.01):
        generator = torch.Generator().manual_seed(seed)

        def randoms(spread=1.0):
            return [torch.randn(n, generator=generator) * spread for n in numels]

        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.params = [p.to(dtype) for p in randoms()]
        self.grads = [g.to(dtype) for g in randoms()]
        self.firsts = [m.to(wide) for m in randoms(0.1)]
        self.seconds = [v.to(wide).square() for v in randoms()] if algorithm == ADAM else []
        self.maxima = [v.to(wide).square() for v in randoms()] if flags & AMSGRAD else []
        self.steps = [torch.tensor(3.0) for _ in numels] if algorithm == ADAM else []
        self.ledger = torch.zeros(len(numels), layout.NUM_LEDGER, dtype=torch.int64)
        self.ledger[:, layout.UPDATES] = 3
        self.algorithm = algorithm
        self.settings = [lr, 0.9, 0.1 if algorithm == SGD else 0.99, 1e-8, 0.05, float(flags)]

    def run(self, backend, coefs=NO_COEFS, blocked=NONE, grad_scale=NONE, rates=NO_COEFS, **more):
        return backend.optim_update_(
            self.params,
            self.grads,
            self.firsts,
            self.seconds,
            self.maxima,
            self.steps,
            self.ledger,
            coefs,
            blocked,
            grad_scale,
            rates,
            self.algorithm,
            [len(self.params)],
            self.settings,
            more.get("seed", 0),
            more.get("telemetry", True),
            more.get("skip_flags", 0),
        )

    def written(self):
        return [
            *self.params,
            *self.firsts,
            *self.seconds,
            *self.maxima,
            *self.steps,
            self.ledger,
        ]

    def oracle(self, coef=1.0):
        """What p, m and v should become, all in float64, from the papers."""
        lr, beta1, beta2, eps, decay, flags = self.settings
        flags = int(flags)
        expected = []
        for i, param in enumerate(self.params):
            p, g, m = param.double(), self.grads[i].double() * coef, self.firsts[i].double()
            g = -g if flags & MAXIMIZE else g
            if not flags & DECOUPLED:
                g = g + decay * p
            shrunk = p * (1 - lr * decay) if flags & DECOUPLED else p
            v = None
            if self.algorithm == ADAM:
                t = float(self.steps[i]) + 1
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * self.seconds[i].double() + (1 - beta2) * g * g
                top = torch.maximum(self.maxima[i].double(), v) if flags & AMSGRAD else v
                denominator = (top / (1 - beta2**t)).sqrt() + eps
                p = shrunk - lr * (m / (1 - beta1**t)) / denominator
            elif self.algorithm == SGD:
                m = beta1 * m + (1 - beta2) * g
                p = shrunk - lr * (g + beta1 * m if flags & NESTEROV else m)
            else:
                p = shrunk - lr * (beta1 * m + (1 - beta1) * g).sign()
                m = beta2 * m + (1 - beta2) * g
            expected.append((p, m, v))
        return expected


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize(("algorithm", "flags"), CASES)
def test_it_agrees_with_float64(backend, algorithm, flags, dtype):
    case = Case(algorithm, flags, SIZES, dtype)
    expected = case.oracle(coef=0.5)
    case.run(backend, torch.full((len(SIZES),), 0.5, dtype=torch.float64))
    # float32 moments are within 4 roundings; a 16-bit parameter is rounded once more at the end.
    exact = 2.0**-50 if dtype == torch.float64 else 2.0**-21
    for i, (p, m, v) in enumerate(expected):
        torch.testing.assert_close(case.firsts[i].double(), m, rtol=exact, atol=exact)
        if v is not None:
            torch.testing.assert_close(case.seconds[i].double(), v, rtol=exact, atol=exact)
        near = max(exact, 1.01 * EPS[dtype])
        torch.testing.assert_close(case.params[i].double(), p, rtol=near, atol=near / 10)
    assert all(float(step) == 4.0 for step in case.steps)


def bits(tensor):
    """The same memory as integers, which are equal where NaNs are not."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@pytest.mark.parametrize("damage", [None, 0.0, 1e-30, math.nan, -math.inf])
@pytest.mark.parametrize(("algorithm", "flags"), [*CASES, (ADAM, DECOUPLED | STOCHASTIC)])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_all_cpu_paths_have_the_same_bits(algorithm, flags, dtype, damage):
    """Also where the quick sums are useless, and where the widths of vectors end."""
    cases = [Case(algorithm, flags, (*SIZES, 17, 129, 1025), dtype) for _ in CPU_PATHS]
    for case in cases:
        if damage is not None:
            for tensors in (case.params, case.grads, case.firsts):
                for tensor in tensors[1:]:
                    tensor[: len(tensor) // 2] = damage
    found = [case.run(path) for case, path in zip(cases, CPU_PATHS.values(), strict=True)]
    for case, results in zip(cases[1:], found[1:], strict=True):
        written = zip(case.written(), cases[0].written(), strict=True)
        assert all(torch.equal(bits(ours), bits(first)) for ours, first in written)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results, found[0], strict=True))


@pytest.mark.parametrize("path", CPU_PATHS)
@pytest.mark.parametrize(("algorithm", "flags"), [*CASES[2:4], CASES[-1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_that_outgrows_the_caches_has_the_bits_of_small_ones(
    path, algorithm, flags, dtype
):
    part = 24 * 16384
    large = Case(algorithm, flags, (3 * part - 37,), dtype)
    small = [Case(algorithm, flags, (0,), dtype) for _ in range(3)]
    names = ("params", "grads", "firsts", "seconds", "maxima")
    for i, case in enumerate(small):
        for name in names:
            tensors = getattr(large, name)
            setattr(case, name, [t[i * part : (i + 1) * part].clone() for t in tensors])
        case.run(CPU_PATHS[path])
    large.run(CPU_PATHS[path])
    for name in names:
        parts = zip(*(getattr(case, name) for case in small), strict=True)
        for whole, pieces in zip(getattr(large, name), parts, strict=True):
            assert torch.equal(whole, torch.cat(pieces))
    patterns = sum(case.ledger[0, :3] for case in small) % 2**32
    assert torch.equal(large.ledger[0, :3], patterns)
    rows, _ = large.run(CPU_PATHS[path])
    assert rows[0, FOREIGN] == 0  # what it loads is what it stored


def test_squares_of_gradients_of_any_size_are_rounded_once(backend):
    """Also those that round to zero, which the vectors of AVX-512 never compute."""
    exponents = torch.arange(255, dtype=torch.int32) << 23  # all but those of NaN and Inf
    ends = torch.tensor([0, 1, 0x3504F3, 0x3504F4, 0x7FFFFF], dtype=torch.int32)
    magnitudes = (exponents[:, None] + ends).flatten().view(torch.float32)
    case = Case(ADAM, DECOUPLED, (2 * len(magnitudes),))
    case.grads = [torch.cat([magnitudes, -magnitudes])]
    case.seconds[0].zero_()
    case.settings[2] = 0.0  # beta2: the second moment becomes the square
    case.run(backend)
    squares = case.grads[0].double().square().float()
    assert torch.equal(case.seconds[0], squares)
    assert 0 < int((squares == 0).sum()) < len(squares)


def test_threads_change_no_bit():
    def run(threads):
        torch.set_num_threads(threads)
        case = Case(ADAM, DECOUPLED, (600_000, 5, 300_000))
        return [*case.run(torch.ops.zclip), *case.written()]

    before = torch.get_num_threads()
    try:
        one, three = run(1), run(3)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@pytest.mark.parametrize(("algorithm", "flags"), CASES)
def test_a_blocked_step_writes_nothing(backend, algorithm, flags):
    case = Case(algorithm, flags, (70, 513))
    case.grads[0][3] = math.nan
    before = copy.deepcopy(case.written())
    rows, summary = case.run(backend, blocked=torch.ones(()))
    assert all(torch.equal(a, b) for a, b in zip(case.written(), before, strict=True))
    assert float(summary[TAKEN]) == 0.0
    assert float(summary[HEALTH_FLAGS]) == 0.0
    assert not rows.any()


@pytest.mark.parametrize(
    ("blocked", "flags", "skip_flags", "taken"),
    [
        (0, 0, layout.HAS_NAN, 1.0),
        (1, 0, 0, 0.0),
        (0, layout.HAS_NAN | layout.CLIPPED, layout.HAS_NAN | layout.HAS_INF, 0.0),
        (0, layout.CLIPPED, layout.HAS_NAN | layout.HAS_INF, 1.0),
        (0, layout.HAS_NAN, 0, 1.0),
    ],
)
def test_a_verdict_may_block_by_its_flags(backend, blocked, flags, skip_flags, taken):
    verdict = torch.zeros(layout.NUM_VERDICT)
    verdict[layout.BLOCKED], verdict[layout.FLAGS] = blocked, flags
    _, summary = Case(ADAM, DECOUPLED).run(backend, blocked=verdict, skip_flags=skip_flags)
    assert float(summary[TAKEN]) == taken


def test_gradients_are_only_read(backend):
    case = Case(ADAM, DECOUPLED, (70,))
    before = case.grads[0].clone()
    case.run(backend, torch.tensor([0.25], dtype=torch.float64))
    assert torch.equal(case.grads[0], before)


def test_a_parameter_without_gradient_is_left_alone(backend):
    case = Case(ADAM, DECOUPLED, (70, 30))
    case.grads[1] = torch.empty(0)
    before = [case.params[1].clone(), case.firsts[1].clone(), case.ledger[1].clone()]
    rows, _ = case.run(backend)
    after = [case.params[1], case.firsts[1], case.ledger[1]]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert [float(step) for step in case.steps] == [4.0, 3.0]
    assert not rows[1].any()


def test_the_scale_of_the_gradients_is_divided_out(backend):
    plain, scaled = Case(ADAM, DECOUPLED), Case(ADAM, DECOUPLED)
    scaled.grads = [g * 1024 for g in scaled.grads]
    plain.run(backend)
    scaled.run(backend, grad_scale=torch.tensor(1024.0))
    assert torch.equal(plain.params[0], scaled.params[0])


def test_a_rate_on_the_device_replaces_that_of_the_settings(backend):
    plain, other = Case(SGD, 0), Case(SGD, 0, lr=0.5)
    plain.run(backend)
    other.run(backend, rates=torch.tensor([0.01], dtype=torch.float64))
    assert torch.equal(plain.params[0], other.params[0])


def test_a_refused_gradient_counts_as_zero(backend):
    case, zero = Case(ADAM, DECOUPLED), Case(ADAM, DECOUPLED)
    case.grads[0][1] = math.inf
    zero.grads[0].zero_()
    case.run(backend, torch.tensor([layout.REFUSE], dtype=torch.float64))
    zero.run(backend)
    assert torch.equal(case.params[0], zero.params[0])


def test_bad_elements_of_a_gradient_can_be_dropped(backend):
    case, zero = Case(ADAM, DECOUPLED | DROP_NON_FINITE), Case(ADAM, DECOUPLED)
    case.grads[0][1], case.grads[0][69] = math.inf, math.nan
    zero.grads[0][1] = zero.grads[0][69] = 0.0
    case.run(backend)
    zero.run(backend)
    assert torch.equal(case.params[0], zero.params[0])


def test_a_coefficient_too_small_for_float32_is_not_lost(backend):
    case = Case(SGD, 0)
    case.settings[4] = 0.0
    case.firsts = []
    case.grads = [g * 1e30 for g in case.grads]
    expected = case.params[0].double() - 0.01 * (case.grads[0].double() * 1e-39)
    case.run(backend, torch.tensor([1e-39], dtype=torch.float64))
    torch.testing.assert_close(case.params[0].double(), expected, rtol=1e-7, atol=0)


def test_the_first_momentum_is_the_gradient_itself_whatever_the_dampening(backend):
    case = Case(SGD, 0)
    case.ledger.zero_()
    case.firsts[0].zero_()
    case.settings[4] = 0.0
    case.run(backend)
    assert torch.equal(case.firsts[0], case.grads[0])


def test_an_infinite_second_moment_stays_and_stops_its_element(backend):
    case = Case(ADAM, DECOUPLED)
    case.settings[4] = 0.0
    case.seconds[0][2] = math.inf
    before = float(case.params[0][2])
    rows, summary = case.run(backend)
    assert math.isinf(float(case.seconds[0][2]))
    assert float(case.params[0][2]) == before
    assert float(rows[0, SECOND_BAD]) == 1.0
    assert int(summary[HEALTH_FLAGS]) == BAD_STATE


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_the_sums_of_squares_are_those_of_float64(backend, dtype):
    case = Case(ADAM, DECOUPLED, SIZES, dtype)
    before = [p.double().clone() for p in case.params]
    rows, summary = case.run(backend)
    for i, param in enumerate(case.params):
        weights = param.double().square().sum()
        torch.testing.assert_close(rows[i, WEIGHT_SUM_SQ], weights, rtol=1e-6, atol=0)
        if dtype == torch.float64:
            updates = (before[i] - param.double()).square().sum()
            torch.testing.assert_close(rows[i, UPDATE_SUM_SQ], updates, rtol=1e-6, atol=0)
    total = rows[:, WEIGHT_SUM_SQ].sum().sqrt()
    torch.testing.assert_close(summary[layout.WEIGHT_NORM].double(), total, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-25, 1e-22, 1e22])
def test_sums_of_squares_neither_underflow_nor_overflow(backend, scale):
    case = Case(SGD, 0, (513,))
    case.firsts = []
    case.settings[4] = 0.0
    case.params = [p * scale for p in case.params]
    case.grads = [g * scale for g in case.grads]
    rows, _ = case.run(backend)
    weights = case.params[0].double().square().sum()
    updates = (case.grads[0].double() * 0.01).square().sum()
    torch.testing.assert_close(rows[0, WEIGHT_SUM_SQ], weights, rtol=1e-6, atol=0)
    torch.testing.assert_close(rows[0, UPDATE_SUM_SQ], updates, rtol=1e-6, atol=0)


def test_sums_of_squares_survive_any_order_of_sizes(backend):
    """Tiny, zero, usual and huge updates, a thousand of each, one behind the other."""
    sizes = [1e-25, 1.0, 0.0, 1e-41, 1e22, 1e-25, 1e-25, 1.0, 1e-20, 1e-3]
    case = Case(SGD, 0, (1024 * len(sizes) + 5,))
    case.firsts, case.settings[4] = [], 0.0
    scales = torch.tensor([*sizes, 1e-30]).repeat_interleave(1024)[: len(case.grads[0])]
    case.grads[0] *= scales
    for kept in (range(len(sizes)), [0, 5, 6], [2], [3]):  # which of the thousands are not zero
        one = copy.deepcopy(case)
        for k in set(range(len(sizes))) - set(kept):
            one.grads[0][1024 * k : 1024 * (k + 1)] = 0.0
        updates = (one.grads[0].double() * 0.01).square().sum()
        rows, _ = one.run(backend)
        torch.testing.assert_close(rows[0, UPDATE_SUM_SQ], updates, rtol=1e-6, atol=0)


@pytest.mark.parametrize("place", [0, 64, 511, 512, 16386])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("algorithm", "flags"), [(ADAM, DECOUPLED), (SGD, 0), (LION, DECOUPLED)])
def test_every_bad_element_is_counted_where_it_is(backend, algorithm, flags, value, place):
    column = {"params": WEIGHT_BAD, "firsts": FIRST_BAD, "seconds": SECOND_BAD}
    for name in column if algorithm == ADAM else ("params", "firsts"):
        case = Case(algorithm, flags, (70, 16387))
        case.settings[4] = 0.0
        getattr(case, name)[1][place] = value
        rows, summary = case.run(backend)
        assert float(rows[1, column[name]]) == 1.0
        assert not rows[0, WEIGHT_BAD : SECOND_BAD + 1].any()
        assert int(summary[FIRST_BAD_TENSOR]) == 1
        wanted = BAD_WEIGHT if name == "params" else BAD_STATE
        assert int(summary[HEALTH_FLAGS]) & wanted


FOREIGN_BITS = {"params": FOREIGN_WEIGHT, "firsts": FOREIGN_FIRST, "seconds": FOREIGN_SECOND}


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("name", FOREIGN_BITS)
def test_memory_that_something_else_wrote_is_named_in_the_same_step(backend, name, dtype):
    case = Case(ADAM, DECOUPLED, (70, 16387), dtype)
    case.run(backend)
    rows, summary = case.run(backend)
    assert int(summary[FIRST_FOREIGN]) == -1
    tensor = getattr(case, name)[1]
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    tensor.view(integers)[16386] ^= 1  # the least change there is
    rows, summary = case.run(backend)
    assert rows[:, FOREIGN].tolist() == [0.0, float(FOREIGN_BITS[name])]
    assert int(summary[FIRST_FOREIGN]) == 1
    assert int(summary[HEALTH_FLAGS]) & FOREIGN_WRITE
    _, summary = case.run(backend)
    assert int(summary[HEALTH_FLAGS]) & FOREIGN_WRITE == 0


def test_a_changed_sign_is_a_foreign_write(backend):
    case = Case(SGD, 0, (70,))
    case.run(backend)
    case.params[0][5] *= -1
    rows, _ = case.run(backend)
    assert int(rows[0, FOREIGN]) == FOREIGN_WEIGHT


def test_backends_store_the_same_sums():
    """A ledger that one backend wrote is understood by another."""
    cases = {name: Case(SGD, 0, (70, 16387)) for name in BACKENDS}
    for name, case in cases.items():
        case.run(BACKENDS[name])
    for case in cases.values():
        for other in BACKENDS.values():
            again = copy.deepcopy(case)
            assert not again.run(other)[0][:, FOREIGN].any()


def test_without_telemetry_there_are_no_rows_and_nothing_is_known(backend):
    case = Case(ADAM, DECOUPLED)
    rows, summary = case.run(backend, telemetry=False)
    assert rows.shape == (0, layout.NUM_TELEMETRY)
    assert float(summary[TAKEN]) == 1.0
    case.params[0][0] = 5.0
    rows, _ = case.run(backend)
    assert not rows[:, FOREIGN].any()


def test_stochastic_rounding_is_right_on_average_and_the_same_for_the_same_seed(backend):
    def run(seed):
        case = Case(SGD, STOCHASTIC, (16387,), torch.bfloat16)
        case.firsts = []
        case.settings[4] = 0.0
        case.params = [torch.ones(16387, dtype=torch.bfloat16)]
        case.grads = [torch.full((16387,), 0.125, dtype=torch.bfloat16)]  # 0.32 of a unit
        case.run(backend, seed=seed)
        return case.params[0]

    first = run(7)
    assert torch.equal(first, run(7))
    assert not torch.equal(first, run(8))
    moved = float((first != 1).double().mean())
    assert abs(moved - 0.00125 * 256) < 0.02  # a bfloat16 below 1 has steps of 1/256


def test_stochastic_rounding_has_the_same_bits_everywhere():
    results = []
    for backend in BACKENDS.values():
        case = Case(SGD, STOCHASTIC, (515,), torch.bfloat16)
        case.run(backend, seed=1 << 40 | 5)
        results.append(case.params[0])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.settings.pop(), "settings: expected 6 for each of 1 groups, got 5"),
        (lambda c: setattr(c, "ledger", c.ledger.float()), "ledger: expected a contiguous int64"),
        (
            lambda c: c.firsts.append(c.firsts[0]),
            "firsts: expected .* of 1 params, got 2",
        ),
        (lambda c: setattr(c, "firsts", [c.firsts[0].double()]), r"firsts\[0\]: expected float32"),
        (
            lambda c: setattr(c, "seconds", [c.seconds[0][1:]]),
            r"seconds\[0\]: expected .*, got 69 elements",
        ),
        (lambda c: setattr(c, "grads", [c.grads[0][1:]]), r"grads\[0\]: expected .* got 69"),
        (lambda c: setattr(c, "grads", []), "grads: expected one for each of 1 params, got 0"),
        (lambda c: setattr(c, "steps", []), "Adam: expected firsts, seconds and steps"),
        (
            lambda c: c.settings.__setitem__(-1, float(AMSGRAD)),
            r"state of params\[0\]: expected all moments that its settings need, got an empty one",
        ),
    ],
)
def test_wrong_arguments_are_named(change, message):
    case = Case(ADAM, DECOUPLED)
    change(case)
    with pytest.raises(RuntimeError, match=message):
        case.run(torch.ops.zclip)
