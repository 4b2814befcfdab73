"""Ends a process in every way there is, with a healer in it that nobody closes.

``python -m tests.heal.healer.endings FOLDER``: each case is a child of its own, forked so that
torch is loaded once, and leaves through the end of this very file, as a script does. A line for
each: its name and the exit status.
"""

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


def sigterm(folder):
    train(make(folder), send(signal.SIGTERM))


def sigterm_in_evaluation(folder):
    healer = train(make(folder))
    send(signal.SIGTERM)()
    print("still here", healer)


def sigterm_with_a_handler_of_ones_own(folder):
    def leave_later(number, frame):
        heard.append(number)

    heard = []
    signal.signal(signal.SIGTERM, leave_later)
    healer = train(make(folder), send(signal.SIGTERM))
    assert heard == [signal.SIGTERM]
    assert healer.last_step == STEPS - 1
    KEPT.append(healer)


def sigterm_after_close(folder):
    healer = train(make(folder))
    healer.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    send(signal.SIGTERM)()


def sigint(folder):
    train(make(folder), send(signal.SIGINT))


def halt(folder):
    train(make(folder, nan_action="raise"), happens=None)


def halt_with_a_hook_of_ones_own(folder):
    def hook(kind, error, trace):
        print("own hook:", error, file=sys.stderr)
        sys.__excepthook__(kind, error, trace)
        raise OSError("a hook that fails")

    sys.excepthook = hook
    halt(folder)


def halt_that_is_caught(folder):
    try:
        halt(folder)
    except RuntimeError:
        return


def out_of_memory(folder):
    def train_step(batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    healer = make(folder, activation_checkpointing=False)
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
    worker = threading.Thread(target=error, args=[folder])
    worker.start()
    worker.join()


def fork(folder):
    child = os.fork()
    if child == 0:
        sys.exit(7)
    os.waitpid(child, 0)
    train(make(folder), fork_and_exit)


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


def two_healers_closed_in_their_order(folder):
    first, second = train(make(folder + "-first")), train(make(folder))
    first.close()
    second.close()
    send(signal.SIGTERM)()


def sigterm_after_a_loop_that_nobody_closed(folder):
    KEPT.append(train(make(folder + "-first")))
    train(make(folder), send(signal.SIGTERM))


def sigterm_in_run_after_a_loop_that_nobody_closed(folder):
    KEPT.append(train(make(folder + "-first")))
    healer = make(folder)
    batches = [torch.randn(4, 4)] * STEPS

    def train_step(batch):
        return healer.model(batch).square().mean()

    def on_step(step):
        if step == AT:
            send(signal.SIGTERM)()

    healer.run(train_step, batches, STEPS, progress=False, on_step=on_step)


def sigterm_beside_a_loop_that_was_closed_since(folder):
    first = train(make(folder + "-first"))

    def close_and_send():
        first.close()
        send(signal.SIGTERM)()

    train(make(folder), close_and_send)


def sigterm_in_with_after_the_last_step(folder):
    with make(folder) as healer:
        train(healer)
        send(signal.SIGTERM)()
    print("still here")


def sigterm_in_run_at_the_last_step(folder):
    healer = make(folder)

    def on_step(step):
        if step == STEPS - 1:
            send(signal.SIGTERM)()

    def train_step(batch):
        return healer.model(batch).square().mean()

    healer.run(train_step, [torch.randn(4, 4)], STEPS, progress=False, on_step=on_step)


def sigterm_at_the_last_step_of_a_loop(folder):
    healer = train(make(folder), send(signal.SIGTERM), batches=AT + 1)
    healer.close()


def sigterm_to_the_outer_of_two(folder):
    def happens():
        KEPT.append(train(make(folder + "-first")))
        send(signal.SIGTERM)()

    train(make(folder), happens)


def sigterm_to_two_in_evaluation(folder):
    KEPT.extend([train(make(folder + "-first")), train(make(folder))])
    send(signal.SIGTERM)()
    print("still here")


def sigterm_to_two_with_a_handler_of_ones_own(folder):
    signal.signal(signal.SIGTERM, lambda number, frame: KEPT.append(number))
    KEPT.append(train(make(folder + "-first")))
    KEPT.append(train(make(folder), send(signal.SIGTERM)))
    assert KEPT.count(signal.SIGTERM) == 1
    assert KEPT[-1].last_step == STEPS - 1


KEPT = []
CASES = [
    end,
    end_by_break,
    error,
    exit_three,
    exit_zero,
    exit_three_between_epochs,
    exit_three_in_with,
    exit_none_in_with,
    sigterm,
    sigterm_in_evaluation,
    sigterm_with_a_handler_of_ones_own,
    sigterm_after_close,
    sigint,
    halt,
    halt_with_a_hook_of_ones_own,
    halt_that_is_caught,
    out_of_memory,
    collected,
    collected_after_break,
    collected_after_break_and_error,
    collected_and_error,
    thread,
    fork,
    process,
    process_with_error,
    two_healers_closed_in_their_order,
    sigterm_after_a_loop_that_nobody_closed,
    sigterm_in_run_after_a_loop_that_nobody_closed,
    sigterm_beside_a_loop_that_was_closed_since,
    sigterm_in_with_after_the_last_step,
    sigterm_in_run_at_the_last_step,
    sigterm_at_the_last_step_of_a_loop,
    sigterm_to_the_outer_of_two,
    sigterm_to_two_in_evaluation,
    sigterm_to_two_with_a_handler_of_ones_own,
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
