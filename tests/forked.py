"""A forked child, for tests that kill a run in the midst of it."""

import os
import traceback
from collections.abc import Callable


def run_forked(work: Callable[[], object]) -> int:
    """Do work in a forked child; return its exit code, negative if a signal ended it.

    What the child raises is printed, and its exit code is then 1: a child that failed by itself
    must not pass for one that was killed.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
