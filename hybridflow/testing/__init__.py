"""Contract tests for actors, critics and rewards: run them on your own class before you train it.

    from hybridflow.testing import check_actor
    def test_my_actor():
        check_actor(MyActor())

They take what a job takes: a class of your own, a model of ``transformers``, a ``GPTModel`` of megatron-core, an engine
that asks a server, a reward function. The first thing that is wrong is told: what was found, what was expected, and
how to mend it.
"""

from hybridflow.testing.models import check_actor, check_critic
from hybridflow.testing.rewards import check_reward

__all__ = ["check_actor", "check_critic", "check_reward"]
