"""Whether this run is slower than an earlier one, as far as that can be said."""

from dataclasses import dataclass

from zclip.bench.results import Document, Result

TOLERANCE = 0.1
"""Share by which a case may be slower before it is called a regression."""


@dataclass(frozen=True)
class Change:
    """One case in both runs."""

    case: str
    slower: float
    """How many times as long as before, measured against the rival where both runs have it."""
    verdict: str
    """"regression", "faster", "same", or why nothing can be said."""

    @property
    def is_regression(self) -> bool:
        """Whether this is slower beyond the tolerance, and no noise."""
        return self.verdict == "regression"


def compare(old: Document, new: Document, tolerance: float = TOLERANCE) -> list[Change]:
    """Return what became of every case that both runs have.

    A machine that is slower today slows the rival down as well, so a regression must show in the
    ratio to the rival, and on the same machine in our own time too.
    """
    before = {result.case: result for result in old.results}
    same_machine = old.machine == new.machine
    return [
        _change(before[result.case], result, tolerance, same_machine)
        for result in new.results
        if result.case in before
    ]


def _change(old: Result, new: Result, tolerance: float, same_machine: bool) -> Change:
    own = new.ours.milliseconds / old.ours.milliseconds
    rival = old.rival if old.rival in new.contenders else None
    slower = own
    if rival is not None:
        theirs = new.contenders[rival].milliseconds / old.contenders[rival].milliseconds
        slower = own / theirs
    elif not same_machine:
        return Change(new.case, own, "not judged: another machine, and no rival in both runs")
    if noise := new.noise or old.noise:
        return Change(new.case, slower, f"not judged: {noise}")
    limit = 1 + tolerance
    if slower > limit and (own > limit or not same_machine):
        return Change(new.case, slower, "regression")
    return Change(new.case, slower, "faster" if slower < 1 / limit else "same")


def as_lines(changes: list[Change]) -> list[str]:
    """Return the comparison, one line per case, regressions first."""
    ordered = sorted(changes, key=lambda change: (not change.is_regression, -change.slower))
    return [f"{change.case}: {change.slower:.2f}x the time, {change.verdict}" for change in ordered]
