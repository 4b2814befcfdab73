"""AdaGC: every tensor has a limit of its own, which follows its own clipped norms."""

from collections.abc import Mapping
from typing import Any, ClassVar

from zclip.checks import check_count, check_fraction, check_limit
from zclip.clippers.clipper import Clipper
from zclip.clippers.state import COUNTERS
from zclip.layout import ADAGC_SEEDS, GAMMA_COLUMN, ON_NONFINITE, SKIP_COUNT, STEPS


class AdaGC(Clipper):
    """Adaptive gradient clipping per tensor (arXiv 2502.11034).

    For ``warmup_steps`` steps all gradients are clipped together to ``lambda_abs`` while each
    tensor learns its gamma. Then a tensor whose norm exceeds ``lambda_rel * gamma`` is scaled down
    to that, and gamma follows the clipped norm with factor ``beta``. Unlike the published code, a
    tensor with a zero gradient, or with none, learns nothing, so that it is not frozen for good.

    Args:
        lambda_rel: how far above gamma a norm may rise.
        beta: weight of the past in gamma.
        lambda_abs: the global limit during warm-up.
        eps: added to a norm before dividing by it.
        warmup_steps: how many steps the global limit is used.
        seed: what gamma starts from: "min_clipped" or "min_raw", the smallest norm of warm-up after
            or before the global clip; "first", the first norm.
        per_group: clip each parameter group by its own norm during warm-up.
        on_nonfinite: "skip" skips the step and learns nothing; "official" as published.
    """

    rule: ClassVar[str] = "adagc"
    is_global: ClassVar[bool] = False
    is_per_tensor: ClassVar[bool] = True
    fields: ClassVar[Mapping[str, int | slice]] = {"gamma": slice(GAMMA_COLUMN, None)}

    def __init__(
        self,
        lambda_rel: float = 1.04,
        beta: float = 0.99,
        lambda_abs: float = 1.0,
        eps: float = 1e-6,
        warmup_steps: int = 100,
        seed: str = "min_clipped",
        *,
        per_group: bool = False,
        on_nonfinite: str = "skip",
    ) -> None:
        super().__init__(per_group=per_group, on_nonfinite=on_nonfinite)
        if seed not in ADAGC_SEEDS:
            raise ValueError(f"seed: expected one of {', '.join(ADAGC_SEEDS)}, got {seed!r}")
        self.lambda_rel = check_limit("lambda_rel", lambda_rel)
        self.beta = check_fraction("beta", beta)
        self.lambda_abs = check_limit("lambda_abs", lambda_abs)
        self.eps = check_limit("eps", eps)
        self.warmup_steps = check_count("warmup_steps", warmup_steps, least=0)
        self.seed = seed

    def settings(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (
            self.lambda_rel,
            self.beta,
            self.lambda_abs,
            self.eps,
            self.warmup_steps,
            ADAGC_SEEDS[self.seed],
            ON_NONFINITE[self.on_nonfinite],
        )

    def state_size(self, num_tensors: int) -> int:
        return GAMMA_COLUMN + num_tensors

    def steps_accepted(self) -> int:
        """Return how many steps were not skipped, by which warm-up is counted. This waits."""
        if not self._state.states:
            return 0
        return int(self._state.states[0][STEPS] - self._state.states[0][SKIP_COUNT])

    def for_one_tensor(self, learned: Mapping[str, Any], number: int) -> "AdaGC":
        """Return a clipper for one tensor, which after warm-up needs nothing of the others.

        Args:
            learned: what ``state_dict`` says of the group that the tensor is in.
            number: of the tensor in that group.
        """
        alone = AdaGC(
            self.lambda_rel,
            self.beta,
            self.lambda_abs,
            self.eps,
            self.warmup_steps,
            self.seed,
            on_nonfinite=self.on_nonfinite,
        )
        own = {name: learned[name] for name in COUNTERS}
        own["gamma"] = learned["gamma"][number : number + 1]
        own["names"] = learned["names"][number : number + 1]
        alone.load_state_dict({"clipper": "AdaGC", "groups": [own]})
        return alone
