"""Every piece of work does what it says, and a contender that does not is noticed."""

import itertools

import pytest
import torch

from zclip.bench import forced, published, rivals, shapes, suites
from zclip.bench.catalogue import DTYPES, OPS, RULES, Case
from zclip.bench.clipping import clip_grad_norm_
from zclip.bench.gradients import NORMAL, VALUES, Gradients
from zclip.bench.rules import LIMIT_OF
from zclip.bench.work import OURS, is_rival

CPU = torch.device("cpu")
ODD = [(30, 10), (7,), (1, 3, 5), (), (1025,)]
CASES = [
    *(Case(op, "odd") for op in OPS if op != "rule"),
    *(Case("rule", "odd", rule=rule) for rule in RULES),
    Case("clip_grad_norm_", "odd", clips=True),
    *(Case("rule", "odd", rule=rule, clips=True) for rule in LIMIT_OF),
]
UNUSUAL = [values for values in VALUES if values != NORMAL]


def work_of(case, dtype=torch.float32, backends=(), the_rivals=()):
    return case.work(Gradients(ODD, dtype), list(backends), list(the_rivals))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_contender_of_every_case_is_right(case, dtype):
    work = work_of(case, dtype, ["reference", "portable", "native"])
    assert OURS in work.contenders
    assert any(is_rival(name) for name in work.contenders)
    for name in work.contenders:
        error = work.check(name)
        assert not work.is_wrong(name, error), f"{name} is off by {error}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("values", UNUSUAL)
def test_unusual_gradients_are_measured_beside_normal_ones(values, dtype):
    case = Case("grad_stats", "odd", values=values)
    work = case.work(Gradients(ODD, dtype, values=values), ["reference", "portable"], [])
    assert values in case.name
    assert "(normal values)" in work.contenders
    for name in work.contenders:
        if not is_rival(name):  # some rivals lose squares to underflow and overflow
            assert not work.is_wrong(name, work.check(name))


def test_the_standard_run_has_a_case_for_each_kind_of_gradients():
    assert {case.values for case in suites.STANDARD} == set(VALUES)


def test_values_that_a_dtype_cannot_hold_are_an_error():
    with pytest.raises(ValueError, match=r"values 1e25 overflow torch\.float16"):
        Gradients(ODD, torch.float16, values="1e25")


@pytest.mark.parametrize(
    ("name", "count", "tensors"),
    [
        ("gpt2-small", 124_439_808, 148),
        ("gpt2-medium", 354_823_168, 292),
        ("gpt2-xl", 1_557_611_200, 580),
        ("llama-1b", 1_235_814_400, 146),
        ("llama-8b", 8_030_261_248, 291),
        ("llama-8b-block", 218_112_000, 9),
        ("vit-b", 86_567_656, 152),
        ("resnet-50", 25_557_032, 161),
        ("98m-in-150", 98_100_000, 150),
    ],
)
def test_the_shapes_are_those_of_the_models(name, count, tensors):
    made = shapes.named(name)
    assert (shapes.elements(made), len(made)) == (count, tensors)


def test_the_mixture_of_experts_has_ten_thousand_tensors():
    assert len(shapes.named("moe-10000")) == 10_000


def test_sweeps_hold_the_bytes_and_tensors_that_their_names_say():
    assert 4 * shapes.elements(shapes.named("bytes-64000")) == 64_000
    assert len(shapes.named("tensors-250")) == 250
    with pytest.raises(ValueError, match=r"shapes: expected one of .*, got 'bytes-0'"):
        shapes.named("bytes-0")


def test_the_norms_known_beforehand_are_those_of_float64():
    gradients = Gradients([(3_000_000,), *ODD], torch.bfloat16)  # longer than the pattern
    exact = torch.stack([g.double().norm() for g in gradients.grads])
    torch.testing.assert_close(gradients.exact_norms, exact, rtol=1e-12, atol=0)
    assert gradients.are_untouched()
    gradients.grads[0][2_999_999] += 1
    assert not gradients.are_untouched()
    assert gradients.error_of_values(lambda grad: grad) > 0


