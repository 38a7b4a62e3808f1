"""The command line: which commands there are and what each may be told.

Owns the arguments and nothing of what commands do: that is `run(arguments) -> int` of launcher.commands.<name>, which
is imported when it is called, so that --help costs nothing. A UserError is printed without a traceback and exits 2.
"""

import argparse
import difflib
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PROGRAM = "python -m launcher"
Arguments = Callable[[argparse.ArgumentParser], None]


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set any key, e.g. actor.optimizer.lr=1e-6")


def _emulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="no GPUs: embedded server, tiny checkpoint, float32, at most two of each side; every swap is printed",
    )


def _sbatch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sbatch", action="store_true", help="print the script of the Slurm job, as submit sends it")


def _yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask, even if the job is not yours")


def _detach(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--detach", action="store_true", help="return as soon as it is started or submitted")


def _roots(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("roots", nargs="*", type=Path, metavar="DIR", help="where runs lie [runs, /tmp/areal]")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory, or experiment/trial")


def _overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change any key of the run's configuration")


def _logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help="go on as lines are written, until the run ends")
    parser.add_argument("-p", "--process", metavar="NAME", help="only this process, e.g. rank-0, server-0, rollout")
    parser.add_argument("-N", "--node", metavar="NAME", help="only this node, e.g. inference-0, training-1")
    parser.add_argument("-n", "--lines", type=int, default=20, metavar="N", help="the last N lines of each file [20]")


def _stacks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stacks", action="store_true", help="have every process write its stacks, and print them")


def _step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step to run again")


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="where the page goes [RUN/report.html]")


def _make_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of the checkpoint (made if missing)")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="also draw the picture sets into DIR")
    parser.add_argument(
        "sizes",
        nargs="*",
        metavar="--size N",
        help="--hidden --layers --heads --kv-heads --intermediate --vocab --vision-depth --vision-hidden "
        "--vision-heads --dtype --shards --seed …; `make-model OUT --sizes` lists them all with their defaults",
    )


def _layouts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layouts", nargs="+", metavar="DIMS", help="d2 t2 c2 d2t2 …, as in the allocation [all that fit 4 ranks]"
    )
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="rows of the training set to compute [8]")
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, metavar="X", help="largest distance in float32, max|a-b|/max|b| [1e-5]"
    )


