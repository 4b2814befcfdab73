"""Set-ups of several players: GANs, and actors with critics on a toy pendulum."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.healed_runs import Stream
from benchmarks.healthy.guards import Bare
from benchmarks.healthy.objectives import ring
from benchmarks.healthy.problems import F, mlp

Modules = list[nn.Module]
GAN_STEPS, RL_STEPS = 700, 1000


def fused_adam(model: nn.Module, lr: float, beta: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr, betas=(beta, 0.999), fused=True)


def gan(lrs: tuple[float, float], beta: float = 0.9, healers: int = 2) -> Any:
    """Return a GAN on a ring.

    Args:
        lrs: of the generator and of the discriminator.
        beta: of Adam's first moment.
        healers: 2, one for each network, stepped in turn; 1, both networks stepped together.
    """

    def setup(seed: int, guard: Bare) -> Modules:
        torch.manual_seed(seed)
        maker, judge = mlp(8, 2, width=64), mlp(2, 1, width=64)
        optimizers = [fused_adam(maker, lrs[0], beta), fused_adam(judge, lrs[1], beta)]
        stream = Stream(
            GAN_STEPS, lambda s, g: (ring(64, g), torch.randn(64, 8, generator=g)), seed
        )
        train = _in_turn if healers == 2 else _together
        train(guard, maker, judge, optimizers, stream)
        return [maker, judge]

    return setup


def _judge_loss(judge: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()


def _in_turn(guard: Bare, maker: Any, judge: Any, optimizers: Any, stream: Any) -> None:
    of_maker, of_judge = (
        guard.watch(*pair) for pair in zip((maker, judge), optimizers, strict=True)
    )
    for real, noise in of_judge.batches(stream):
        loss = _judge_loss(judge, real, maker(noise).detach())
        loss.backward()
        of_judge.step(loss)
        optimizers[1].zero_grad()
        loss = F.softplus(-judge(maker(noise))).mean()
        loss.backward()
        of_maker.step(loss)
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()


def _together(guard: Bare, maker: Any, judge: Any, optimizers: Any, stream: Any) -> None:
    healer = guard.watch(nn.ModuleList([maker, judge]), optimizers)
    for real, noise in healer.batches(stream):
        fake = maker(noise)
        maker_loss = F.softplus(-judge(fake)).mean()
        maker_loss.backward()
        optimizers[1].zero_grad()
        judge_loss = _judge_loss(judge, real, fake.detach())
        judge_loss.backward()
        healer.step(judge_loss.detach() + maker_loss.detach())
        for optimizer in optimizers:
            optimizer.zero_grad()


class Pendulums:
    """Thirty-two pendulums that start anew every hundred steps; the reward is for standing up."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.count = 0
        self._start()

    def _start(self) -> None:
        self.angle = (2 * torch.rand(32, generator=self.generator) - 1) * math.pi
        self.speed = 2 * torch.rand(32, generator=self.generator) - 1

    def seen(self) -> Tensor:
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed / 8], dim=1)

    def act(self, torque: Tensor) -> Tensor:
        """Move on by one step and return the rewards."""
        cost = self.angle.square() + 0.1 * self.speed.square() + 0.001 * torque.square()
        self.speed = self.speed + 0.05 * (15 * self.angle.sin() + 3 * torque)
        self.speed = self.speed.clamp(-8, 8)
        self.angle = (self.angle + 0.05 * self.speed + math.pi) % (2 * math.pi) - math.pi
        self.count += 1
        if self.count % 100 == 0:
            self._start()
        return -cost

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


class Replay:
    """What pendulums did, drawn again at random."""

    def __init__(self, world: Pendulums) -> None:
        self.world = world
        self.rows: list[Tensor] = []

    def play(self, torque: Tensor) -> None:
        """Let the pendulums move and keep what happened."""
        before = self.world.seen()
        reward = self.world.act(2 * torque.squeeze(1))
        row = [before, torque, 0.1 * reward.unsqueeze(1), self.world.seen()]
        self.rows.append(torch.cat(row, dim=1))

    def sample(self) -> tuple[Tensor, ...]:
        """Return states, torques, rewards and next states."""
        chosen = torch.randint(len(self.rows), (64,), generator=self.world.generator).tolist()
        lanes = torch.randint(32, (64,), generator=self.world.generator).tolist()
        rows = torch.stack([self.rows[i][j] for i, j in zip(chosen, lanes, strict=True)])
        return rows.split([3, 1, 1, 3], dim=1)


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, rate: float = 0.01) -> None:
    """Move a target network a little towards the trained one."""
    for mean, now in zip(slow.parameters(), fast.parameters(), strict=True):
        mean.lerp_(now, rate)


def copy_of(network: nn.Module, *arguments: int) -> nn.Module:
    """Return a target network with the same weights."""
    target = mlp(*arguments).requires_grad_(False)
    target.load_state_dict(network.state_dict())
    return target


