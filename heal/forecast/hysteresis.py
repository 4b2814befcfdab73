"""When a warning begins and when it is over, given the evidence of each step."""

CLEAR_MARGIN = 2.0  # log-odds below the limit that evidence must stay to end a warning
QUIET_STEPS = 50  # for so long


class Hysteresis:
    """A switch that goes on above ``limit`` and off after a quiet while well below it.

    Attributes:
        is_on: whether there is a warning.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.is_on = False
        self.quiet = 0

    def observe(self, evidence: float) -> bool:
        """Hear of a step; return whether a warning begins with it."""
        if not self.is_on:
            self.is_on = evidence > self.limit
            self.quiet = 0
            return self.is_on
        self.quiet = self.quiet + 1 if evidence < self.limit - CLEAR_MARGIN else 0
        if self.quiet >= QUIET_STEPS:
            self.is_on = False
        return False
