"""Which cases a run consists of: the standard ones, the sweeps, or what the user asked for."""

from itertools import product

from zclip.bench.catalogue import OPS, RULES, Case
from zclip.bench.gradients import NORMAL, VALUES
from zclip.bench.rules import LIMIT_OF
from zclip.bench.shapes import BYTES, TENSORS

STANDARD = [
    Case("clip_grad_norm_", "gpt2-small"),
    Case("clip_grad_norm_", "gpt2-small", clips=True),
    Case("clip_grad_norm_", "gpt2-small", "bfloat16"),
    Case("clip_grad_norm_", "gpt2-medium", "bfloat16"),
    Case("clip_grad_norm_", "llama-8b-block", "bfloat16"),
    Case("clip_grad_norm_", "vit-b"),
    Case("clip_grad_norm_", "resnet-50"),
    Case("clip_grad_norm_", "moe-10000"),
    Case("clip_grad_norm_", "2000-small"),
    Case("clip_grad_value_", "gpt2-small"),
    Case("grad_stats", "98m-in-150"),
    *(Case("grad_stats", "98m-in-150", values=values) for values in VALUES if values != NORMAL),
    Case("flags", "98m-in-150"),
    Case("scale_", "gpt2-small"),
    Case("fingerprint", "98m-in-150"),
    *(Case("rule", "gpt2-small", rule=rule) for rule in RULES),
    Case("rule", "2000-small", rule="zclip"),
    Case("rule", "2000-small", rule="adagc"),
    Case("step", "gpt2-small"),
]

QUICK = [
    Case("clip_grad_norm_", "vit-b"),
    Case("clip_grad_norm_", "resnet-50", clips=True),
    Case("clip_grad_norm_", "resnet-50", "bfloat16"),
    Case("clip_grad_norm_", "2000-small"),
    Case("grad_stats", "resnet-50"),
    Case("flags", "resnet-50"),
    Case("rule", "resnet-50", rule="zclip"),
    Case("rule", "resnet-50", rule="adagc"),
]
"""Small enough that setting up costs little; the same kinds of work."""


def sweeps(quick: bool) -> list[Case]:
    """Return the points of the two curves: more bytes, and more tensors of the same bytes."""
    sizes = [1_000_000, 16_000_000] if quick else [10**n for n in range(4, 9)] + [400_000_000]
    counts = [10, 1000] if quick else [1, 10, 100, 1000, 10_000]
    return [
        *(Case("clip_grad_norm_", f"{BYTES}{size}") for size in sizes),
        *(Case("clip_grad_norm_", f"{TENSORS}{count}") for count in counts),
    ]


def is_sweep(shapes: str) -> bool:
    """Return whether shapes are a point of a curve, not a row of the table."""
    return shapes.startswith((BYTES, TENSORS))


def crossed(
    ops: list[str],
    shapes: list[str],
    dtypes: list[str],
    rules: list[str],
    clipped: bool,
    values: str = NORMAL,
) -> list[Case]:
    """Return every combination that makes sense.

    Raises:
        ValueError: none does; says why.
    """
    cases = []
    for op, shape, dtype in product(ops, shapes, dtypes):
        for rule in rules if OPS[op].has_rules else [None]:
            if not clipped:
                cases.append(Case(op, shape, dtype, rule, values=values))
            elif OPS[op].may_clip and (rule is None or rule in LIMIT_OF):
                cases.append(Case(op, shape, dtype, rule, clips=True, values=values))
    if not cases:
        named = ", ".join(ops + rules)
        can = ", ".join([name for name, op in OPS.items() if op.may_clip and not op.has_rules])
        raise ValueError(
            f"--clipped: expected --op {can}, or --op rule with --rule {', '.join(LIMIT_OF)}, "
            f"got {named}, which cannot be made to clip every time"
        )
    return cases
