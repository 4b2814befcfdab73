"""Two ranks of Lightning's DDP; run by ``test_lightning_ranks.py`` under torchrun."""

import warnings

import torch
import torch.distributed as dist

from tests.heal.test_lightning import Module, assert_same, fit, healing, nan_loss

TWO = {"devices": 2, "strategy": "ddp"}


def an_undisturbed_run_is_the_bare_one():
    bare, healed = Module(), Module()
    fit(bare, **TWO)
    fit(healed, healing(), **TWO)
    assert_same([*healed.state_dict().values()], [*bare.state_dict().values()])


def nan_on_one_rank_is_refused_and_rolled_back_by_both():
    callback, module = healing(), Module()
    if dist.get_rank() == 1:
        module.faults = {n: nan_loss for n in range(20, 26)}
    trainer = fit(module, callback, **TWO)
    assert trainer.global_step == callback.healer.last_step + 1 == trainer.max_steps
    assert any("Rollback" in str(plan) for _, _, plan in callback.healer.history)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    theirs = weights.clone()
    dist.broadcast(theirs, src=0)
    assert torch.equal(weights, theirs)
    assert weights.isfinite().all()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    an_undisturbed_run_is_the_bare_one()
    nan_on_one_rank_is_refused_and_rolled_back_by_both()
    print("both ranks agree", flush=True)
