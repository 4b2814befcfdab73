"""ClippedOptimizer is the wrapped optimizer to everyone but a bad gradient."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import zclip
from tests.models import backward, make_model, norms_of, parameters_with_norms, set_norms

FUSED = {
    "AdamW": lambda params, **kw: torch.optim.AdamW(params, lr=0.1, fused=True, **kw),
    "Adam-amsgrad": lambda params, **kw: torch.optim.Adam(params, lr=0.1, amsgrad=True, fused=True),
    "SGD": lambda params, **kw: torch.optim.SGD(params, lr=0.1, fused=True),
    "SGD-nesterov": lambda params, **kw: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True
    ),
    "SGD-dampening": lambda params, **kw: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, dampening=0.5, fused=True
    ),
    "Adagrad": lambda params, **kw: torch.optim.Adagrad(params, lr=0.1, fused=True),
}
PLAIN = {
    "AdamW-foreach": lambda params: torch.optim.AdamW(params, lr=0.1),
    "SGD-momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
}
ALL = {**FUSED, **PLAIN}


@pytest.fixture(params=FUSED, ids=str)
def make_fused(request):
    return FUSED[request.param]


@pytest.fixture(params=ALL, ids=str)
def make_optimizer(request):
    return ALL[request.param]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is not fused")
        yield


def snapshot(model, optimizer):
    """Parameters and state by value; state that does not exist counts as what it starts from."""
    state = {}
    for i, param in enumerate(model.parameters()):
        for name, value in optimizer.state.get(param, {}).items():
            if value is not None and bool(torch.count_nonzero(value)):
                state[i, name] = value.clone()
    return [p.detach().clone() for p in model.parameters()], state


def assert_same(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left[0], right[0], strict=True))
    assert left[1].keys() == right[1].keys()
    assert all(torch.equal(left[1][key], right[1][key]) for key in left[1])


def wrapped(make, clipper=None, **settings):
    model = make_model()
    inner = make(list(model.parameters()))
    return model, zclip.ClippedOptimizer(inner, clipper or zclip.GlobalNorm(1.0), **settings)


@pytest.mark.parametrize("bad_step", [0, 1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_step_changes_nothing(make_optimizer, bad_step, bad):
    model, optimizer = wrapped(make_optimizer)
    calm_model, calm = wrapped(make_optimizer)
    for step in range(5):
        if step == bad_step:
            backward(model, 99)
            model[0].weight.grad[3, 2] = bad
            before = snapshot(model, optimizer)
            optimizer.step()
            assert_same(snapshot(model, optimizer), before)
        backward(model, step)
        backward(calm_model, step)
        optimizer.step()
        calm.step()
    assert_same(snapshot(model, optimizer), snapshot(calm_model, calm))


def test_a_good_run_equals_clipping_by_hand(make_optimizer):
    model, optimizer = wrapped(make_optimizer)
    by_hand = make_model()
    bare = make_optimizer(list(by_hand.parameters()))
    for step in range(4):
        backward(model, step, scale=3.0)
        optimizer.step()
        backward(by_hand, step, scale=3.0)
        zclip.clip_grad_norm_(by_hand.parameters(), 1.0)
        bare.step()
    assert_same(snapshot(model, optimizer), snapshot(by_hand, bare))


def test_it_is_the_wrapped_optimizer_to_everyone(make_optimizer):
    model, optimizer = wrapped(make_optimizer)
    inner = optimizer.inner
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert repr(optimizer).startswith("ClippedOptimizer (")
    backward(model, 0)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = optimizer.nonsense


def test_hooks_run_once_and_may_be_removed(make_optimizer):
    model, optimizer = wrapped(make_optimizer)
    heard = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: heard.append("pre")),
        optimizer.register_step_post_hook(lambda *_: heard.append("post")),
        optimizer.register_state_dict_pre_hook(lambda *_: heard.append("save")),
        optimizer.register_state_dict_post_hook(lambda *_: heard.append("saved")),
        optimizer.register_load_state_dict_pre_hook(lambda *_: heard.append("load")),
        optimizer.register_load_state_dict_post_hook(lambda *_: heard.append("loaded")),
    ]
    backward(model, 0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert heard == ["pre", "post", "save", "saved", "load", "loaded"]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(heard) == 6


def test_schedulers_and_lr_scale_do_not_meet(make_fused):
    model, optimizer = wrapped(make_fused)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = CosineAnnealingLR(optimizer, T_max=10)
        optimizer.lr_scale = 0.5
        backward(model, 0)
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(0.0975528)]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0975528)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
def test_lr_scale_scales_the_update(as_tensor):
    moved = []
    for scale in (1.0, 0.25):
        params = parameters_with_norms([1.0])
        lr = torch.tensor(0.1) if as_tensor else 0.1
        inner = torch.optim.SGD(params, lr=lr, fused=True)
        optimizer = zclip.ClippedOptimizer(inner, zclip.GlobalNorm(9.0))
        optimizer.lr_scale = scale
        optimizer.step()
        moved.append(params[0].detach().clone())
        assert optimizer.param_groups[0]["lr"] is lr
    torch.testing.assert_close(moved[1], moved[0] * 0.25)


def test_a_group_without_a_learning_rate_of_its_own_is_stepped_unscaled():
    class Relative(torch.optim.SGD):
        """As Adafactor with relative_step: lr is None, and the rate is found in the step."""

        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.sub_(param.grad * (0.1 if group["lr"] is None else group["lr"]))

    params = parameters_with_norms([1.0, 1.0])
    inner = Relative([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)
    inner.param_groups[0]["lr"] = None
    optimizer = zclip.ClippedOptimizer(inner, zclip.GlobalNorm(9.0))
    before = [param.detach().clone() for param in params]
    optimizer.lr_scale = 0.25
    optimizer.step()
    for param, old, rate in zip(params, before, (0.1, 0.025), strict=True):
        torch.testing.assert_close(param.detach(), old - rate * param.grad)
    assert inner.param_groups[0]["lr"] is None


def test_lr_comes_back_after_an_error():
    params = parameters_with_norms([1.0])
    optimizer = zclip.wrap(torch.optim.SGD(params, lr=0.1, fused=True), "global_norm", max_norm=1.0)
    optimizer.lr_scale = 0.5
    optimizer.inner.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not hasattr(optimizer.inner, "found_inf")


@pytest.mark.parametrize("clip", ["zclip", "adagc", "spike_skip", "auto_clip", "agc"])
def test_a_checkpoint_carries_the_clip_state(clip, tmp_path, make_optimizer):
    model = make_model()
    optimizer = zclip.wrap(make_optimizer(list(model.parameters())), clip)
    for step in range(4):
        backward(model, step)
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")

    twin = copy.deepcopy(model)
    other = zclip.wrap(make_optimizer(list(twin.parameters())), clip)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for step in range(4, 8):
        for one, its in ((model, optimizer), (twin, other)):
            backward(one, step)
            its.step()
        assert torch.equal(optimizer.result.verdict, other.result.verdict)
    assert_same(snapshot(model, optimizer), snapshot(twin, other))


def test_bare_and_wrapped_load_each_others_state(make_optimizer):
    model, optimizer = wrapped(make_optimizer, zclip.ZClip(warmup_steps=2))
    for step in range(3):
        backward(model, step)
        optimizer.step()
    bare = make_optimizer(list(model.parameters()))
    bare.load_state_dict(optimizer.state_dict())
    mean = optimizer.clipper.mean
    optimizer.load_state_dict(bare.state_dict())
    assert optimizer.clipper.mean == mean
    assert optimizer.param_groups is optimizer.inner.param_groups


def test_a_clip_state_that_does_not_fit_changes_nothing():
    model, optimizer = wrapped(FUSED["AdamW"], zclip.AdaGC())
    backward(model, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["zclip"]["groups"][0]["names"][1] = "elsewhere"
    with pytest.raises(ValueError, match=r"without parameters\[1\] and with elsewhere"):
        optimizer.load_state_dict(saved)
    backward(model, 1)
    optimizer.step()


def test_deepcopy_and_pickle_keep_everything(make_fused):
    model, optimizer = wrapped(make_fused, zclip.ZClip(warmup_steps=2))
    for step in range(3):
        backward(model, step)
        optimizer.step()
    optimizer.lr_scale = 0.5
    copies = [
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
    ]
    for step in range(3, 6):
        backward(model, step)
        optimizer.step()
    for twin, other in copies:
        assert other.guards_on_device
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(3, 6):
                backward(twin, step)
                other.step()
        assert other.lr_scale == 0.5
        assert_same(snapshot(twin, other), snapshot(model, optimizer))


def test_add_param_group_keeps_what_was_learned():
    params, extra = parameters_with_norms([1.0, 2.0]), parameters_with_norms([3.0])
    inner = torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)
    optimizer = zclip.ClippedOptimizer(inner, zclip.AdaGC(warmup_steps=1))
    for _ in range(2):
        set_norms(params, [0.3, 0.4])
        optimizer.step()
    gamma = optimizer.state_dict()["zclip"]["groups"][0]["gamma"]
    optimizer.add_param_group({"params": extra})
    set_norms([*params, *extra], [0.3, 0.4, 3.0])
    optimizer.step()
    after = optimizer.state_dict()["zclip"]["groups"][0]["gamma"]
    torch.testing.assert_close(after[:2], gamma, rtol=1e-3, atol=0)
    assert float(after[2]) == pytest.approx(3.0)


def test_names_by_hand_do_not_keep_groups_from_joining():
    """torch refuses to add a group without names to groups that have some."""
    model, extra = make_model(), nn.Linear(2, 1)
    named = [*model.named_parameters(), ("extra.weight", extra.weight)]
    inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    optimizer = zclip.ClippedOptimizer(inner, zclip.AdaGC(), named_parameters=named)
    for owner, param in ((inner, extra.weight), (optimizer, extra.bias)):
        owner.add_param_group({"params": [param]})
    backward(model, 0)
    extra(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = list(optimizer.clipper.norms_by_name())
    assert names == [*(n for n, _ in model.named_parameters()), "extra.weight", "parameters[5]"]


def test_groups_of_the_optimizer_are_the_groups_of_the_clipper():
    params = parameters_with_norms([4.0, 4.0])
    groups = [{"params": params[:1], "max_norm": 2.0}, {"params": params[1:]}]
    inner = torch.optim.SGD(groups, lr=0.1, fused=True)
    optimizer = zclip.ClippedOptimizer(inner, zclip.GlobalNorm(1.0, per_group=True))
    optimizer.step()
    assert norms_of(params) == pytest.approx([2.0, 1.0], rel=1e-5)
    with pytest.raises(ValueError, match=r"param_groups\[0\]: expected no max_norm"):
        zclip.ClippedOptimizer(inner, zclip.GlobalNorm(1.0))


def test_names_come_from_the_optimizer_or_by_hand():
    model = make_model()
    named = torch.optim.AdamW(model.named_parameters(), fused=True)
    bare = torch.optim.AdamW(model.parameters(), fused=True)
    by_hand = zclip.ClippedOptimizer(
        bare, zclip.GlobalNorm(1.0), named_parameters=model.named_parameters()
    )
    for optimizer in (zclip.wrap(named), by_hand):
        backward(model, 0)
        optimizer.step()
        assert list(optimizer.clipper.norms_by_name()) == [n for n, _ in model.named_parameters()]


def test_names_given_by_hand_survive_copies_and_checkpoints():
    model = make_model()
    optimizer = zclip.ClippedOptimizer(
        torch.optim.AdamW(model.parameters(), fused=True),
        zclip.AdaGC(warmup_steps=1),
        named_parameters=model.named_parameters(),
    )
    for step in range(3):
        backward(model, step)
        optimizer.step()
    gamma = optimizer.state_dict()["zclip"]["groups"][0]["gamma"]
    twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    optimizer.load_state_dict(optimizer.state_dict())
    for one, its in ((model, optimizer), (twin, other)):
        backward(one, 2)
        its.step()
        group = its.state_dict()["zclip"]["groups"][0]
        assert group["names"] == [name for name, _ in model.named_parameters()]
        torch.testing.assert_close(group["gamma"], gamma, rtol=0.02, atol=0)


def test_names_that_are_not_all_there_are_refused():
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(ValueError, match=r"got none of the shapes \[\(3, 7\), \(3,\)\]"):
        zclip.wrap(inner, named_parameters=model[0].named_parameters())


def test_a_closure_is_called_once_and_its_gradients_are_clipped(make_optimizer):
    model, optimizer = wrapped(make_optimizer, zclip.SpikeSkip())
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5)).square().mean() * 100
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert len(calls) == 1
    assert optimizer.result.verdict[zclip.layout.LOSS] == loss


def test_lbfgs_is_clipped_inside_its_closure():
    param = nn.Parameter(torch.tensor([3.0, -4.0]))
    optimizer = zclip.wrap(torch.optim.LBFGS([param], lr=0.5), "global_norm", max_norm=8.0)
    norms = []

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    original = optimizer.clipper.step
    optimizer.clipper.step = lambda *a, **k: (original(*a, **k), norms.append(param.grad.norm()))[0]
    first = float(optimizer.step(closure).detach())
    assert len(norms) > 1
    assert max(norms) <= 8.0
    assert float(closure().detach()) < first


def test_lbfgs_does_not_move_on_a_nan():
    param = nn.Parameter(torch.tensor([3.0, -4.0]))
    optimizer = zclip.wrap(torch.optim.LBFGS([param]), "zclip")

    def closure():
        optimizer.zero_grad()
        loss = (param * math.nan).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert param.tolist() == [3.0, -4.0]


def test_not_fused_waits_and_says_once_how_to_avoid_it():
    for make, cure in ((PLAIN["AdamW-foreach"], "fused=True"), (PLAIN["RMSprop"], "no fused form")):
        model, optimizer = wrapped(make)
        assert not optimizer.guards_on_device
        backward(model, 0)
        with pytest.warns(UserWarning, match=cure):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()


def test_a_group_that_is_not_fused_is_noticed():
    model = make_model()
    params = list(model.parameters())
    inner = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], fused=True)
    inner.param_groups[1]["fused"] = False
    optimizer = zclip.ClippedOptimizer(inner, zclip.ZClip())
    assert not optimizer.guards_on_device
    backward(model, 0)
    optimizer.step()


def test_skip_nonfinite_guards_even_a_clipper_that_lets_it_pass(make_fused):
    for skip in (True, False):
        clipper = zclip.GlobalNorm(1.0, on_nonfinite="official")
        model, optimizer = wrapped(make_fused, clipper, skip_nonfinite=skip)
        backward(model, 0)
        model[0].bias.grad[0] = math.nan
        before = snapshot(model, optimizer)
        optimizer.step()
        if skip:
            assert_same(snapshot(model, optimizer), before)
        else:
            assert any(p.isnan().any() for p in model.parameters())


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_the_clip_can_ride_on_the_fused_step(make_fused, scale):
    runs = []
    for apply in ("inplace", "grad_scale"):
        model, optimizer = wrapped(make_fused, zclip.GlobalNorm(0.05), apply=apply)
        for step in range(4):
            backward(model, step, scale)
            optimizer.step()
        backward(model, 9)
        model[0].bias.grad[0] = math.nan
        before = snapshot(model, optimizer)
        optimizer.step()
        assert_same(snapshot(model, optimizer), before)
        runs.append([p.detach().clone() for p in model.parameters()])
    for inplace, folded in zip(*runs, strict=True):
        torch.testing.assert_close(folded, inplace, rtol=1e-5, atol=1e-7)


def test_what_cannot_ride_on_the_fused_step_is_refused():
    model = make_model()
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(ValueError, match="one factor for all gradients, got AdaGC"):
        zclip.ClippedOptimizer(fused, zclip.AdaGC(), apply="grad_scale")
    with pytest.raises(ValueError, match="one factor"):
        zclip.ClippedOptimizer(fused, zclip.ZClip(per_group=True), apply="grad_scale")
    plain = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="expected an optimizer built with fused=True"):
        zclip.ClippedOptimizer(plain, zclip.ZClip(), apply="grad_scale")
    with pytest.raises(ValueError, match=r"apply: expected one of .*, got 'later'"):
        zclip.ClippedOptimizer(fused, zclip.ZClip(), apply="later")


def test_wrap_takes_a_name_a_clipper_and_settings():
    inner = torch.optim.AdamW(make_model().parameters(), fused=True)
    optimizer = zclip.wrap(inner, "zclip", alpha=0.5, lag=3)
    assert (optimizer.clipper.alpha, optimizer.mailbox.lag) == (0.5, 3)
    assert isinstance(zclip.wrap(inner, zclip.AdaGC()).clipper, zclip.AdaGC)
    with pytest.raises(ValueError, match=r"clipper: expected one of zclip, adagc.*, got 'adam'"):
        zclip.wrap(inner, "adam")
    with pytest.raises(TypeError, match="a name beside alpha, got ZClip; set these on it"):
        zclip.wrap(inner, zclip.ZClip(), alpha=0.5)
    with pytest.raises(ValueError, match="clipped already"):
        zclip.wrap(optimizer)
    with pytest.raises(TypeError, match="optimizer: expected a torch Optimizer, got str"):
        zclip.wrap("adam")
    with pytest.raises(TypeError, match=r"clipper: expected a zclip.Clipper or .* got float"):
        zclip.wrap(inner, 1.0)


def test_no_gradients_is_no_error(make_fused):
    model, optimizer = wrapped(make_fused)
    before = snapshot(model, optimizer)
    optimizer.step()
    assert_same(snapshot(model, optimizer), before)
    assert optimizer.result is None


def test_metrics_come_one_step_late():
    params = parameters_with_norms([4.0])
    optimizer = zclip.wrap(torch.optim.SGD(params, lr=0.1, fused=True), "global_norm", max_norm=1.0)
    heard = []
    for norm in (4.0, 0.5, math.nan, 2.0):
        set_norms(params, [norm])
        optimizer.step()
        heard.append(optimizer.metrics())
    assert heard[0] == {}
    assert [m["zclip/raw_grad_norm"] for m in heard[1:3]] == pytest.approx([4.0, 0.5])
    assert heard[1]["zclip/clipped_grad_norm"] == pytest.approx(1.0, rel=1e-5)
    assert math.isnan(heard[3]["zclip/raw_grad_norm"])
    assert (heard[3]["zclip/total_clips"], heard[3]["zclip/total_skips"]) == (1.0, 1.0)
    assert set(heard[3]) == {
        "zclip/raw_grad_norm",
        "zclip/clipped_grad_norm",
        "zclip/z_score",
        "zclip/threshold",
        "zclip/total_clips",
        "zclip/total_skips",
    }


def test_names_without_parameters_are_explained():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="expected pairs of name and parameter, got Parameter"):
        zclip.wrap(torch.optim.SGD(model.parameters()), named_parameters=model.parameters())
