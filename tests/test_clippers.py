"""What every clipper does: what it takes, what it tells, and what it leaves alone."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import zclip
from tests.fake_cuda import fake_cuda, fake_parameters
from tests.models import backward, make_model, norms_of, parameters_with_norms, set_norms
from tests.own_rules import twice_the_average
from tests.upstream import PlainAdaGC

CLIPPERS = {
    "GlobalNorm": lambda **kw: zclip.GlobalNorm(0.5, **kw),
    "ZClip": lambda **kw: zclip.ZClip(warmup_steps=3, **kw),
    "AdaGC": lambda **kw: zclip.AdaGC(warmup_steps=3, **kw),
    "SpikeSkip": lambda **kw: zclip.SpikeSkip(window=4, **kw),
    "AutoClip": lambda **kw: zclip.AutoClip(history=4, **kw),
    "AGC": lambda **kw: zclip.AGC(**kw),
    "PythonRule": lambda **kw: zclip.PythonRule(twice_the_average, state_size=1, **kw),
}


@pytest.fixture(params=CLIPPERS, ids=str)
def make(request):
    return CLIPPERS[request.param]


@pytest.fixture(params=[name for name in CLIPPERS if name != "AGC"], ids=str)
def make_grouped(request):
    return CLIPPERS[request.param]


TARGETS = {
    "model": lambda model: model,
    "list": lambda model: list(model.parameters()),
    "generator": lambda model: model.parameters(),
    "named": lambda model: model.named_parameters(),
    "models": lambda model: [model[0], model[2]],
    "groups": lambda model: [{"params": list(model.parameters())}],
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_way_to_name_the_parameters_gives_the_same(make, target):
    model, twin = make_model(), make_model()
    clipper, other = make(), make()
    for seed in range(5):
        backward(model, seed)
        backward(twin, seed)
        norm = clipper.step(target(model))
        assert torch.equal(norm, other.step(twin))
        assert norm.dim() == 0
        for one, two in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)


def test_several_models_in_one_call_are_one_vector(make):
    model, clipper, other = make_model(), make(), make()
    backward(model, 0)
    twin = copy.deepcopy(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = p.grad.clone()
    assert torch.equal(clipper.step(model[0], model[2]), other.step(twin))


def test_norms_by_name_and_worst(make):
    model, clipper = make_model(), make()
    assert clipper.norms_by_name() == {}
    assert clipper.worst() is None
    backward(model, 0)
    expected = {name: p.grad.norm().item() for name, p in model.named_parameters()}
    clipper.step(model)
    named = {name: float(norm) for name, norm in clipper.norms_by_name().items()}
    assert named == pytest.approx(expected, rel=1e-5)
    assert clipper.worst() == max(expected, key=expected.get)

    model.get_parameter("2.bias").grad[1] = math.inf
    clipper.step(model)
    assert clipper.worst() == "2.bias"


def test_names_stay_right_when_gradients_are_missing(make):
    model, clipper = make_model(), make()
    backward(model, 0)
    model[0].weight.grad = None
    expected = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}
    clipper.step(model)
    named = {n: float(norm) for n, norm in clipper.norms_by_name().items() if norm}
    assert named == pytest.approx(expected, rel=1e-5)
    assert clipper.worst() in expected


def test_no_gradients_count_for_nothing(make):
    model, clipper = make_model(), make()
    assert float(clipper.step(model)) == 0
    assert clipper.result is None
    assert clipper.state_dict()["groups"] == []


def test_a_changed_model_is_noticed(make):
    model, clipper = make_model(), make()
    backward(model, 0)
    clipper.step(model)
    model[0].weight = nn.Parameter(torch.ones(7, 5))
    model.append(nn.Linear(3, 3))
    backward(model, 1)
    clipper.step(model)
    assert set(clipper.norms_by_name()) == {name for name, _ in model.named_parameters()}


def test_tied_parameters_and_shared_gradients_count_once(make):
    params = parameters_with_norms([3.0, 4.0])
    clipper = make()
    assert float(clipper.step([*params, params[0]])) == pytest.approx(5.0)
    set_norms(params, [3.0, 4.0])
    params[1].grad = params[0].grad
    assert float(clipper.step(params)) == pytest.approx(3.0)


def test_a_bad_step_is_refused_and_forgotten(make):
    clipper, calm = make(), make()
    params = parameters_with_norms([1.0, 2.0])
    for step, norms in enumerate([(1.0, 2.0), (1.1, 2.0), (1.0, 2.2), (1.2, 2.1), (1.0, 2.0)]):
        set_norms(params, norms)
        params[step % 2].grad[step % 4] = (math.nan, math.inf, -math.inf)[step % 3]
        clipper.step(params)
        assert float(clipper.result.blocked) == 1
        assert norms_of(params) == [0.0, 0.0]
        set_norms(params, norms)
        clipper.step(params)
        assert float(clipper.result.blocked) == 0
        mine = norms_of(params)
        set_norms(params, norms)
        calm.step(params)
        assert norms_of(params) == mine
    seen, expected = clipper.state_dict()["groups"][0], calm.state_dict()["groups"][0]
    assert float(seen["skips"]) == 5
    for name in expected.keys() - {"steps", "skips", "names"}:
        assert torch.equal(seen[name], expected[name]), name


def test_a_state_survives_saving_and_loading(make, tmp_path):
    model, clipper = make_model(), make()
    for seed in range(6):
        backward(model, seed)
        clipper.step(model)
    torch.save(clipper.state_dict(), tmp_path / "state.pt")

    late, early = make(), make()
    backward(model, 0)
    late.step(model)
    for other in (late, early):
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        reference, twin = copy.deepcopy(clipper), copy.deepcopy(model)
        for seed in range(6, 12):
            backward(model, seed)
            backward(twin, seed)
            assert torch.equal(other.step(model), reference.step(twin))
            assert torch.equal(other.result.verdict, reference.result.verdict)


def test_saving_copies(make):
    model, clipper = make_model(), make()
    backward(model, 0)
    clipper.step(model)
    saved = clipper.state_dict()
    clipper.step(model)
    assert float(saved["groups"][0]["steps"]) == 1


def test_loading_writes_into_the_same_tensor(make):
    model, clipper = make_model(), make()
    backward(model, 0)
    clipper.step(model)
    saved, address = clipper.state_dict(), clipper._state.states[0].data_ptr()
    clipper.step(model)
    clipper.load_state_dict(saved)
    assert clipper._state.states[0].data_ptr() == address
    assert float(clipper.state_dict()["groups"][0]["steps"]) == 1


def test_reset_forgets_everything(make):
    model, clipper, new = make_model(), make(), make()
    for seed in range(5):
        backward(model, seed)
        clipper.step(model)
    clipper.reset()
    assert clipper.result is None
    for seed in range(5):
        backward(model, seed)
        clipper.step(model)
        backward(model, seed)
        new.step(model)
        assert torch.equal(clipper.result.verdict, new.result.verdict)


def test_copies_and_pickles_go_on_alone(make):
    model, clipper = make_model(), make()
    for seed in range(4):
        backward(model, seed)
        clipper.step(model)
    for other in (copy.deepcopy(clipper), pickle.loads(pickle.dumps(clipper))):
        before = clipper.state_dict()
        backward(model, 9)
        other.step(model)
        after = clipper.state_dict()
        assert float(other.state_dict()["groups"][0]["steps"]) == 5
        assert torch.equal(before["groups"][0]["steps"], after["groups"][0]["steps"])


def test_a_state_of_another_clipper_is_refused(make):
    with pytest.raises(ValueError, match=r"state: expected that of .*, got that of Other"):
        make().load_state_dict({"clipper": "Other", "groups": []})


MISFITS = {
    "ZClip in warm-up": (
        zclip.ZClip(warmup_steps=9),
        zclip.ZClip(warmup_steps=4),
        "warmup_steps is 4",
    ),
    "SpikeSkip": (zclip.SpikeSkip(window=9), zclip.SpikeSkip(window=4), "window is 4"),
    "AutoClip": (zclip.AutoClip(history=9), zclip.AutoClip(history=4), "history is 4"),
    "groups": (
        zclip.ZClip(per_group=True),
        zclip.ZClip(),
        r"state: expected 1 groups \(per_group=False\), got 2",
    ),
}


@pytest.mark.parametrize(("saved", "clipper", "difference"), MISFITS.values(), ids=MISFITS)
def test_a_state_that_does_not_fit_says_what_differs(saved, clipper, difference):
    params = parameters_with_norms([1.0, 2.0])
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    saved.step(groups)
    clipper.step(groups)
    before = clipper.state_dict()
    with pytest.raises(ValueError, match=difference):
        clipper.load_state_dict(saved.state_dict())
    for name, value in before["groups"][0].items():
        assert torch.equal(clipper.state_dict()["groups"][0][name], value)


def test_after_warm_up_zclip_may_resume_with_another_warm_up():
    params, saved, clipper = (
        parameters_with_norms([1.0]),
        zclip.ZClip(warmup_steps=2),
        zclip.ZClip(),
    )
    for _ in range(3):
        saved.step(params)
    clipper.load_state_dict(saved.state_dict())
    assert clipper.initialized
    assert clipper.mean == saved.mean


def test_a_gradient_that_cannot_be_measured_is_named(make):
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"the gradient of weight: .*, got torch\.sparse_coo"):
        make().step(embedding)
    with pytest.raises(TypeError, match=r"parameters\[1\]: .*, got int"):
        make().step([embedding.weight, 3])


def test_mixed_dtypes_and_float64_norms(make):
    params = parameters_with_norms([1.0]) + parameters_with_norms([2.0], dtype=torch.float64)
    assert make().step(params).dtype == torch.float64
    params = parameters_with_norms([1.0]) + parameters_with_norms([2.0], dtype=torch.bfloat16)
    assert make().step(params).dtype == torch.float32


def test_several_devices_in_one_step(make_grouped):
    clipper = make_grouped()
    with fake_cuda():
        params = fake_parameters([(4, 3), (5,)])
        params.append(nn.Parameter(torch.empty(3)))
        params[-1].grad = torch.empty(3)
        assert clipper.step(params).device.type == "cuda"
        assert clipper.result.coefs.shape == (3,)


def test_agc_asks_for_one_device():
    with fake_cuda():
        params = fake_parameters([(4, 3)])
        params.append(nn.Parameter(torch.empty(3)))
        params[-1].grad = torch.empty(3)
        with pytest.raises(
            ValueError, match="AGC: expected parameters on one device, got cuda:0, cpu"
        ):
            zclip.AGC().step(params)


def test_groups_are_judged_apart(make_grouped):
    grouped, alone = make_grouped(per_group=True), [make_grouped(), make_grouped()]
    params = parameters_with_norms([1.0, 1.0, 1.0])
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        norms = torch.exp(torch.randn(3, generator=generator)).tolist()
        set_norms(params, norms)
        expected = []
        for clipper, group in zip(alone, groups, strict=True):
            clipper.step(group["params"])
            expected += norms_of(group["params"])
        set_norms(params, norms)
        norm = grouped.step(groups)
        assert float(norm) == pytest.approx(math.hypot(*norms), rel=1e-6)
        refused = max(float(clipper.result.blocked) for clipper in alone)
        assert float(grouped.result.blocked) == refused
        assert norms_of(params) == pytest.approx(expected, rel=1e-6)


def test_no_group_learns_from_a_step_that_another_spoils(make_grouped):
    grouped, calm = make_grouped(per_group=True), make_grouped(per_group=True)
    params = parameters_with_norms([1.0, 2.0])
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    for norm in (1.0, 1.5, 1.2, 1.1):
        for clipper in (grouped, calm):
            set_norms(params, [norm, 2 * norm])
            clipper.step(groups)
        set_norms(params, [50.0, math.nan])
        grouped.step(groups)
        assert norms_of(params) == [0.0, 0.0]
        assert grouped.worst() == "parameters[1]"
    for mine, expected in zip(
        grouped.state_dict()["groups"], calm.state_dict()["groups"], strict=True
    ):
        for name in expected.keys() - {"steps", "skips", "names"}:
            assert torch.equal(mine[name], expected[name]), name
    assert grouped.state_dict()["counters"][[0, 2]].tolist() == [8.0, 4.0]


@pytest.mark.parametrize(
    ("clipper", "key"),
    [
        (zclip.GlobalNorm(1.0, per_group=True), "max_norm"),
        (zclip.ZClip(per_group=True), "max_grad_norm"),
    ],
    ids=["GlobalNorm", "ZClip"],
)
def test_a_group_may_have_a_limit_of_its_own(clipper, key):
    params = parameters_with_norms([4.0, 4.0])
    groups = [{"params": params[:1], key: 2.0}, {"params": params[1:]}]
    clipper.step(groups)
    assert norms_of(params) == pytest.approx([2.0, 1.0], rel=1e-5)
    groups[0][key] = 0.5
    set_norms(params, [4.0, 4.0])
    clipper.step(groups)
    assert norms_of(params)[0] == pytest.approx(0.5, rel=1e-5)


def test_a_limit_of_a_group_is_not_ignored_in_silence():
    groups = [{"params": parameters_with_norms([4.0]), "max_norm": 2.0}]
    with pytest.raises(
        ValueError, match=r"param_groups\[0\]: expected no max_norm.*per_group=True"
    ):
        zclip.GlobalNorm(1.0).step(groups)


def test_adagc_keeps_its_gammas_by_name():
    model, clipper = make_model(), zclip.AdaGC(warmup_steps=2)
    for seed in range(4):
        backward(model, seed)
        clipper.step(model)
    saved = clipper.state_dict()
    backwards, other = list(model.named_parameters())[::-1], zclip.AdaGC(warmup_steps=2)
    backward(model, 7)
    other.step(backwards)
    other.load_state_dict(saved)
    group = other.state_dict()["groups"][0]
    assert dict(zip(group["names"], group["gamma"].tolist(), strict=True)) == dict(
        zip(saved["groups"][0]["names"], saved["groups"][0]["gamma"].tolist(), strict=True)
    )

    other = zclip.AdaGC(warmup_steps=2)
    other.load_state_dict(saved)
    model.append(nn.Linear(3, 3))
    backward(model, 1)
    message = r"got one without 3\.weight, 3\.bias and with nothing besides"
    with pytest.raises(ValueError, match=message):
        other.step(model)


def test_adagc_knows_a_parameter_under_another_name():
    model, clipper = make_model(), zclip.AdaGC(warmup_steps=2)
    for seed in range(4):
        backward(model, seed)
        clipper.step(model)
    before = clipper.state_dict()["groups"][0]["gamma"]
    clipper.bind(list(model.parameters())[::-1])
    assert torch.equal(clipper.state_dict()["groups"][0]["gamma"], before.flip(0))


def test_adagc_gives_a_late_parameter_a_fresh_start():
    params, clipper = parameters_with_norms([1.0, 2.0]), zclip.AdaGC(warmup_steps=1)
    params[1].grad = None
    for _ in range(3):
        set_norms(params[:1], [1.0])
        clipper.step(params)
    set_norms(params, [1.0, 2.0])
    clipper.step(params)
    assert norms_of(params) == pytest.approx([1.0, 2.0], rel=1e-4)
    extra = parameters_with_norms([3.0])
    set_norms(params, [1.0, 20.0])
    clipper.step([*params, *extra])
    assert norms_of([*params, *extra]) == pytest.approx([1.0, 2.08, 3.0], rel=1e-4)


def test_adagc_follows_the_published_trace():
    """Norms of two tensors, then after each step the clipped norms and the gammas (section 2.3)."""
    trace = [
        ((2, 1), (0.8944268, 0.4472134), (0.89442676, 0.44721338)),
        ((0.5, 0.25), (0.5, 0.25), (0.5, 0.25)),
        ((0.6, 0.3), (0.6, 0.3), (0.5, 0.25)),
        ((0.5, 0.3), (0.5, 0.2599991), (0.5, 0.25010002)),
        ((5, 0.2), (0.5199999, 0.2), (0.50020003, 0.24959902)),
        ((0.52, 0.21), (0.52, 0.21), (0.50039804, 0.24920304)),
    ]
    params, clipper = parameters_with_norms([1.0, 1.0]), zclip.AdaGC(warmup_steps=3)
    for norms, clipped, gammas in trace:
        set_norms(params, norms)
        assert float(clipper.step(params)) == pytest.approx(math.hypot(*norms), rel=1e-6)
        assert norms_of(params) == pytest.approx(clipped, rel=1e-5)
        assert clipper.state_dict()["groups"][0]["gamma"].tolist() == pytest.approx(
            gammas, rel=1e-5
        )


@pytest.mark.parametrize("seed", ["min_clipped", "min_raw", "first"])
def test_adagc_over_two_hundred_noisy_steps(seed):
    generator = torch.Generator().manual_seed(5)
    norms = torch.exp(0.3 * torch.randn(200, 3, generator=generator, dtype=torch.float64))
    norms[torch.rand(200, 3, generator=generator) < 0.05] *= 20
    norms[torch.rand(200, 3, generator=generator) < 0.05] = 0.0
    clipper, plain = zclip.AdaGC(warmup_steps=20, seed=seed), PlainAdaGC(warmup_steps=20, seed=seed)
    params = parameters_with_norms([1.0] * 3, dtype=torch.float64)
    for row in norms.tolist():
        set_norms(params, row)
        clipper.step(params)
        expected = [norm * coef for norm, coef in zip(row, plain.step(row), strict=True)]
        assert norms_of(params) == pytest.approx(expected, rel=1e-9)
    gamma = clipper.state_dict()["groups"][0]["gamma"]
    assert gamma.tolist() == pytest.approx([plain.gamma[i] for i in range(3)], rel=1e-9)


def test_spike_skip_watches_the_loss_too():
    clipper = zclip.SpikeSkip(window=8, min_count=4)
    params = parameters_with_norms([1.0])
    for step in range(8):
        set_norms(params, [1.0 + 0.01 * (step % 2)])
        clipper.step(params, loss=torch.tensor(2.0 + 0.01 * (step % 3), requires_grad=True))
        assert float(clipper.result.blocked) == 0
    set_norms(params, [1.0])
    clipper.step(params, loss=torch.tensor(9.0))
    assert float(clipper.result.blocked) == 1


BAD_SETTINGS = {
    "max_norm: expected a number >= 0, got -1": lambda: zclip.GlobalNorm(-1),
    "beta: expected a number from 0 to 1, got 1.5": lambda: zclip.AdaGC(beta=1.5),
    "seed: expected one of min_clipped, .*, got 'last'": lambda: zclip.AdaGC(seed="last"),
    "window: expected a whole number >= 1, got 0": lambda: zclip.SpikeSkip(window=0),
    "min_count: expected 0 to window=4": lambda: zclip.SpikeSkip(window=4, min_count=5),
    "percentile: expected 0 to 100, got 101": lambda: zclip.AutoClip(percentile=101),
    "history: expected a whole number >= 1, got 1.5": lambda: zclip.AutoClip(history=1.5),
}


@pytest.mark.parametrize(("message", "call"), BAD_SETTINGS.items(), ids=BAD_SETTINGS)
def test_bad_settings(message, call):
    with pytest.raises(ValueError, match=message):
        call()
