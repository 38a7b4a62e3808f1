"""install: makes the environment of an inference server, once, and prints its Python."""

from __future__ import annotations

import argparse
import sys

from launcher.planning.devices import visible_gpus
from launcher.servers.install import install


def run(arguments: argparse.Namespace) -> int:
    device = arguments.device or ("cuda" if visible_gpus() else "cpu")
    cache = arguments.cache.expanduser().absolute()
    python = install(
        arguments.backend,
        device,
        cache,
        pip_arguments=arguments.pip.split(),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(python)
    return 0
