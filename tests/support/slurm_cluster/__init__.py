"""A real Slurm cluster of fake nodes with fake GPUs on this machine: munge, controller, a slurmd for each node.

Needs root and Debian's packages. Every node has a hostname (UTS namespace) and, with `netns`, an address and a port
space of its own behind a bridge.
"""
