"""The process of a vLLM or SGLang server, or of one node's part of it: started in a private directory, ended whole.

Owns the process, its environment, and what it leaves behind; when it is ready, and who may ask it, is process.py's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from core.inference.belongings import ServerDirectory, segments, unlink
from core.inference.commands import Launch

_END_SECS = 12.0
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")


class ServerChild:
    """One start; the output goes to `log` (None: this process's own)."""

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        self._log_offset = log.stat().st_size if log is not None and log.exists() else 0
        self._directory = ServerDirectory()
        self._segments: set[str] = set()
        self.process: asyncio.subprocess.Process | None = None

    @property
    def directory(self) -> Path:
        return self._directory.path

    async def start(self, launch: Launch) -> None:
        output = self._log.open("ab") if self._log else None
        try:
            self.process = await asyncio.create_subprocess_exec(
                *launch.argv,
                env=environment({**launch.env, "TMPDIR": str(self.directory)}),
                stdout=output,
                stderr=output,
            )
        finally:
            if output is not None:
                output.close()

    async def note_segments(self) -> None:
        if self.process is not None:
            self._segments |= await asyncio.to_thread(segments, self.process.pid)

    def said(self) -> str:
        """The end of what this start has written."""
        if self._log is None:
            return ""
        return self._log.read_bytes()[self._log_offset :][-3000:].decode("utf-8", "replace")

    async def stop(self) -> None:
        """TERM, then KILL; whatever it has started beyond that is the guard's."""
        if self.process is not None and self.process.returncode is None:
            await self.note_segments()
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), _END_SECS)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()
        unlink(self._segments)
        self._directory.remove()


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """This process's, without what would lead another Python to our packages, with the server's on top."""
    kept = {key: value for key, value in os.environ.items() if key not in _DROPPED}
    # it is below TMPDIR otherwise, which is the server's own and goes with it
    return {COMPILED: str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}")} | kept | dict(own)
