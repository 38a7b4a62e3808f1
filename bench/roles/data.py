"""The data service, on the server's core."""

import sys

from bench.roles.pinning import SERVER_CORE, pin
from launcher.roles.data import main

if __name__ == "__main__":
    pin(SERVER_CORE)
    sys.exit(main())
