"""`python -m tests.support.slurm_cluster start|stop ROOT`: a Slurm of fake nodes and GPUs on this machine; as root.

`eval "$(python -m tests.support.slurm_cluster start /tmp/slurm)"`, then sinfo, sbatch and the launcher find it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.support.slurm_cluster.cluster import make

parser = argparse.ArgumentParser(
    prog="python -m tests.support.slurm_cluster",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
parser.add_argument("act", choices=("start", "stop"))
parser.add_argument("root", type=Path, help="a directory of its own, made at start and removed at stop")
parser.add_argument("--no-accounting", action="store_true", help="without slurmdbd: no sacct")
parser.add_argument("--netns", action="store_true", help="each node in a network namespace of its own")
arguments = parser.parse_args()
cluster = make(arguments.root.absolute(), accounting=not arguments.no_accounting, netns=arguments.netns)
if arguments.act == "start":
    cluster.start()
    cluster.hand_over()
    print(f"export SLURM_CONF={cluster.root}/conf/slurm.conf")
else:
    cluster.take_over()
    cluster.stop()
