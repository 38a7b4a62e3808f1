"""Process `rank-<n>`: one rank of the training partition, for `type: rl` and `type: sft`.

Owns start, end and what a signal does; the loops are launcher.roles.training.rl and .sft.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from launcher.node.specs import CANNOT_GO_ON
from launcher.roles.arguments import parse
from launcher.roles.training.exchange import StopRequested
from launcher.roles.training.metrics import Record
from launcher.roles.training.parity import ParityError
from launcher.roles.training.recovery import ConfigChangedError
from launcher.roles.training.rl import DivergedError, RLLoop
from launcher.roles.training.setup import close_session, open_session
from launcher.roles.training.sft import SFTLoop

STOPPED = 3  # asked to stop before the end: not an error, and not finished
FOR_GOOD = (ParityError, DivergedError, ConfigChangedError)
"""Ranks that start again from the checkpoint would come to the same."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    session = open_session(arguments)
    board = session.config.stats_logger.tensorboard.path
    record = Record(arguments, writes=session.is_first, tensorboard=board)
    loop = (SFTLoop if session.config.type == "sft" else RLLoop)(session, record)
    try:
        loop.run()
    except StopRequested as request:
        record.phase("stopping")
        done = loop.recovery.save_on_stop(loop.progress, whole=loop.whole)
        record.note("info", f"stopped by {request} after step {loop.progress.step}: {done}")
        record.close()
        return STOPPED
    record.close()
    close_session(session)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        status = CANNOT_GO_ON if isinstance(error, FOR_GOOD) else 1
        os._exit(status)  # threads of a broken process group would keep the interpreter from ending
