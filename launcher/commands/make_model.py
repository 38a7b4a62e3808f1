"""`make-model`: starts the role that writes the checkpoint; its flags go through as they are."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(arguments: argparse.Namespace) -> int:
    command = [sys.executable, "-P", "-m", "launcher.roles.make_model", str(arguments.out)]
    if arguments.pictures:
        command += ["--pictures", str(arguments.pictures)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    sizes = ["--help"] if "--sizes" in arguments.sizes else arguments.sizes
    return subprocess.run([*command, *sizes], env=environment, check=False).returncode
