"""Which validation was the best so far, and how long ago that was. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Validations:
    """What is known of a run's validations, the same on every rank; a checkpoint keeps all of it.

    Attributes:
        step: Training steps before the last one; None: there was none.
        accuracy: Accuracy of the last validation.
        best_step: Training steps before the best one, the first of equals.
        best_accuracy: Accuracy of the best validation.
        num_since_best: How many came after the best.
    """

    step: int | None = None
    accuracy: float | None = None
    best_step: int | None = None
    best_accuracy: float | None = None
    num_since_best: int = 0

    def take(self, step: int, accuracy: float) -> None:
        """Count a validation. One of a step that was validated before, after a resume, does not count."""
        if self.step is not None and step <= self.step:
            return
        self.step, self.accuracy = step, accuracy
        if self.best_accuracy is None or accuracy > self.best_accuracy:
            self.best_step, self.best_accuracy, self.num_since_best = step, accuracy, 0
        else:
            self.num_since_best += 1
