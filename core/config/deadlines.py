"""Section `deadlines` (ours): how long each part of a run may make no progress before it is taken for stuck."""

from typing import Annotated

from pydantic import Field

from core.config.base import Section

Seconds = Annotated[float, Field(gt=0)]


class Deadlines(Section):
    phase: Seconds = 300.0  # of a rank in any other phase; every micro-batch counts as progress
    loading: Seconds = 1800.0  # from a rank's start until its weights and its checkpoint are loaded; and its end
    publishing: Seconds = 900.0
    saving: Seconds = 1800.0
    pause: Seconds = 120.0  # a server that is told to pause or to resume
    load: Seconds = 600.0  # a server that loads a version
    service: Seconds = 60.0  # the data or the rollout service that does not answer its daemon
    daemon: Seconds = 30.0  # a node daemon of which nothing is heard

    def of(self, phase: str) -> float:
        """The deadline of a rank's phase, by the first word of its name."""
        word = phase.split(" ")[0]
        named = {
            "starting": self.loading,
            "loading": self.loading,
            "done": self.loading,
            "publishing": self.publishing,
            "saving": self.saving,
        }
        return named.get(word, self.phase)
