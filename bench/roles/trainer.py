"""A trainer rank, on the trainer's core."""

import sys

from bench.roles.pinning import TRAINER_CORE, pin
from launcher.roles.trainer import main

if __name__ == "__main__":
    pin(TRAINER_CORE)
    sys.exit(main())
