"""Stands in for the role `trainer`."""

import sys

from tests.node.roles.fake import main

if __name__ == "__main__":
    main(sys.argv[1:])
