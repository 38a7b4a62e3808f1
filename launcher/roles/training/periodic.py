"""When something that happens every so often is due: by epochs, steps or seconds, whichever comes first.

Owns the reading of freq_epochs, freq_steps and freq_secs; epochs and steps are absolute, so that a resumed run and a
changed frequency need no state but the clock of freq_secs, which a checkpoint holds.
"""

from __future__ import annotations

import time
from typing import Any


class Periodic:
    """One timer of the configuration (saver, recover, evaluator)."""

    def __init__(self, section: Any, steps_per_epoch: int) -> None:
        self.freq_epochs: int | None = section.freq_epochs
        self.freq_steps: int | None = section.freq_steps
        self.freq_secs: float | None = section.freq_secs
        self.steps_per_epoch = max(1, steps_per_epoch)
        self._last = time.monotonic()

    @property
    def ever(self) -> bool:
        """Whether any frequency is set."""
        return any(value is not None for value in (self.freq_epochs, self.freq_steps, self.freq_secs))

    def due(self, step: int) -> bool:
        """Whether it is time after this step. The seconds start anew when it is."""
        epochs, into_epoch = divmod(step, self.steps_per_epoch)
        by_epoch = self.freq_epochs is not None and epochs > 0 and into_epoch == 0 and epochs % self.freq_epochs == 0
        by_step = self.freq_steps is not None and step % self.freq_steps == 0
        by_time = self.freq_secs is not None and time.monotonic() - self._last >= self.freq_secs
        if by_epoch or by_step or by_time:
            self._last = time.monotonic()
            return True
        return False

    def clock(self) -> float:
        """Seconds since it was last due, for a checkpoint."""
        return time.monotonic() - self._last

    def set_clock(self, secs: float) -> None:
        """As before the restart."""
        self._last = time.monotonic() - secs
