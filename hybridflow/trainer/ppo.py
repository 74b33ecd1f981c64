"""``from hybridflow.trainer.ppo import PPOTrainer``: the class of ``hybridflow.PPOTrainer``."""

from hybridflow import PPOTrainer

__all__ = ["PPOTrainer"]
