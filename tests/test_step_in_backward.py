"""Optimizer-in-backward: the weights of the fused optimizer, without keeping its gradients."""

import copy
import math

import pytest
import torch
from torch import nn

import heal
import zclip
from zclip.optim import SGD, Adam, AdamW, Lion, step_in_backward

STEPS = 6


def make_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(40, 60), nn.LayerNorm(60), nn.Tanh(), nn.Linear(60, 50), nn.Linear(50, 3)
    ).to(dtype)


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    dtype = model[0].weight.dtype
    x = torch.randn(8, 40, generator=generator).to(dtype)
    (model(x).square().mean() * (30.0 if step == 4 else 1.0)).backward()


def train(model, optimizer, steps=range(STEPS)):
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def tensors_of(state):
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [t for key in sorted(state) for t in tensors_of(state[key])]
    return [t for value in state for t in tensors_of(value)] if isinstance(state, list) else []


def assert_same_state(one, other):
    left, right = tensors_of(one), tensors_of(other)
    assert len(left) == len(right)
    assert all(map(torch.equal, left, right))


OPTIMIZERS = {
    "AdamW": (AdamW, {"lr": 1e-2}),
    "Adam, amsgrad": (Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "SGD": (SGD, {"lr": 1e-2}),
    "SGD, damped": (SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
    "Lion": (Lion, {"lr": 1e-3}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("warmup", [0, 2])
def test_weights_state_and_gammas_are_those_of_stepping_after_backward(name, warmup):
    kind, settings = OPTIMIZERS[name]
    plain, model = make_model(), make_model()
    usual = kind(plain.named_parameters(), clipper=zclip.AdaGC(warmup_steps=warmup), **settings)
    ours = step_in_backward(model, kind, zclip.AdaGC(warmup_steps=warmup), **settings)
    clipped = 0
    for step in range(STEPS):
        train(plain, usual, [step])
        train(model, ours, [step])
        clipped += int((usual.result.clip.coefs < 1.0).sum())
        assert all(map(torch.equal, plain.parameters(), model.parameters())), step
        assert torch.equal(usual.result.clip.stats, ours.result.clip.stats)
        assert torch.equal(usual.result.clip.coefs, ours.result.clip.coefs)
        assert torch.equal(usual.result.rows, ours.result.rows)
        assert float(ours.result.taken) == 1.0
        assert ours.is_in_backward == (step + 1 >= warmup)
    assert clipped > 0
    one, other = usual.state_dict(), ours.state_dict()
    assert_same_state(one["state"], other["state"])
    gammas = [state["zclip"]["groups"][0]["gamma"] for state in (one, other)]
    assert torch.equal(*gammas)


def test_without_a_clipper():
    plain, model = make_model(), make_model()
    train(plain, AdamW(plain.parameters(), lr=1e-2))
    train(model, step_in_backward(model, AdamW, lr=1e-2))
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_bfloat16():
    plain, model = make_model(dtype=torch.bfloat16), make_model(dtype=torch.bfloat16)
    clip = {"warmup_steps": 0}
    train(plain, AdamW(plain.named_parameters(), lr=1e-2, clipper=zclip.AdaGC(**clip)))
    train(model, step_in_backward(model, AdamW, zclip.AdaGC(**clip), lr=1e-2))
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_no_two_gradients_are_alive_at_a_time():
    model = make_model()
    optimizer = step_in_backward(model, AdamW, zclip.AdaGC(warmup_steps=0))
    alive = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    train(model, optimizer)
    assert alive
    assert set(alive) == {0}


def test_a_schedule_and_a_scale_of_the_rate_are_obeyed():
    plain, model = make_model(), make_model()
    usual = AdamW(plain.named_parameters(), lr=1e-2, clipper=zclip.AdaGC(warmup_steps=1))
    ours = step_in_backward(model, AdamW, zclip.AdaGC(warmup_steps=1), lr=1e-2)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.3) for o in (usual, ours)]
    for step in range(STEPS):
        usual.lr_scale = ours.lr_scale = 0.5 if step > 3 else 1.0
        train(plain, usual, [step])
        train(model, ours, [step])
        for schedule in schedules:
            schedule.step()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_a_bad_gradient_is_contained_in_its_tensor():
    model = make_model()
    optimizer = step_in_backward(model, AdamW, zclip.AdaGC(warmup_steps=0), lr=1e-2)
    train(model, optimizer, range(2))
    before = [p.detach().clone() for p in model.parameters()]
    moments = copy.deepcopy(optimizer.state[model[3].weight])
    poison = model[3].weight.register_hook(lambda grad: grad * math.nan)
    backward(model, 2)
    optimizer.step()
    poison.remove()
    changed = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, is_new in zip(names, changed, strict=True) if not is_new] == ["3.weight"]
    assert_same_state(dict(optimizer.state[model[3].weight]), dict(moments))
    assert float(optimizer.result.taken) == 0.0
    skipped = optimizer.result.clip.coefs == -1.0
    assert [name for name, is_one in zip(names, skipped, strict=True) if is_one] == ["3.weight"]
    train(model, optimizer, [3])
    assert float(optimizer.result.taken) == 1.0
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("saved_at", [1, 4], ids=["in the warm-up", "after it"])
def test_a_checkpoint_goes_on_where_it_was(saved_at):
    model = make_model()
    optimizer = step_in_backward(model, AdamW, zclip.AdaGC(warmup_steps=3), lr=1e-2)
    train(model, optimizer, range(saved_at))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(saved_at, STEPS))
    twin = make_model(seed=5)
    other = step_in_backward(twin, AdamW, zclip.AdaGC(warmup_steps=3), lr=1e-2)
    twin.load_state_dict(saved[0])
    other.load_state_dict(copy.deepcopy(saved[1]))
    train(twin, other, range(saved_at, STEPS))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    usual_model = make_model(seed=6)
    usual = AdamW(usual_model.named_parameters(), lr=1e-2, clipper=zclip.AdaGC(warmup_steps=3))
    usual_model.load_state_dict(saved[0])
    usual.load_state_dict(copy.deepcopy(saved[1]))
    train(usual_model, usual, range(saved_at, STEPS))
    assert all(map(torch.equal, model.parameters(), usual_model.parameters()))


