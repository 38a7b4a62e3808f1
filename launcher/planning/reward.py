"""Can the reward function of a configuration be loaded? It is imported in a child, as the run's reward children do."""

from __future__ import annotations

from pathlib import Path

from core.config import Config
from core.config.checks import BUILT_IN
from core.rewards.loading import load_error
from launcher.planning.problem import Problem
from launcher.slurm.ask import asked

IMPORT_SECS = 20.0
ANYWHERE = (
    "ModuleNotFoundError",
    "SyntaxError",
    "IndentationError",
    "TabError",
    "AttributeError",
    "TypeError",
    "NameError",
)
"""Errors that a module raises on every machine that has the same files. Others may be of a GPU, a driver's library, an
address or a variable that only a node has."""


def reward_findings(config: Config, directory: Path) -> tuple[list[Problem], list[str]]:
    """Problems and warnings; `directory`: where user code is looked for first."""
    if config.type != "rl" or config.reward in BUILT_IN:
        return [], []
    try:
        wrong = load_error(config.reward, directory, seconds=IMPORT_SECS)
    except TimeoutError:
        return [], [f"reward: {config.reward} was not imported within {IMPORT_SECS:g} s, so it was not looked at"]
    if wrong is None:
        return [], []
    text = f"{config.reward} cannot be loaded: {wrong}"
    if own_environment(config):
        return [], [f"reward: {text}; the nodes have an environment of their own, where this may differ"]
    if config.scheduler.type == "slurm" and not wrong.startswith(ANYWHERE):
        return [], [f"reward: {text}; on a node of the training component this may differ"]
    built_in = ", ".join(BUILT_IN)
    return [Problem("reward", f"{text}; it is looked for in {directory} first; built in are {built_in}")], []


def own_environment(config: Config) -> bool:
    """Whether the trainer's nodes import other things than this machine does."""
    if config.scheduler.type != "slurm":
        return any("PYTHONPATH" in spec.env_vars for spec in config.actor.scheduling_spec)
    ask = asked(config, "training")
    specs = any(spec.env_vars for spec in config.actor.scheduling_spec)
    return bool(config.slurm.python or ask.container or ask.modules or ask.setup or ask.env or specs)
