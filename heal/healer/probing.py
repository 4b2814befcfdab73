"""Probes of the user's own, run by the healer every so many steps."""

from collections.abc import Callable
from typing import Any

from heal.healer.attached_probes import AttachedProbe
from heal.healer.parts import Parts


class Probing:
    """The part of a Healer that takes probes."""

    parts: Parts

    def add_probe(
        self,
        name: str,
        look: Callable[[], Any],
        *,
        every: int,
        alarm: Callable[[Any], bool] | None = None,
    ) -> None:
        """Run ``look()`` after every ``every``-th step, write its numbers down, and heed an alarm.

        The numbers are an event ``probe`` of the journal and entries ``probe/<name>`` of
        :meth:`metrics`. Generators, buffers and modes are put back, so that training goes on bit
        by bit as without; weights and gradients are the probe's to leave alone, as those of
        :mod:`heal.probes` do. The step waits for it, and its time counts for no step. One that
        raises is noted once and not run again. With several ranks each adds the same probes.

        Args:
            name: that no other probe has.
            look: returns a number, a mapping or dataclass of numbers, or None if there is nothing
                to tell; what is no number in these is left out.
            every: steps between looks.
            alarm: given what was found, tells whether somebody should know. That is an alert
                ``probe_alarm``, told when it comes on; what ``on_instability`` makes of it is
                yours, by itself it changes nothing.

        Raises:
            ValueError: the name is taken or empty, or ``every`` is below 1.

        Example:
            >>> healer.add_probe(
            ...     "sharpness",
            ...     lambda: sharpness(model, train_step, batch),
            ...     every=500,
            ...     alarm=lambda found: found.eigenvalue * lr > 2,
            ... )
        """
        self.parts.probes.add(AttachedProbe(name, look, every, alarm))
