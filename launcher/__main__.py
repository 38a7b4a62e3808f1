"""`python -m launcher`: takes the working directory out of sys.path before any import of ours, then runs the CLI.

A user's folder may hold a `core` or `models` of its own; the root of this project comes first.
"""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 (pathlib costs start-up time)
_HERE = os.path.realpath(os.getcwd())  # noqa: PTH109
sys.path[:] = [_ROOT, *(entry for entry in sys.path if os.path.realpath(entry or _HERE) not in (_HERE, _ROOT))]

if __name__ == "__main__":
    try:
        from launcher.cli import main

        status = main(sys.argv[1:])
    except KeyboardInterrupt:  # also while modules are imported
        sys.stderr.write("interrupted\n")
        status = 130
    sys.exit(status)
