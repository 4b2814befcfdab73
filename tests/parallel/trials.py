"""Random layouts, faults and steps: the same action at the same step everywhere, and no hang."""

import math
import random

import torch
import torch.distributed as dist

import zclip
from tests.parallel.faults import bits, optimizer_for, poison
from tests.parallel.layouts import gradients, layouts, same_on_all_ranks
from tests.parallel.registry import check
from zclip.layout import BLOCKED

TRIALS = 67  # in each of three worlds: 200 together
STEPS = 5
CLIPPERS = {
    "zclip": lambda: zclip.ZClip(warmup_steps=2, skip_step_on_spike=True),
    "adagc": lambda: zclip.AdaGC(warmup_steps=2),
    "spike_skip": lambda: zclip.SpikeSkip(window=4, sigma=3.0, min_count=2),
    "global_norm": lambda: zclip.GlobalNorm(1.0),
}


def _trial(seed):
    choose = random.Random(seed)  # all ranks draw the same
    names = [name for name in layouts() if name != "replicated"]
    layout = layouts()[choose.choice(names)]()
    optimizer = optimizer_for(layout, CLIPPERS[choose.choice(list(CLIPPERS))]())
    bad_step = choose.randrange(STEPS)
    bad_rank = choose.randrange(dist.get_world_size())
    kind = choose.choice(["nan", "inf", "spike", "loss", "none"])
    verdicts = []
    for step in range(STEPS):
        is_bad = step == bad_step
        layout.set_grads(
            gradients(seed=1000 * seed + step, size=1e6 if is_bad and kind == "spike" else 1.0)
        )
        stopped = False
        if is_bad and kind in ("nan", "inf"):
            stopped = poison(layout, bad_rank, math.nan if kind == "nan" else math.inf)
        loss = torch.tensor(1.0)
        if is_bad and kind == "loss" and dist.get_rank() == bad_rank:
            loss = torch.tensor(math.nan)
        before = bits(layout, optimizer)
        optimizer.step(loss=loss)
        verdict = optimizer.result.verdict
        verdicts.append(verdict.nan_to_num(nan=-1.0, posinf=-2.0))
        if stopped:
            assert verdict[BLOCKED] == 1
        if verdict[BLOCKED] == 1:
            # State may come to be in a refused first step; what was there stays.
            assert all(map(torch.equal, before, bits(layout, optimizer)[: len(before)]))
    assert same_on_all_ranks(*verdicts), (seed, kind)
    assert same_on_all_ranks(*optimizer.clipper._state.states), (seed, kind)


@check()
def random_trials():
    for seed in range(TRIALS):
        _trial(seed)


@check(slow=True)
def many_random_trials():
    for seed in range(1000, 1000 + 10 * TRIALS):
        _trial(seed)
