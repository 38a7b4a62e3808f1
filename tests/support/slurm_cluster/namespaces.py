"""Network namespaces behind a bridge, one for each node: an address and a port space of its own."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Namespaces:
    prefix: str
    subnet: str
    count: int

    def name(self, index: int) -> str:
        return f"{self.prefix}{index}"

    def address(self, index: int) -> str:
        return f"{self.subnet}.{index}"

    @property
    def gateway(self) -> str:
        """Of this machine on the bridge."""
        return f"{self.subnet}.254"

    def inside(self, index: int) -> list[str]:
        """Words before a command; not `ip netns exec`, which hides /sys/fs/cgroup."""
        return ["nsenter", f"--net=/run/netns/{self.name(index)}"]

    def unplug(self, index: int) -> None:
        """Packets to and from it are lost, without an answer."""
        _ip("link", "set", f"{self.prefix}v{index}", "down")

    def plug(self, index: int) -> None:
        _ip("link", "set", f"{self.prefix}v{index}", "up")

    def make(self) -> None:
        self.remove()  # of a test that was killed
        bridge = f"{self.prefix}br"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for index in range(1, self.count + 1):
            space, link = self.name(index), f"{self.prefix}v{index}"
            _ip("netns", "add", space)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", link, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def remove(self) -> None:
        for index in range(1, self.count + 1):
            _ip("netns", "del", self.name(index), check=False)
            # a process that is left keeps the namespace, and with it the other end
            _ip("link", "del", f"{self.prefix}v{index}", check=False)
        _ip("link", "del", f"{self.prefix}br", check=False)


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, timeout=20, capture_output=True)
