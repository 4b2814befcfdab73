"""Ends a process in every way there is, with a healer in it that nobody closes.

``python -m tests.heal.healer.endings FOLDER``: each case is a child of its own, forked so that
torch is loaded once, and leaves through the end of this very file, as a script does. A line for
each: its name and the exit status.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading

import torch
from torch import nn

from heal import Healer, HealingConfig

torch.set_num_threads(1)
STEPS, AT = 12, 5


def make(folder, **config):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Healer(model, optimizer, config=HealingConfig(**config), run_dir=folder)


def train(healer, happens=lambda: None, batches=STEPS, times=float("nan")):
    """The loop of three lines; something happens after a step, or a loss is bad."""
    optimizer = healer.optimizers[0]
    for i, batch in enumerate(healer.batches([torch.randn(4, 4) for _ in range(batches)])):
        loss = healer.model(batch).square().mean()
        (loss * times if happens is None and i >= AT else loss).backward()
        healer.step(loss)
        optimizer.zero_grad()
        if i == AT and happens is not None and happens() == "break":
            break
    return healer


def send(number):
    return lambda: os.kill(os.getpid(), number)


def boom():
    raise ValueError("boom")


def end(folder):
    train(make(folder))


def end_by_break(folder):
    return train(make(folder), lambda: "break")


def error(folder):
    train(make(folder), boom)


def exit_three(folder):
    train(make(folder), lambda: sys.exit(3))


def exit_zero(folder):
    train(make(folder), lambda: sys.exit(0))


def exit_three_between_epochs(folder):
    train(make(folder))
    raise SystemExit(3)


def exit_three_in_with(folder):
    with make(folder) as healer:
        train(healer, lambda: sys.exit(3))


def exit_none_in_with(folder):
    with make(folder) as healer:
        train(healer, sys.exit)


def break_in_with(folder):
    with make(folder) as healer:
        train(healer, lambda: "break")


def sigterm(folder):
    train(make(folder), send(signal.SIGTERM))


def sigterm_with_a_handler_of_ones_own(folder):
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    healer = train(make(folder), send(signal.SIGTERM))
    assert heard == [signal.SIGTERM]
    assert healer.last_step == STEPS - 1


def sigterm_in_with(folder):
    with make(folder) as healer:
        train(healer, send(signal.SIGTERM))


def sigterm_in_with_and_a_handler_of_ones_own(folder):
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        sigterm_in_with(folder)
    finally:
        assert heard == [signal.SIGTERM]


def sigterm_in_with_after_the_last_step(folder):
    with make(folder) as healer:
        train(healer)
        send(signal.SIGTERM)()
    print("still here")


def sigterm_in_with_that_is_closed(folder):
    with make(folder) as healer:
        train(healer, send(signal.SIGTERM), batches=AT + 1)
        healer.close()


def sigterm_after_with(folder):
    with make(folder) as healer:
        train(healer)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    send(signal.SIGTERM)()


def sigterm_in_run(folder):
    run(make(folder), AT)


def sigterm_in_run_at_the_last_step(folder):
    run(make(folder), STEPS - 1)


def run(healer, at):
    def train_step(batch):
        return healer.model(batch).square().mean()

    def on_step(step):
        if step == at:
            send(signal.SIGTERM)()

    healer.run(train_step, [torch.randn(4, 4)], STEPS, progress=False, on_step=on_step)


def sigterm_to_the_inner_of_two(folder):
    with make(folder + "-first") as first:
        train(first, lambda: sigterm_in_with(folder))


def two_healers_closed_in_their_order(folder):
    first, second = make(folder + "-first"), make(folder)
    for healer in (first, second):
        train(healer.__enter__())
    first.close()
    second.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    send(signal.SIGTERM)()


def sigint(folder):
    train(make(folder), send(signal.SIGINT))


def halt(folder):
    train(make(folder, nan_action="raise"), happens=None)


def halt_in_with(folder):
    with make(folder, nan_action="raise") as healer:
        train(healer, happens=None)


def halt_in_with_and_a_hook_of_ones_own(folder):
    def hook(kind, error, trace):
        print("own hook:", error, file=sys.stderr)
        sys.__excepthook__(kind, error, trace)
        raise OSError("a hook that fails")

    sys.excepthook = hook
    halt_in_with(folder)


def halt_in_with_that_is_caught(folder):
    with contextlib.suppress(RuntimeError):
        halt_in_with(folder)
    gc.collect()
    assert sys.excepthook is sys.__excepthook__


def halt_in_with_that_is_caught_and_another_error(folder):
    try:
        halt_in_with(folder)
    except RuntimeError as caught:
        raise ValueError("boom") from caught


def out_of_memory(folder):
    def train_step(batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    healer = make(folder)
    healer.run(train_step, [torch.randn(1, 4)], 5, progress=False)


def collected(folder):
    train(make(folder))
    gc.collect()


def collected_after_break(folder):
    end_by_break(folder)
    gc.collect()


def collected_after_break_and_error(folder):
    collected_after_break(folder)
    boom()


def collected_and_error(folder):
    collected(folder)
    boom()


def thread(folder):
    in_thread(error, folder)


def thread_in_with(folder):
    def error_in_with(folder):
        with make(folder) as healer:
            train(healer, boom)

    in_thread(error_in_with, folder)


def in_thread(target, folder):
    worker = threading.Thread(target=target, args=[folder])
    worker.start()
    worker.join()


def fork(folder):
    child = os.fork()
    if child == 0:
        sys.exit(7)
    os.waitpid(child, 0)
    with make(folder) as healer:
        train(healer, fork_and_exit)


def fork_and_exit():
    child = os.fork()
    if child == 0:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
        os.kill(os.getpid(), signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM


def process(folder):
    run_process(end, folder)


def process_with_error(folder):
    run_process(error, folder)


def run_process(target, folder):
    child = multiprocessing.get_context("fork").Process(target=target, args=[folder])
    child.start()
    child.join()


CASES = [
    end,
    end_by_break,
    error,
    exit_three,
    exit_zero,
    exit_three_between_epochs,
    exit_three_in_with,
    exit_none_in_with,
    break_in_with,
    sigterm,
    sigterm_with_a_handler_of_ones_own,
    sigterm_in_with,
    sigterm_in_with_and_a_handler_of_ones_own,
    sigterm_in_with_after_the_last_step,
    sigterm_in_with_that_is_closed,
    sigterm_after_with,
    sigterm_in_run,
    sigterm_in_run_at_the_last_step,
    sigterm_to_the_inner_of_two,
    two_healers_closed_in_their_order,
    sigint,
    halt,
    halt_in_with,
    halt_in_with_and_a_hook_of_ones_own,
    halt_in_with_that_is_caught,
    halt_in_with_that_is_caught_and_another_error,
    out_of_memory,
    collected,
    collected_after_break,
    collected_after_break_and_error,
    collected_and_error,
    thread,
    thread_in_with,
    fork,
    process,
    process_with_error,
]

if __name__ == "__main__":
    ROOT = sys.argv[1]
    CASE = None
    FIRST = make(None)
    FIRST.exits.dismiss()
    train(FIRST)  # loads what is loaded at the first step
    gc.freeze()  # or each child walks through all of torch at its end, for seconds
    for CASE in CASES:
        sys.stdout.flush()
        CHILD = os.fork()
        if not CHILD:
            break
        print(CASE.__name__, os.waitstatus_to_exitcode(os.waitpid(CHILD, 0)[1]))
    if not CHILD:
        ERRORS = os.open(f"{ROOT}/{CASE.__name__}.stderr", os.O_WRONLY | os.O_CREAT)
        os.dup2(ERRORS, 2)
        RESULT = CASE(f"{ROOT}/{CASE.__name__}")
