"""A step that is like the one before takes a short cut, and every change leads off it."""

import copy

import pytest
import torch

import zclip
from zclip.clippers import Clipper

CLIPPERS = {
    "zclip": lambda: zclip.ZClip(max_grad_norm=None, warmup_steps=3),
    "adagc": lambda: zclip.AdaGC(),
    "global_norm": lambda: zclip.GlobalNorm(0.5),
    "auto_clip": lambda: zclip.AutoClip(),
}


def parameters(count=3):
    return [torch.nn.Parameter(torch.zeros(4)) for _ in range(count)]


def give_gradients(params, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = scale * torch.randn(param.shape, generator=generator)


def warmed_up(clipper, params, steps=2):
    """Take some steps; return the groups of an optimizer, with which they were taken."""
    groups = torch.optim.SGD(params, lr=0.1).param_groups
    for step in range(steps):
        give_gradients(params, step)
        clipper.step(groups)
    assert clipper._simple is not None
    return groups


@pytest.fixture
def shortcuts(monkeypatch):
    """Whether each try of the short cut led to the end."""
    tried = []
    clip = Clipper._clip_simply

    def watched(self, *arguments):
        result = clip(self, *arguments)
        tried.append(result is not None)
        return result

    monkeypatch.setattr(Clipper, "_clip_simply", watched)
    return tried


@pytest.mark.parametrize("name", CLIPPERS)
def test_the_short_cut_does_what_the_long_way_does(name, shortcuts):
    short, long = CLIPPERS[name](), CLIPPERS[name]()
    ours, theirs = parameters(), parameters()
    groups = [torch.optim.SGD(params, lr=0.1).param_groups for params in (ours, theirs)]
    for step in range(8):
        scale = 50.0 if step == 6 else 1.0
        give_gradients(ours, step, scale)
        give_gradients(theirs, step, scale)
        long._simple = None
        norms = short.step(groups[0]), long.step(groups[1])
        assert torch.equal(*norms)
        for field in ("stats", "coefs", "verdict"):
            assert torch.equal(getattr(short.result, field), getattr(long.result, field))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.grad, b.grad)
    assert shortcuts == [True] * 7


def test_settings_are_read_at_every_step(shortcuts):
    clipper, params = zclip.GlobalNorm(0.5), parameters()
    groups = warmed_up(clipper, params)
    clipper.max_norm = 0.25
    give_gradients(params, 9)
    clipper.step(groups)
    assert float(clipper.result.clipped_norm) == pytest.approx(0.25, rel=1e-5)
    assert shortcuts == [True, True]


def change_list(groups, params):
    groups[0]["params"] = groups[0]["params"][:2]
    return 2


def change_in_place(groups, params):
    params[2] = groups[0]["params"][2] = torch.nn.Parameter(torch.zeros(7))
    give_gradients(params, 9)
    return 3


def add_parameter(groups, params):
    groups[0]["params"].append(torch.nn.Parameter(torch.zeros(2)))
    give_gradients(groups[0]["params"], 9)
    return 4


def add_group(groups, params):
    groups.append({"params": parameters(2)})
    give_gradients(groups[1]["params"], 9)
    return 5


def take_gradient(groups, params):
    params[1].grad = None
    return 2


def tie_gradients(groups, params):
    params[1].grad = params[0].grad
    return 2


@pytest.mark.parametrize(
    "change",
    [change_list, change_in_place, add_parameter, add_group, take_gradient, tie_gradients],
)
def test_what_has_changed_is_seen(change, shortcuts):
    clipper, params = zclip.ZClip(warmup_steps=3), parameters()
    groups = warmed_up(clipper, params)
    give_gradients(params, 9)
    count = change(groups, params)
    shortcuts.clear()
    norm = clipper.step(groups)
    unique = {id(p.grad): p.grad for group in groups for p in group["params"] if p.grad is not None}
    assert shortcuts == [False]
    assert len(clipper.result.stats) == len(unique) == count
    assert float(norm) > 0


def test_other_groups_with_the_same_parameters_are_seen(shortcuts):
    clipper, params = zclip.ZClip(warmup_steps=3), parameters()
    warmed_up(clipper, params)
    give_gradients(params, 9)
    clipper.step([{"params": params[:1]}])
    assert shortcuts[-1] is False
    assert len(clipper.result.stats) == 1


def test_parameters_in_place_of_groups_are_seen(shortcuts):
    clipper, params = zclip.ZClip(warmup_steps=3), parameters()
    groups = warmed_up(clipper, params)
    for handed in (params[:1], tuple(params), torch.nn.ParameterList(params[:2])):
        give_gradients(params, 9)
        clipper.step(handed)
        assert shortcuts[-1] is False
        assert len(clipper.result.stats) == len(list(handed))
    give_gradients(params, 9)
    clipper.step(groups)
    assert len(clipper.result.stats) == 3


def test_a_model_takes_the_short_cut_too(shortcuts):
    clipper, model = zclip.ZClip(warmup_steps=3), torch.nn.Linear(4, 4)
    for step in range(3):
        give_gradients(model.parameters(), step)
        clipper.step(model)
    assert shortcuts == [True, True]
    with pytest.raises(TypeError, match=r"models\[1\]: expected a Module, got int 7"):
        clipper.step(model, 7)


def test_nothing_and_too_much_are_what_they_were(shortcuts):
    clipper, params = zclip.ZClip(warmup_steps=3), parameters()
    groups = warmed_up(clipper, params)
    assert float(clipper.step()) == 0.0
    give_gradients(params, 9)
    with pytest.raises(TypeError):
        clipper.step(groups, 7)


