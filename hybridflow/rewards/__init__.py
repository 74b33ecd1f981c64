"""What scores a response: functions, services, judges, programs; within a time, and with a policy for what fails."""

from hybridflow.rewards.functions import batched

__all__ = ["batched"]
