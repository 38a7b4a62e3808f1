"""Environments of inference servers: what is in them, where they are, how they are made."""
