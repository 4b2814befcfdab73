"""Other people's loops: Hugging Face accelerate and Lightning."""

import torch

import zclip
from tests.models import make_model


def batches(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 5, generator=generator) for _ in range(count)]


def test_accelerate_wraps_the_wrapper():
    import accelerate

    runs = []
    for accelerated in (False, True):
        model = make_model()
        optimizer = zclip.wrap(torch.optim.AdamW(model.parameters(), fused=True), warmup_steps=2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        backward = torch.Tensor.backward
        if accelerated:
            accelerator = accelerate.Accelerator(cpu=True)
            model, used, schedule = accelerator.prepare(model, optimizer, schedule)
            backward = accelerator.backward
        else:
            used = optimizer
        for batch in batches(5):
            backward(model(batch).square().mean())
            used.step()
            schedule.step()
            used.zero_grad()
        assert optimizer.metrics()["zclip/total_skips"] == 0
        assert used.state_dict()["zclip"]["groups"][0]["steps"] == 5
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


def test_the_lightning_callback_clips_and_is_saved(tmp_path):
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(steps, checkpoint=None):
        callback = zclip.ZClipLightningCallback(warmup_steps=3, max_grad_norm=0.5)
        trainer = lightning.Trainer(
            max_steps=steps,
            callbacks=[callback],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        loader = torch.utils.data.DataLoader(torch.cat(batches(8)), batch_size=4)
        trainer.fit(Module(), loader, ckpt_path=checkpoint)
        return trainer, callback

    trainer, callback = fit(4)
    assert callback.zclip.initialized
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    _, resumed = fit(4, tmp_path / "run.ckpt")
    assert resumed.zclip.mean == callback.zclip.mean
    _, longer = fit(6, tmp_path / "run.ckpt")
    assert float(longer.zclip.state_dict()["groups"][0]["steps"]) == 6