BENT = {
    "a norm that is off by a hundred-thousandth": lambda norm, grads: norm * (1 + 1e-5),
    "a NaN": lambda norm, grads: norm * float("nan"),
    "gradients that were touched": lambda norm, grads: (grads[0].mul_(1.01), norm)[1],
}


@pytest.mark.parametrize("bend", BENT.values(), ids=BENT)
@pytest.mark.parametrize("clips", [False, True])
def test_a_result_of_ours_that_is_wrong_is_noticed(bend, clips):
    gradients = Gradients(ODD, torch.float32)
    work = clip_grad_norm_(gradients, [], [], clips=clips)
    honest = work.contenders[OURS]
    work.contenders[OURS] = lambda: bend(honest(), gradients.grads)
    assert work.is_wrong(OURS, work.check(OURS))


@pytest.mark.parametrize(("op", "blind"), [("flags", 0.0), ("fingerprint", torch.arange(5))])
def test_a_check_that_sees_nothing_is_noticed(op, blind):
    work = work_of(Case(op, "odd"))
    work.contenders["blind"] = lambda: blind
    assert work.check("blind") == 1.0


def test_clipping_every_time_really_clips_every_time():
    work = work_of(Case("clip_grad_norm_", "odd", clips=True))
    norms = [float(work.contenders[n]()) for n in (OURS, "torch foreach") * 20]
    # Each call finds the norm that the one before it left: always above the next limit.
    assert all(after < before for before, after in itertools.pairwise(norms[1:]))


def test_gradients_that_were_clipped_to_nearly_nothing_are_made_anew():
    work = work_of(Case("clip_grad_norm_", "odd", clips=True))
    for turn in range(400):
        work.between(turn)
        norm = work.contenders[OURS]()
    assert float(norm) > 1e-4 * work.gradients.exact_norm


@pytest.mark.parametrize("rule", ["zclip", "adagc"])
@pytest.mark.parametrize("clips", [False, True])
def test_the_published_code_restated_leaves_the_gradients_that_ours_leaves(rule, clips):
    left = {}
    for name in (OURS, "published"):
        work = work_of(Case("rule", "odd", rule=rule, clips=clips))
        for _ in range(3):
            work.contenders[name]()
        left[name] = torch.cat([g.flatten() for g in work.gradients.grads])
    torch.testing.assert_close(left[OURS], left["published"], rtol=1e-5, atol=1e-7)


def test_the_published_zclip_clips_an_outlier_as_ours_does():
    import zclip

    left = []
    for clipper in (published.ZClip(warmup_steps=3), zclip.ZClip(warmup_steps=3)):
        param = torch.nn.Parameter(torch.ones(4))
        for size in (0.1, 0.12, 0.11, 3.0, 0.4):
            param.grad = torch.full((4,), size)
            clipper.step([param])
        left.append(param.grad)
    torch.testing.assert_close(left[0], left[1], rtol=1e-5, atol=0)


def test_triton_is_not_measured_by_its_interpreter():
    with pytest.raises(ValueError, match="needs a GPU"):
        forced.operators("triton", CPU)


def test_a_rival_that_is_missing_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(rivals, "find_spec", lambda name: None)
    for name, package in rivals.PACKAGES.items():
        line = rivals.problem_with(name, CPU)
        assert line == f"{name} takes no part: the package {package} is not installed"
    with pytest.raises(ValueError, match="rival: expected one of apex"):
        rivals.problem_with("megatron", CPU)


def test_a_rival_without_a_gpu_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(rivals, "find_spec", lambda name: object())
    assert "needs a GPU" in rivals.problem_with("apex", CPU)
    assert rivals.problem_with("DeepSpeed", CPU) is None
    assert rivals.problem_with("apex", torch.device("cuda")) is None
