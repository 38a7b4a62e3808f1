"""Another user of the machine, as far as a test can be one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

NOBODY = 65534


def as_nobody(action: Callable[[], Any]) -> Any:
    """Its JSON result, from a process of another uid (of the same one where this is not root: then only the token
    stands between them)."""
    "localhost".encode("idna")  # the other user cannot read this Python's library: what it needs is loaded before
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os.write(writer, json.dumps(action()).encode())
        except BaseException as error:
            os.write(writer, json.dumps({"failed": repr(error)}).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read()
    os.waitpid(pid, 0)
    return json.loads(said)
