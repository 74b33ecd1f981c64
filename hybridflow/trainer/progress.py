"""How far a job has come: the steps done, the next prompt, the validations."""

from __future__ import annotations

from hybridflow.config.recipe import Recipe
from hybridflow.trainer.validations import Validations


class Progress:
    """The steps that a job has done; the same on all ranks.

    Attributes:
        step: Training steps done.
        next_prompt_index: Index of the first prompt that no step has used.
        num_prompts: Prompts of a step.
        validations: Results of the validations.
        saved_step: Step of the newest checkpoint; None: there is none.
        is_save_overdue: Whether the newest checkpoint is too old, as the lowest rank knew at the end of the last step.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.step = 0
        self.next_prompt_index = 0
        self.num_prompts = recipe.trainer.global_batch_size // recipe.samples_per_prompt
        self.validations = Validations()
        self.saved_step: int | None = None
        self.is_save_overdue = False
        self._recipe = recipe

    @property
    def is_out_of_patience(self) -> bool:
        """Return whether training ends because validations have not improved for long."""
        return 0 < self._recipe.trainer.patience <= self.validations.num_since_best

    @property
    def num_critic_steps(self) -> int:
        """Return how many of the first steps only the critics learn in."""
        critics = (self._recipe.critic, self._recipe.cost_critic)
        return max((each.warmup_steps for each in critics if each is not None), default=0)

    def is_critic_alone(self, step: int) -> bool:
        """Return whether a step is one of the first, in which only the critics learn."""
        return step <= self.num_critic_steps
