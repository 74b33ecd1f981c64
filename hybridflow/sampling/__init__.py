"""Responses of the actor: prompts dealt to replicas, engines, the rollout log, and which samples become the batch."""
