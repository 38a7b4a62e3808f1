"""The error a user can mend: what every refusal with a message for him derives from.

Owns the base class and the configuration's own error. The command line prints the message of a UserError and exits 2,
without a traceback; anything else is a bug and keeps its traceback.
"""

from collections.abc import Sequence


class UserError(Exception):
    """The message says what is wrong, where, and what to do."""


class ConfigError(UserError):
    """A configuration that cannot be used; `problems` holds one line for each thing that is wrong with it."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems: list[str] = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return type(self), (self.problems,)
