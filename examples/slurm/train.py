"""Train with ranks that may be stopped, killed, moved or resized at any time.

python examples/slurm/train.py                          alone
torchrun --nproc-per-node=2 --max-restarts=3 ...        with others, restarted if one dies
sbatch examples/slurm/requeue.sh examples/slurm/train.py
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from heal.cluster import (
    HangWatchdog,
    ReplicaCheck,
    ShutdownHandler,
    check_nccl_health,
    init_process_group,
    log_job_info,
    resolve_resume_path,
)
from heal.exit_codes import ExitCode


def main() -> None:
    """Train a small model; every rank runs this."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--check-every", type=int, default=100)
    parser.add_argument("--run-dir", type=Path, default=Path("run"))
    options = parser.parse_args()

    log_job_info(log=print)
    if "RANK" not in os.environ and "SLURM_PROCID" not in os.environ:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        os.environ.update(alone)
    attempt = init_process_group()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", attempt.local_rank) if on_gpu else torch.device("cpu")

    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = 0
    resumed = resolve_resume_path(options.run_dir)
    if resumed is not None:
        state = torch.load(resumed / "state.pt", weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    if attempt.rank == 0:
        print(f"step {start} of {options.steps}, {attempt.world_size} ranks")

    wrapped = DistributedDataParallel(model)
    replicas = ReplicaCheck(model.named_parameters())
    watchdog = HangWatchdog.for_group(300.0, run_dir=options.run_dir, exit_code=ExitCode.HUNG)
    with ShutdownHandler(shutdown_timeout_sec=100, run_dir=options.run_dir) as shutdown, watchdog:
        for step in range(start, options.steps):
            watchdog.beat(step)
            generator = torch.Generator().manual_seed(step * attempt.world_size + attempt.rank)
            batch = torch.randn(8, 16, generator=generator).to(device)
            optimizer.zero_grad()
            wrapped(batch).square().mean().backward()
            optimizer.step()

            if step % options.check_every == 0:
                replicas.post(step)
                health = check_nccl_health()
                if not health.ok:
                    print(health.reason)
                    raise SystemExit(int(ExitCode.DISTRIBUTED))
            mismatches = replicas.read()
            if mismatches:
                print(*mismatches, sep="\n")
                raise SystemExit(int(ExitCode.REPLICAS_DIFFER))

            stop = shutdown.should_stop()
            if stop or (step + 1) % options.save_every == 0:
                save(options.run_dir, step + 1, model, optimizer, attempt.rank)
            if stop:
                shutdown.exit()
    dist.destroy_process_group()


def save(
    run_dir: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
) -> None:
    """Write what resolve_resume_path finds: a folder per step, and COMMIT last."""
    if rank == 0:
        folder = run_dir / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "state.pt")
        (folder / "COMMIT").touch()


if __name__ == "__main__":
    main()
