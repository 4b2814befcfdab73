"""The sub-commands of ``heal``, one file each.

A command is a module with ``add_arguments(parser)`` and ``run(arguments) -> exit code``; its
docstring is its help. :data:`COMMANDS` names the modules; a command's module is imported only when
it is the one that was called, so that ``heal init`` never waits for torch.
"""

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("heal.commands.demo", "train a small GPT, break it a dozen times, watch it heal"),
    "doctor": ("heal.commands.doctor", "examine checkpoints, settings or the cluster"),
    "drill": ("heal.commands.drill", "break a training run of your own and see how it heals"),
    "forecast": ("heal.commands.forecast", "moved to the repository: python -m tools.forecast"),
    "init": ("heal.commands.init", "print a commented heal.toml"),
    "report": ("heal.commands.report", "show what happened in a run: a page, a text or JSON"),
    "watch": ("heal.commands.watch", "follow a run in the terminal while it trains"),
}
"""Name of the command, its module, one line of help. Add yours in alphabetical order."""