def test_the_tensor_to_blame_is_known_after_gradients_came_and_went():
    clipper = zclip.GlobalNorm(1.0)
    params = parameters()
    named = list(zip("abc", params, strict=True))
    clipper._cache.give_names(named)
    groups = warmed_up(clipper, params)
    params[0].grad = None
    clipper.step(groups)
    assert list(clipper.norms_by_name()) == ["b", "c"]
    for _ in range(2):
        give_gradients(params, 9)
        params[0].grad *= 100.0
        clipper.step(groups)
        assert clipper.worst() == "a"
        assert list(clipper.norms_by_name()) == ["a", "b", "c"]


def test_a_parameter_that_never_has_a_gradient_costs_one_look(shortcuts):
    clipper, params = zclip.GlobalNorm(1.0), parameters()
    groups = torch.optim.SGD(params, lr=0.1).param_groups
    for step in range(3):
        give_gradients(params[:2], step)
        clipper.step(groups)
    assert shortcuts == []
    groups = warmed_up(clipper, params)
    for step in range(3):
        give_gradients(params, step)
        params[0].grad = None
        clipper.step(groups)
    assert shortcuts == [True, False]


def test_names_that_are_learned_later_are_used():
    clipper, params = zclip.GlobalNorm(1.0), parameters()
    groups = warmed_up(clipper, params)
    clipper._cache.give_names(zip("abc", params, strict=True))
    give_gradients(params, 9)
    clipper.step(groups)
    assert list(clipper.norms_by_name()) == ["a", "b", "c"]


def test_another_order_bound_between_two_steps_is_seen():
    clipper, params = zclip.AdaGC(), parameters()
    groups = warmed_up(clipper, params, steps=4)
    states = clipper.state_dict()["groups"][0]
    clipper.bind([{"params": params[::-1]}])
    give_gradients(params, 4)
    clipper.step(groups)
    assert clipper.state_dict()["groups"][0]["names"] == states["names"]


def test_a_loaded_state_is_the_one_that_is_used(shortcuts):
    clipper, params = zclip.ZClip(warmup_steps=3), parameters()
    saved = clipper.state_dict()
    groups = warmed_up(clipper, params, steps=5)
    clipper.load_state_dict(saved)  # from before the first step
    give_gradients(params, 9)
    clipper.step(groups)
    assert int(clipper.state_dict()["groups"][0]["steps"]) == 1


def test_what_the_kernel_refuses_is_refused_by_name(shortcuts):
    clipper, params = zclip.ZClip(warmup_steps=3), parameters()
    groups = warmed_up(clipper, params)
    give_gradients(params, 9)
    params[1].grad = params[1].grad.to_sparse()
    with pytest.raises(TypeError, match=r"parameters\[1\]"):
        clipper.step(groups)
    clipper.warmup_steps = 7
    give_gradients(params, 9)
    with pytest.raises(ValueError, match="warmup_steps is 7"):
        clipper.step(groups)


def test_a_scale_an_extra_lane_and_a_norm_of_ones_own_go_the_long_way(shortcuts):
    clipper, params = zclip.ZClip(max_grad_norm=None, warmup_steps=3), parameters()
    groups = warmed_up(clipper, params)
    give_gradients(params, 9)
    whole = float(torch.cat([p.grad for p in params]).norm())
    assert float(clipper.step(groups, grad_scale=torch.tensor(2.0))) == pytest.approx(whole / 2)
    give_gradients(params, 9)
    clipper.step(groups)
    clipper.step(groups, extra=torch.ones(2, dtype=torch.float64))
    assert clipper.result.extra.tolist() == [1.0, 1.0]
    clipper.step(groups)
    assert clipper.result.extra is None
    clipper._compute_grad_norm = lambda params: 7.0
    assert float(clipper.step(groups)) == 7.0


def test_a_clipper_that_looks_at_the_loss_has_no_short_cut():
    clipper, params = zclip.SpikeSkip(), parameters()
    groups = torch.optim.SGD(params, lr=0.1).param_groups
    for step in range(3):
        give_gradients(params, step)
        clipper.step(groups, loss=torch.tensor(float(step)))
        assert float(clipper.result.verdict[zclip.layout.LOSS]) == step
    assert clipper._simple is None


def test_a_copy_begins_anew():
    clipper, params = zclip.ZClip(warmup_steps=3), parameters()
    warmed_up(clipper, params)
    twin = copy.deepcopy(clipper)
    assert twin._simple is None
    others = parameters()
    give_gradients(others, 9)
    twin.step(torch.optim.SGD(others, lr=0.1).param_groups)
    assert int(twin.state_dict()["groups"][0]["steps"]) == 3
    assert int(clipper.state_dict()["groups"][0]["steps"]) == 2


def test_gradients_that_require_gradients_stay_out_of_the_graph():
    clipper, params = zclip.GlobalNorm(1e-3), parameters()
    groups = warmed_up(clipper, params)
    for param in params:
        param.grad = (param.detach() + 1).requires_grad_() * 2
    clipper.step(groups)
    assert torch.is_grad_enabled()
    assert not clipper.result.total_norm.requires_grad


@pytest.mark.parametrize("between", ["decide", "scale"])
def test_names_are_right_after_a_step_of_another_kind_that_lacked_a_gradient(between):
    clipper, params = zclip.GlobalNorm(1.0), parameters()
    clipper._cache.give_names(zip("abc", params, strict=True))
    groups = warmed_up(clipper, params)
    params[0].grad = None
    if between == "decide":
        clipper.decide(groups)
    else:
        clipper.step(groups, grad_scale=torch.tensor(2.0))
    give_gradients(params, 9)
    clipper.step(groups)
    assert list(clipper.norms_by_name()) == ["a", "b", "c"]
    assert clipper.worst() in "abc"
