"""Clippers on many ranks learn what one process learns, and the same on every rank."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

import zclip
from tests.parallel.layouts import (
    SHAPES,
    CountCollectives,
    fsdp,
    gradients,
    layouts,
    pipeline,
    same_on_all_ranks,
)
from tests.parallel.registry import check

CLIPPERS = {
    "zclip": lambda: zclip.ZClip(warmup_steps=3),
    "zclip-skip": lambda: zclip.ZClip(warmup_steps=3, skip_step_on_spike=True),
    "adagc": lambda: zclip.AdaGC(warmup_steps=2),
    "global_norm": lambda: zclip.GlobalNorm(1.0),
    "spike_skip": lambda: zclip.SpikeSkip(window=4, sigma=2.0, min_count=2),
    "auto_clip": lambda: zclip.AutoClip(history=4),
}
SIZES = [1.0, 1.1, 0.9, 1.05, 30.0, 1.0, 0.5, 2.0]  # of the gradients, step by step


def _state(clipper):
    return [t for t in clipper._state.tensors()]


def _compare(name, make_clipper, layout):
    alone, together = make_clipper(), make_clipper().distribute(**layout.groups)
    whole = [Parameter(t.clone()) for t in layout.total]
    together.bind(layout.params)
    for step, size in enumerate(SIZES):
        grads = gradients(seed=step, size=size)
        layout.set_grads(grads)
        for param, grad in zip(whole, grads, strict=True):
            param.grad = grad.clone()
        # Ranks have losses of their own; one process has their mean.
        mean = torch.tensor(size, dtype=torch.float64)
        spread = dist.get_rank() - (dist.get_world_size() - 1) / 2
        loss = mean + spread if layout.collectives else mean
        wanted = alone.step(whole, loss=mean)
        with CountCollectives() as counted:
            norm = together.step(layout.params, loss=loss)
        assert len(counted.names) == layout.collectives, (name, counted.names)
        torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0, msg=f"{name} step {step}")
        torch.testing.assert_close(together.result.coefs, alone.result.coefs, rtol=1e-6, atol=0)
        torch.testing.assert_close(
            together.result.verdict, alone.result.verdict, rtol=2e-6, atol=1e-6, equal_nan=True
        )
        clipped = layout.pieces([p.grad for p in whole])
        for got, want in zip(layout.local_grads(), clipped, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-9)
        assert same_on_all_ranks(together.result.verdict, together.result.coefs)
    assert same_on_all_ranks(*_state(together))
    for got, want in zip(_state(together), _state(alone), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-12)


@check()
def every_clipper_does_what_one_process_does():
    chosen = list(CLIPPERS)
    if dist.get_world_size() == 4:  # the others saw all of them in smaller worlds
        chosen = ["zclip", "adagc", "spike_skip"]
    for layout_name, make in layouts().items():
        for name in chosen:
            _compare(f"{layout_name} {name}", CLIPPERS[name], make())


@check()
def agc_looks_at_whole_rows_wherever_they_are():
    for name, make in layouts().items():
        layout = make()
        if "process_group" in layout.groups:  # flat parts have lost their rows
            continue
        alone, together = zclip.AGC(clip=0.5), zclip.AGC(clip=0.5).distribute(**layout.groups)
        whole = [Parameter(t.clone()) for t in layout.total]
        for step, size in enumerate(SIZES[:4]):
            grads = gradients(seed=step + 50, size=size)
            layout.set_grads(grads)
            for param, grad in zip(whole, grads, strict=True):
                param.grad = grad.clone()
            wanted = alone.step(whole)
            extra = torch.ones(2, dtype=torch.float64)
            with CountCollectives() as counted:
                norm = together.step(layout.params, extra=extra)
            meets_first = step == 0 and "pipeline_group" in layout.groups  # stages tell their rows
            assert meets_first or len(counted.names) == layout.collectives, name
            torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)
            torch.testing.assert_close(
                together.result.verdict, alone.result.verdict, rtol=1e-5, atol=1e-6
            )
            clipped = layout.pieces([p.grad for p in whole])
            for got, want in zip(layout.local_grads(), clipped, strict=True):
                torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-9, msg=name)
            assert same_on_all_ranks(together.result.verdict, norm)
            ranks = dist.get_world_size() if layout.collectives else 1
            assert together.result.extra.tolist() == [ranks] * 2
        layout.set_grads([torch.full_like(t, float("nan")) for t in layout.total])
        together.step(layout.params)
        assert all((g == 0).all() for g in layout.local_grads())
        assert pickle.loads(pickle.dumps(together)).clip == 0.5


@check()
def agc_takes_parts_of_plain_tensors_cut_along_either_dimension():
    whole, size, rank = gradients(seed=3), dist.get_world_size(), dist.get_rank()
    for split_dim in (0, 1):

        def part(tensor, dim=split_dim):
            return tensor.tensor_split(size, dim=min(dim, tensor.dim() - 1))[rank].clone()

        alone, together = zclip.AGC(clip=0.5), zclip.AGC(clip=0.5, split_dim=split_dim)
        together.distribute(process_group=dist.group.WORLD)
        pieces = [Parameter(part(t)) for t in whole]
        params = [Parameter(t.clone()) for t in whole]
        for grads in (gradients(seed=4, size=0.3), gradients(seed=5, size=3.0)):
            for piece, param, grad in zip(pieces, params, grads, strict=True):
                piece.grad, param.grad = part(grad), grad.clone()
            norm, wanted = together.step(pieces), alone.step(params)
            torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)
            verdict = together.result.verdict
            torch.testing.assert_close(verdict, alone.result.verdict, rtol=1e-5, atol=1e-6)
            for piece, param in zip(pieces, params, strict=True):
                torch.testing.assert_close(piece.grad, part(param.grad), rtol=2e-6, atol=1e-9)
            assert same_on_all_ranks(verdict, norm)
        if rank == size - 1:
            pieces[-1].grad[0, 0] = float("nan")
        together.step(pieces)
        assert all((piece.grad == 0).all() for piece in pieces)


@check()
def groups_have_statistics_of_their_own():
    for make in (fsdp, layouts()["beside_plain"]):
        layout = make()
        clipper, alone = (
            zclip.GlobalNorm(1.0, per_group=True),
            zclip.GlobalNorm(1.0, per_group=True),
        )
        groups = [{"params": layout.params[:3]}, {"params": layout.params[3:]}]
        clipper.step(groups)
        whole = [Parameter(t.clone()) for t in layout.total]
        for param in whole:
            param.grad = param.detach().clone()
        alone.step([{"params": whole[:3]}, {"params": whole[3:]}])
        torch.testing.assert_close(clipper.result.coefs, alone.result.coefs, rtol=1e-6, atol=0)
        assert same_on_all_ranks(clipper.result.verdict)


PER_GROUP = {
    "global_norm": lambda: zclip.GlobalNorm(1.0, per_group=True),
    "zclip": lambda: zclip.ZClip(warmup_steps=2, per_group=True),
    "adagc": lambda: zclip.AdaGC(warmup_steps=2, per_group=True),
}


@check()
def groups_reach_over_the_stages_of_a_pipeline():
    def grouped(params, offset):
        matrices = [p for i, p in enumerate(params, offset) if len(SHAPES[i]) == 2]
        vectors = [p for i, p in enumerate(params, offset) if len(SHAPES[i]) == 1]
        return [{"params": vectors}, {"params": matrices}]  # the first stages have no vectors

    for name, make in PER_GROUP.items():
        layout = pipeline()
        alone, together = make(), make().distribute(**layout.groups)
        whole = [Parameter(t.clone()) for t in layout.total]
        for step, size in enumerate((1.0, 1.1, 0.9, 1.0, 30.0, 1.0)):
            grads = gradients(seed=step + 70, size=size)
            layout.set_grads(grads)
            for param, grad in zip(whole, grads, strict=True):
                param.grad = grad.clone()
            alone.step(grouped(whole, 0))
            together.step(grouped(layout.params, layout.offset))
            clipped = layout.pieces([p.grad for p in whole])
            for got, want in zip(layout.local_grads(), clipped, strict=True):
                torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-9, msg=name)
            assert same_on_all_ranks(together.result.verdict, *_state(together))
        for got, want in zip(_state(together), _state(alone), strict=True):
            torch.testing.assert_close(got.sort().values, want.sort().values, rtol=1e-6, atol=1e-12)
        layout.params[-1].grad.fill_(float("inf") if dist.get_rank() == 0 else 1.0)
        together.step(grouped(layout.params, layout.offset))
        assert all((g == 0).all() for g in layout.local_grads())

    clipper = PER_GROUP["zclip"]().distribute(**layout.groups)
    groups = grouped(layout.params, layout.offset)
    with pytest.raises(ValueError, match="as many parameter groups on every stage"):
        clipper.step(groups if dist.get_rank() else [*groups, {"params": []}])


@check()
def norms_by_name_are_those_of_the_whole():
    layout = pipeline()
    clipper = zclip.AdaGC().distribute(**layout.groups)
    clipper.step(layout.params)
    norms = torch.stack(list(clipper.norms_by_name().values()))
    wanted = torch.stack([t.double().norm() for t in layout.total])
    torch.testing.assert_close(norms, wanted, rtol=1e-6, atol=0)
    assert len(clipper.norms_by_name()) == len(layout.total)


@check()
def all_ranks_get_the_state_that_the_first_loaded():
    layout = fsdp()
    clipper = zclip.ZClip(warmup_steps=2)
    for step in range(4):
        layout.set_grads(gradients(seed=step, size=1.0 + step))
        clipper.step(layout.params)
    saved = clipper.state_dict()
    wanted = saved["groups"][0]["mean"].clone()
    saved["groups"][0]["mean"] += dist.get_rank()  # as from files that differ
    fresh = zclip.ZClip(warmup_steps=2)
    fresh.bind(layout.params)
    fresh.load_state_dict(saved)
    assert same_on_all_ranks(*_state(fresh))
    assert fresh.state_dict()["groups"][0]["mean"] == wanted


@check()
def copies_leave_the_groups_behind():
    layout = fsdp()
    clipper = zclip.ZClip().distribute(record_group=dist.group.WORLD)
    clipper.step(layout.params)
    for copied in (copy.deepcopy(clipper), pickle.loads(pickle.dumps(clipper))):
        assert torch.equal(copied._state.states[0], clipper._state.states[0])
        copied.step(layout.params)


@check()
def parameters_may_come_and_go():
    layout = fsdp()
    clipper = zclip.AdaGC()
    for params in (layout.params, layout.params[:3], layout.params):
        clipper.step([(f"p{i}", p) for i, p in enumerate(params)])
        assert len(clipper.result.coefs) == len(params)
        assert same_on_all_ranks(clipper.result.verdict)
