"""`python -m tests.support.slurm_cluster start|stop ROOT [--no-accounting] [--netns]`: a cluster to try things on."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.support.slurm_cluster.cluster import make

parser = argparse.ArgumentParser()
parser.add_argument("act", choices=("start", "stop"))
parser.add_argument("root", type=Path)
parser.add_argument("--no-accounting", action="store_true")
parser.add_argument("--netns", action="store_true")
arguments = parser.parse_args()
cluster = make(arguments.root.absolute(), accounting=not arguments.no_accounting, netns=arguments.netns)
if arguments.act == "start":
    cluster.start()
    cluster.hand_over()
    print(f"export SLURM_CONF={cluster.root}/conf/slurm.conf")
else:
    cluster.take_over()
    cluster.stop()
