"""Which validation was the best so far, and how long ago that was. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.config.recipe import Recipe

if TYPE_CHECKING:
    from hybridflow.checkpoint.store import Checkpoint


@dataclass
class Validations:
    """What is known of a run's validations, the same on every rank; a checkpoint keeps all of it.

    Attributes:
        step: Training steps before the last one; None: there was none.
        score: Its result: mean score; of preferences the share of pairs in the right order; of SFT that scores no
            responses, the loss, where less is better.
        result: What it is called: a key of ``observe.metrics.RESULTS``.
        best_step: Training steps before the best one, the first of equals.
        best_score: Result of the best validation.
        num_since_best: How many came after the best.
    """

    step: int | None = None
    score: float | None = None
    result: str = "score"
    best_step: int | None = None
    best_score: float | None = None
    num_since_best: int = 0

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, recipe: Recipe) -> Validations:
        """Return the validations of a checkpoint, without a best one that means something else in this recipe."""
        names = {each.name for each in fields(cls)}
        found = cls(**{name: value for name, value in checkpoint.state.get("validations", {}).items() if name in names})
        saved, now = checkpoint.state["recipe"], recipe.trainer
        files = (saved["data"]["held_out"], recipe.data.held_out)
        sources = {None if file is None else Path(file).resolve() for file in files}
        is_loss = recipe.traits.imitates and not recipe.scores_held_out
        has_other_result = found.step is not None and (found.result == "loss") is not is_loss
        if saved["trainer"]["num_validation"] != now.num_validation or len(sources) > 1 or has_other_result:
            # Scores of other problems do not compare, nor does a score with a loss.
            return cls()
        if now.keep_best and not saved["trainer"]["keep_best"]:
            found.restart(checkpoint.step)
        return found

    def take(self, step: int, score: float, *, result: str = "score", is_learning: bool = True) -> None:
        """Count a validation. One of a step that was validated before, after a resume, does not count.

        Args:
            step: Training steps before it.
            score: Its result.
            result: What it is called.
            is_learning: Whether the actor learns yet; until then nothing can become better.
        """
        if self.step is not None and step <= self.step:
            return
        self.step, self.score, self.result = step, score, result
        sign = -1 if result == "loss" else 1
        if self.best_score is None or sign * score > sign * self.best_score:
            self.best_step, self.best_score, self.num_since_best = step, score, 0
        else:
            self.num_since_best += is_learning

    def restart(self, step: int) -> None:
        """Forget the best validation: its checkpoint may be gone.

        Args:
            step: Step of a checkpoint that is there. If the last validation was its, that is the best from now on.
        """
        is_validated = self.step == step
        self.best_step, self.best_score = (step, self.score) if is_validated else (None, None)
        self.num_since_best = 0
