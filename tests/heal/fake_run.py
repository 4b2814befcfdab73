"""A run that writes down what is done to it."""


class FakeRun:
    def __init__(self, snapshots=(), lr_scale=1.0, halvings=3, can_checkpoint=True):
        self.step, self.lr_scale, self.micro_batches = 100, lr_scale, 1
        self.done = []
        self.corrupt = None
        self._snapshots = sorted(snapshots, reverse=True)
        self._halvings = halvings
        self._can_checkpoint = can_checkpoint

    def snapshots(self):
        return list(self._snapshots)

    def restore(self, step):
        self.done.append(("restore", step))
        self.step = step

    def corruption(self, is_shared, with_frozen):
        return self.corrupt

    def whereabouts(self, step, with_samples):
        return {}

    def data_fault(self, step):
        return None

    def scale_lr(self, factor, floor, ramp_steps):
        self.done.append(("scale_lr", factor))
        self.lr_scale = max(self.lr_scale * factor, floor)

    def hold_lr(self, limit):
        self.done.append(("hold_lr", limit))

    def tighten_clip(self, factor):
        self.done.append(("tighten_clip", factor))

    def relearn_clip(self):
        self.done.append(("relearn_clip",))

    def skip_batches(self, first_step, last_step):
        self.done.append(("skip_batches", first_step, last_step))

    def shrink_micro_batch(self):
        if not self._halvings:
            return False
        self._halvings -= 1
        self.micro_batches *= 2
        return True

    def checkpoint_activations(self):
        able, self._can_checkpoint = self._can_checkpoint, False
        return able

    def clear_cache(self):
        self.done.append(("clear_cache",))

    def sleep(self, seconds):
        self.done.append(("sleep", seconds))

    def take_snapshot(self):
        self.done.append(("take_snapshot",))
        return True

    def watch_closely(self, steps):
        self.done.append(("watch_closely", steps))

    def perturb_weights(self, std, seed):
        self.done.append(("perturb_weights", std, seed))

    def anchor_weights(self, strength, steps):
        self.done.append(("anchor_weights", strength, steps))
        return True