def test_detaching_hands_over_to_the_optimizer_inside():
    plain, model = make_model(), make_model()
    usual = AdamW(plain.named_parameters(), lr=1e-2, clipper=zclip.AdaGC(warmup_steps=1))
    ours = step_in_backward(model, AdamW, zclip.AdaGC(warmup_steps=1), lr=1e-2)
    train(plain, usual, range(STEPS))
    train(model, ours, range(3))
    inner = ours.detach()
    assert all(p._post_accumulate_grad_hooks is None for p in model.parameters())
    train(model, inner, range(3, STEPS))
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    gammas = [o.state_dict()["zclip"]["groups"][0]["gamma"] for o in (usual, inner)]
    assert torch.equal(*gammas)


def test_a_parameter_that_gets_its_first_gradient_late():
    model, plain = make_model(), make_model()
    ours = step_in_backward(model, SGD, zclip.AdaGC(warmup_steps=0), lr=0.1, momentum=0.9)
    usual = SGD(plain.named_parameters(), lr=0.1, momentum=0.9, clipper=zclip.AdaGC(warmup_steps=0))
    for candidate, optimizer in ((model, ours), (plain, usual)):
        candidate[0].weight.requires_grad_(False)
        train(candidate, optimizer, range(2))
        candidate[0].weight.requires_grad_(True)
        train(candidate, optimizer, range(2, 4))
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_a_group_may_join():
    plain, model = make_model(), make_model()
    usual = AdamW(plain[:4].named_parameters(), lr=1e-2, clipper=zclip.AdaGC(warmup_steps=1))
    ours = step_in_backward(
        model[:4].named_parameters(), AdamW, zclip.AdaGC(warmup_steps=1), lr=1e-2
    )
    for candidate, optimizer in ((plain, usual), (model, ours)):
        train(candidate, optimizer, range(3))
        late = [(f"late.{name}", param) for name, param in candidate[4].named_parameters()]
        candidate.zero_grad()
        optimizer.add_param_group({"params": late, "lr": 1e-3})
        train(candidate, optimizer, range(3, STEPS))
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_what_cannot_work_says_so():
    model = make_model()
    with pytest.raises(
        TypeError, match=r"expected a class, AdamW, Adam, SGD or Lion of zclip\.optim"
    ):
        step_in_backward(model, torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"clipper: expected AdaGC .*, got ZClip"):
        step_in_backward(model, AdamW, zclip.ZClip())
    with pytest.raises(ValueError, match="without per_group"):
        step_in_backward(model, AdamW, zclip.AdaGC(per_group=True))


def test_heal_hears_of_every_step_and_rolls_back_all_of_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = step_in_backward(model, AdamW, zclip.AdaGC(warmup_steps=0), lr=1e-2)
    healer = heal.Healer(model, optimizer)
    inputs = torch.randn(64, 10)
    targets = inputs.sum(1, keepdim=True)
    losses = []
    for step in range(90):
        if step == 40:
            poison = model[0].weight.register_hook(lambda grad: grad * math.nan)
        if step == 60:
            with torch.no_grad():
                model[2].weight[0, 0] = math.nan
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        healer.step(loss)
        if step == 40:
            poison.remove()
        losses.append(float(loss.detach()))
    healer.close()
    assert healer.metrics()["healing/nan_count"] >= 1.0
    assert all(p.isfinite().all() for p in model.parameters())
    assert losses[-1] < 0.2 * losses[0]


def test_a_wrapper_reports_what_backward_has_done():
    model = make_model()
    inner = step_in_backward(model, AdamW, zclip.AdaGC(warmup_steps=0), lr=1e-2)
    optimizer = zclip.wrap(inner, "global_norm", max_norm=math.inf)
    plain = make_model()
    train(plain, step_in_backward(plain, AdamW, zclip.AdaGC(warmup_steps=0), lr=1e-2))
    train(model, optimizer)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert torch.equal(optimizer.result.stats, inner.result.clip.stats)
    gammas = [o.state_dict()["zclip"]["groups"][0]["gamma"] for o in (optimizer, inner)]
    assert torch.equal(*gammas)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(inner.state_dict()["zclip"]["groups"][0]["gamma"], gammas[0])
    with pytest.raises(ValueError, match="warmup_steps=0"):
        zclip.wrap(step_in_backward(make_model(), AdamW, zclip.AdaGC()), "zclip")