def ddpg(lrs: tuple[float, float], healers: int = 2, batches: bool = False) -> Any:
    """Return a deterministic actor with a critic.

    Args:
        lrs: of the actor and of the critic.
        healers: one for each network, or one for both.
        batches: whether the loop draws through the healer's ``batches``.
    """

    def setup(seed: int, guard: Bare) -> Modules:
        torch.manual_seed(seed)
        replay = Replay(Pendulums(seed))
        actor, critic = mlp(3, 1), mlp(4, 1)
        slow_actor, slow_critic = copy_of(actor, 3, 1), copy_of(critic, 4, 1)
        optimizers = [fused_adam(actor, lrs[0]), fused_adam(critic, lrs[1])]
        if healers == 2:
            of_actor = guard.watch(actor, optimizers[0])
            of_critic = guard.watch(critic, optimizers[1])
        else:
            both = guard.watch(nn.ModuleList([actor, critic]), optimizers)

        def stream() -> Iterator[Any]:
            for _ in range(RL_STEPS):
                with torch.no_grad():
                    wish = actor(replay.world.seen()).tanh()
                replay.play((wish + 0.2 * replay.world.noise(32, 1)).clamp(-1, 1))
                yield replay.sample()

        for seen, torque, reward, after in of_critic.batches(stream()) if batches else stream():
            with torch.no_grad():
                then = torch.cat([after, slow_actor(after).tanh()], dim=1)
                aim = reward + 0.98 * slow_critic(then)
            critic_loss = F.mse_loss(critic(torch.cat([seen, torque], dim=1)), aim)
            critic_loss.backward()
            if healers == 2:
                of_critic.step(critic_loss)
                optimizers[1].zero_grad()
            own = optimizers[1].param_groups[0]["params"]
            kept = [p.grad for p in own]
            actor_loss = -critic(torch.cat([seen, actor(seen).tanh()], dim=1)).mean()
            grads = torch.autograd.grad(actor_loss, list(actor.parameters()))
            for param, grad in zip(actor.parameters(), grads, strict=True):
                param.grad = grad
            if healers == 2:
                of_actor.step(actor_loss)
            else:
                for param, grad in zip(own, kept, strict=True):
                    param.grad = grad
                both.step(critic_loss.detach() + actor_loss.detach())
            for optimizer in optimizers:
                optimizer.zero_grad()
            follow(slow_actor, actor)
            follow(slow_critic, critic)
        return [actor, critic, slow_actor, slow_critic]

    return setup


def sac(lr: float) -> Any:
    """Return a random actor with two critics and a temperature, one healer for each network."""

    def setup(seed: int, guard: Bare) -> Modules:
        torch.manual_seed(seed)
        replay = Replay(Pendulums(seed))
        actor, critics = mlp(3, 2), nn.ModuleList([mlp(4, 1), mlp(4, 1)])
        targets = [copy_of(critic, 4, 1) for critic in critics]
        optimizers = [fused_adam(actor, lr), fused_adam(critics, lr)]
        of_actor = guard.watch(actor, optimizers[0])
        of_critics = guard.watch(critics, optimizers[1])
        heat = 0.05

        def act(seen: Tensor) -> tuple[Tensor, Tensor]:
            mean, log_spread = actor(seen).chunk(2, dim=1)
            spread = log_spread.clamp(-4, 1).exp()
            noise = replay.world.noise(len(seen), 1)
            torque = (mean + spread * noise).tanh()
            density = -0.5 * noise.square() - spread.log() - (1 - torque.square() + 1e-6).log()
            return torque, density

        for _ in range(RL_STEPS):
            with torch.no_grad():
                replay.play(act(replay.world.seen())[0])
            seen, torque, reward, after = replay.sample()
            with torch.no_grad():
                wish, density = act(after)
                then = torch.cat([after, wish], dim=1)
                aim = reward + 0.98 * (
                    torch.minimum(*(target(then) for target in targets)) - heat * density
                )
            pair = torch.cat([seen, torque], dim=1)
            loss = sum(F.mse_loss(critic(pair), aim) for critic in critics)
            loss.backward()
            of_critics.step(loss)
            optimizers[1].zero_grad()
            wish, density = act(seen)
            pair = torch.cat([seen, wish], dim=1)
            loss = (heat * density - torch.minimum(*(critic(pair) for critic in critics))).mean()
            loss.backward()
            of_actor.step(loss)
            for optimizer in optimizers:
                optimizer.zero_grad()
            for target, critic in zip(targets, critics, strict=True):
                follow(target, critic)
        return [actor, critics, *targets]

    return setup


SETUPS = {
    "GAN, a healer each, 1e-3/1e-3": gan((1e-3, 1e-3)),
    "GAN, a healer each, 1e-4/4e-4": gan((1e-4, 4e-4)),
    "GAN, a healer each, 2e-4, beta 0.5": gan((2e-4, 2e-4), beta=0.5),
    "GAN, a healer each, 3e-3/1e-3": gan((3e-3, 1e-3)),
    "GAN, one healer, 1e-3/1e-3": gan((1e-3, 1e-3), healers=1),
    "GAN, one healer, 1e-4/4e-4": gan((1e-4, 4e-4), healers=1),
    "GAN, one healer, 2e-4, beta 0.5": gan((2e-4, 2e-4), beta=0.5, healers=1),
    "DDPG, a healer each": ddpg((1e-3, 1e-3)),
    "DDPG, a healer each, batches()": ddpg((1e-3, 1e-3), batches=True),
    "DDPG, a healer each, slow actor": ddpg((1e-4, 1e-3)),
    "DDPG, one healer": ddpg((1e-3, 1e-3), healers=1),
    "SAC, a healer each, 1e-3": sac(1e-3),
    "SAC, a healer each, 3e-4": sac(3e-4),
}
