"""What the features are called, and what each says of a run."""

ABOUT: dict[str, str] = {
    "loss_rise": "Mean loss of 8 steps above that of 32, in deviations of its noise.",
    "loss_climb": "Mean loss of 32 steps above that of 128, in deviations of its noise.",
    "loss_undone": "Share of what was learned since the start that the last 8 steps have lost.",
    "loss_trend": "How many more of the last 16 steps raised the mean of 8 than lowered it.",
    "loss_curvature": "Rise of late minus climb before it, in deviations of the noise.",
    "loss_volatility": "Log of the step-to-step noise of 10 steps over that of 100.",
    "loss_autocorrelation": "Correlation of a loss's residual with the one before; -1: zigzag.",
    "loss_reversals": "Share of the last 16 steps that turned round, less the 2/3 of pure noise.",
    "loss_leap": "The largest rise of one step of late, in deviations: a leap is no climb.",
    "norm_growth": "Log of the gradient norm: mean of 8 steps above that of 128.",
    "norm_rate": "Log of the gradient norm: mean of 8 steps above that of 32.",
    "norm_record": "Log of the gradient norm: mean of 8 steps above the highest of 32 ever.",
    "norm_volatility": "Log of the noise of the log norm, 10 steps over 100.",
    "z_run": "Log of how many steps in a row had a norm more than one deviation above usual.",
    "clip_rate": "Share of clipped steps: of the last 16 less of the last 128.",
    "refused_rate": "Share of refused steps among the last 32.",
    "lr_ratio": "Log of the learning rate over its mean of 128 steps.",
    "lr_growth": "Growth of the learning rate per step, in percent, mean of 16.",
    "lr_beyond": "Log of the learning rate over its highest mean of 32 steps.",
    "lr_leap": "The largest rise of the log rate in one step of late: a jump is no growth.",
    "lr_override": "Log of the learning rate over the scheduled one, where that is known.",
    "lr_climb": "Log of the learning rate over the highest that was not exceeded for 30 steps.",
    "lr_swing": "How much the learning rate goes to and fro, in percent a step, mean of 16.",
    "update_ratio": "Log of update over weight, rate x clipped norm / weights' norm, 8 above 128.",
    "weight_rate": "Growth of the weights' norm per step, between the last two checks.",
    "weight_surge": "Log of that growth over what it usually is.",
    "weight_growth": "Log of the weights' norm over its mean of 128 steps.",
    "throughput": "Log of the seconds per step, 8 over 128. Not in the corpus: in no model.",
}
"""Every feature, in order, with its meaning."""

NAMES = tuple(ABOUT)
