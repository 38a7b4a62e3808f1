"""What can go wrong between two of our processes."""

from __future__ import annotations


class RpcError(Exception):
    """A call was refused (HTTP status) or got no answer (status 0: unreachable, broken off or past its deadline)."""

    def __init__(self, status: int, message: str, url: str = "") -> None:
        super().__init__(f"{url}: {message}" if url else message)
        self.status = status
        self.message = message
        self.url = url

    @property
    def unreachable(self) -> bool:
        return self.status == 0


class PortTakenError(OSError):
    """The address asked for belongs to somebody else."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"port {port} on {host} is taken by another process; ask for port 0 to get a free one")
        self.host = host
        self.port = port
