"""The demonstration: a small GPT is broken a dozen times while it trains, and heals.

It is trained three times from one seed: undisturbed; with faults and no protection, until that
dies; and with the same faults under a Healer.
"""

import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from heal.config import HealingConfig
from heal.healer import Healer
from heal.testing import Chaos, Fault
from heal.testing.drill import COLUMNS, Drill, Outcome, standard_faults

CONTEXT = 64
WIDTH = 64
HEADS = 4
BLOCKS = 2
BATCH = 16
TEXT_LENGTH = 200_000  # characters; more are not needed for a few hundred steps


class Gpt(nn.Module):
    """A small transformer over characters: pre-norm blocks, tied embeddings."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(alphabet, WIDTH)
        self.place = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for the character after each one."""
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.norm(x) @ self.embed.weight.t()
        return logits

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next character, in nats."""
        logits = self(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def snippets() -> tuple[Any, int]:
    """Return rows of the language reference that ships with Python, and the size of its alphabet.

    Each row has the numbers of one character more than the context, the last of which only ends it.
    """
    from pydoc_data import topics

    pages: dict[str, str] = topics.topics
    text = "".join(pages[name] for name in sorted(pages))[:TEXT_LENGTH]
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[character] for character in text])
    return tokens.unfold(0, CONTEXT + 1, CONTEXT), len(number)


def build(seed: int, steps: int) -> tuple[Gpt, torch.optim.Optimizer, Any, Any]:
    """Return model, optimizer, scheduler and loader, all from one seed."""
    torch.manual_seed(seed)
    rows, alphabet = snippets()
    model = Gpt(alphabet)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * steps)
    loader = DataLoader(rows, batch_size=BATCH, shuffle=True, drop_last=True)
    return model, optimizer, scheduler, loader


@torch.no_grad()
def evaluate(model: Gpt, loader: Any, batches: int = 20) -> float:
    """Return the mean loss over some batches that are the same in every call."""
    tokens = loader.dataset[: batches * BATCH]
    return sum(float(model.loss(part)) for part in tokens.split(BATCH)) / batches


PLOT = "healing.png"
FAULT_WIDTH = 10  # the longest word in the name of a fault


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What the demonstration found."""

    outcomes: list[Outcome]
    num_not_struck: int
    healed_loss: float
    undisturbed_loss: float
    unprotected: str


def settings() -> HealingConfig:
    """Return settings for a run of minutes: everything happens closer together than in weeks."""
    return HealingConfig(
        max_recovery_attempts=30,
        incident_steps=12,
        snapshot_interval=10,
        snapshot_memory_factor=4.0,
        quarantine_steps=4,
        check_interval=5,
        lr_ramp_steps=20,
    )


def demonstrate(
    steps: int, seed: int, run_dir: Path, console: Console, progress: bool = True
) -> Demonstration:
    """Run all three, print what happens, and write journal and plot to ``run_dir``."""
    began = time.monotonic()
    faults = standard_faults(steps)

    def trained(faults: list[Fault], run_dir: Path | None) -> tuple[Drill, float, float]:
        model, optimizer, scheduler, loader = build(seed, steps)
        given = model, optimizer, scheduler, settings()
        # Half a second in place of thirty: a viewer would not wait so long.
        healer = Healer(*given, run_dir=run_dir, sleep=lambda seconds: time.sleep(seconds / 60))
        drill, first = Drill(healer, faults, seed), evaluate(model, loader)
        drill.run(model.loss, loader, steps, progress)
        return drill, first, evaluate(model, loader)

    console.rule("undisturbed")
    calm, first, undisturbed = trained([], None)
    console.rule("the same faults, no protection")
    unprotected = _without_protection(steps, seed, faults)
    console.print(unprotected)
    console.rule(f"{len(faults)} faults, healed")
    drill, _, healed = trained(faults, run_dir)
    console.print(outcome_table(drill.outcomes))
    table = Table(title="loss on the same text, in nats per character")
    for name in ("before training", "undisturbed", "healed", "unprotected"):
        table.add_column(name)
    table.add_row(f"{first:.3f}", f"{undisturbed:.3f}", f"{healed:.3f}", unprotected)
    console.print(table)
    seconds = time.monotonic() - began
    console.print(f"{seconds:.0f} seconds in all; waits are shortened to a sixtieth")
    console.print(_plot(run_dir / PLOT, calm, drill))
    console.print(f"the whole run on one page: heal report {run_dir}", soft_wrap=True)
    return Demonstration(drill.outcomes, len(drill.not_struck), healed, undisturbed, unprotected)


def outcome_table(outcomes: list[Outcome]) -> Table:
    """Return the table of faults: when each was detected, what was done, what it cost.

    Made to be read at 80 columns: names are cut at their underscores, never within a word.
    """
    table = Table(title="faults and their cures", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(COLUMNS[0], overflow="fold", min_width=FAULT_WIDTH)
    for name in COLUMNS[1:]:
        if name in ("diagnosis", "action"):
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*(cell.replace("_", " ") for cell in outcome.row()))
    table.add_section()
    lost = sum(outcome.lost_steps for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    table.add_row("all", "", "", "", "", str(lost), f"{seconds:.2f}")
    return table


def _without_protection(steps: int, seed: int, faults: list[Fault]) -> str:
    """Train the bare loop until a fault ends it; return how."""
    model, optimizer, scheduler, loader = build(seed, steps)
    bystander = Healer(model, optimizer, scheduler, settings())  # chaos needs one
    bystander.exits.dismiss()
    chaos = Chaos(bystander, faults, seed)
    train_step, broken = chaos.wrap(model.loss), chaos.wrap_loader(loader)
    epochs = (batch for _ in itertools.count() for batch in broken)
    step = 0
    try:
        for step, batch in enumerate(itertools.islice(epochs, steps)):
            optimizer.zero_grad()
            loss = train_step(batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if not math.isfinite(float(loss.detach())):
                return f"every loss is NaN from step {step} on"
        return f"reached step {steps}"
    except Exception as error:
        return f"died at step {step}: {type(error).__name__}"


def _plot(path: Path, calm: Drill, drill: Drill) -> str:
    """Draw both losses and the faults; return where the plot is, or why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install 'zclip-heal[plot]')"
    figure = Figure(figsize=(10, 5))
    axes = figure.add_subplot()
    for name, one in (("undisturbed", calm), ("healed", drill)):
        losses = [(attempt, float(loss)) for attempt, loss in one.losses]
        axes.plot(*zip(*losses, strict=True), label=name, linewidth=1)
        finite = [loss for _, loss in losses if math.isfinite(loss)]
        axes.set_ylim(min(finite) - 0.1, 1.1 * finite[0])  # some faults go through the roof
    for outcome in drill.outcomes:
        at, kind = outcome.strike.attempt, outcome.strike.fault.kind
        axes.axvline(at, color="gray", linewidth=0.5)
        style: Any = {"rotation": 90, "va": "top", "ha": "right", "fontsize": 7, "color": "gray"}
        axes.annotate(kind, (at, 1), xycoords=("data", "axes fraction"), **style)
    axes.set_xlabel("attempted steps")
    axes.set_ylabel("loss, nats per character")
    axes.legend(loc="upper right")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except OSError as error:
        return f"no plot: {error}"
    return f"plot and journal: {path.parent}"


def quiet_threads() -> None:
    """Use no more threads than a model of this size can feed."""
    torch.set_num_threads(min(2, torch.get_num_threads()))


def console_for(plain: bool) -> Any:
    """Return a console; plain for logs, where no terminal would be."""
    return Console(force_terminal=False, width=140) if plain else Console()