def _install(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backend", choices=("vllm", "sglang"), help="the server that the environment is for")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="[cuda where this machine has a GPU, else cpu]")
    parser.add_argument(
        "--cache", type=Path, default=Path("~/.cache/vlm-rl"), metavar="DIR", help="paths.cache [~/.cache/vlm-rl]"
    )
    parser.add_argument("--pip", default="", metavar="WORDS", help="for every pip install, e.g. --pip='--no-index'")


@dataclass(frozen=True)
class Command:
    says: str
    example: str
    arguments: tuple[Arguments, ...]
    first: tuple[str, ...] = ()
    """What has to be typed before the example."""


SMOKE = (
    f"with your own CONFIG, first: {PROGRAM} prepare CONFIG (model and dataset, where there is internet),",
    f"                             {PROGRAM} plan CONFIG (what would run where, or why it cannot)",
    f"without GPU or CONFIG:       {PROGRAM} make-model runs/models/tiny --pictures runs/models/pictures",
)
COMMANDS = {
    "prepare": Command(
        "Bring model and dataset into paths.cache, run every row through the real processor, name the bad rows.",
        "prepare configs/qwen2_5_vl_3b_geometry3k_grpo.yaml",
        (_config, _emulate, _json),
    ),
    "plan": Command(
        "Print what would run where, the batch arithmetic and the memory, or why it cannot run. Starts nothing.",
        "plan configs/qwen2_5_vl_3b_geometry3k_grpo.yaml allocation_mode=sglang:d2t2+d4",
        (_config, _emulate, _sbatch, _json),
    ),
    "run": Command(
        "Run here, attached, with a live view. Ctrl-C ends every process of the run.",
        "run --emulate configs/smoke.yaml total_train_steps=3",
        (_config, _emulate, _json),
        SMOKE,
    ),
    "submit": Command(
        "Start detached and print the run directory.",
        "submit --emulate configs/smoke.yaml trial_name=night",
        (_config, _emulate, _json),
        SMOKE,
    ),
    "serve": Command(
        "Start the inference partition alone, say where its servers answer, and stay until Ctrl-C.",
        "serve configs/qwen2_5_vl_3b_geometry3k_grpo.yaml allocation_mode=sglang:d4",
        (_config, _emulate),
    ),
    "status": Command(
        "Say how a run is: phase, step, processes, the last error, and how to go on.",
        "status smoke/trial0",
        (_run, _json),
    ),
    "logs": Command(
        "Print the logs of a run's processes.",
        "logs smoke/trial0 -f --process rank-0",
        (_run, _logs),
    ),
    "cancel": Command(
        "End a run and all of its processes.",
        "cancel smoke/trial0",
        (_run, _yes, _json),
    ),
    "resume": Command(
        "Start a run again from its last checkpoint (on Slurm: submit it again).",
        "resume smoke/trial0 total_train_steps=6",
        (_run, _overrides, _detach, _json),
    ),
    "list": Command(
        "List the runs below a directory and how each is.",
        "list runs",
        (_roots, _json),
    ),
    "report": Command(
        "Write one HTML page about a run: curves, where the time went, sampled answers beside their images.",
        "report quickstart/trial0 --json",
        (_run, _report, _json),
    ),
    "audit": Command(
        "Prove from a run's files that every prompt was trained once, in order, within the staleness bound.",
        "audit smoke/trial0",
        (_run, _json),
    ),
    "why": Command(
        "Say who waits on whom in a run, the last progress of each process, and on request every stack.",
        "why smoke/trial0 --stacks",
        (_run, _stacks, _json),
    ),
    "replay": Command(
        "Run a trainer step again from its logged batch and the checkpoint before it; compare loss and gradient norm.",
        "replay smoke/trial0 --step 3",
        (_run, _step, _json),
    ),
    "verify-parallel": Command(
        "Compute one step of the model on rows of the data under several layouts, and hold each against one process.",
        "verify-parallel configs/smoke.yaml --layouts d2 t2 c2 d2t2",
        (_config, _emulate, _layouts, _json),
    ),
    "install": Command(
        "Make the environment that vLLM or SGLang servers are started with, and print its Python.",
        "install vllm --device cpu",
        (_install,),
    ),
    "make-model": Command(
        "Write a tiny Qwen2.5-VL checkpoint and, if asked for, the picture sets of the quickstart.",
        "make-model runs/models/tiny --pictures runs/models/pictures",
        (_make_model,),
    ),
}


class Parser(argparse.ArgumentParser):
    """Names the option that an unknown one was probably meant to be."""

    def error(self, message: str) -> NoReturn:
        unknown = re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else []
        options = [option for option in self._option_string_actions if option.startswith("--")]
        near = [each for name in unknown for each in difflib.get_close_matches(name, options, n=1)]
        super().error(message + (f"; did you mean {', '.join(near)}?" if near else ""))


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0 if argv else 2
    name, rest = argv[0], list(argv[1:])
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "commands are " + ", ".join(COMMANDS)
        print(f"launcher: there is no command {name!r}; {hint}", file=sys.stderr)
        return 2
    return _call(name, parse(name, rest))


def parse(name: str, rest: list[str]) -> argparse.Namespace:
    """The arguments of a command; options may stand among the key=value."""
    parser = parser_of(name)
    if name == "make-model":
        # the sizes are the role's own flags and go through as they are
        known, sizes = parser.parse_known_args(rest)
        known.sizes = [*known.sizes, *sizes]
        return known
    return parser.parse_intermixed_args(rest)


def parser_of(name: str) -> argparse.ArgumentParser:
    command = COMMANDS[name]
    parser = Parser(
        prog=f"{PROGRAM} {name}",
        description=command.says,
        epilog="\n".join([*command.first, f"example: {PROGRAM} {command.example}"]),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for add in command.arguments:
        add(parser)
    return parser


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        f"usage: {PROGRAM} COMMAND …",
        "",
        "Reinforcement learning of vision-language models, from one YAML file.",
        "",
    ]
    lines += [f"  {name:<{width}}  {command.says}" for name, command in COMMANDS.items()]
    lines += ["", f"`{PROGRAM} COMMAND --help` says more."]
    lines += [f"example: {PROGRAM} plan configs/qwen2_5_vl_3b_geometry3k_grpo.yaml"]
    return "\n".join(lines)


def _call(name: str, arguments: argparse.Namespace) -> int:
    from core.config.errors import UserError

    try:
        command = importlib.import_module(f"launcher.commands.{name.replace('-', '_')}")
        return int(command.run(arguments))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:
        # whoever read our output (head, less) is gone: say nothing, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
