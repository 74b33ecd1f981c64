"""Which replica generates what: each is dealt a first share, and takes of the rest when it has room.

A sample is the same whoever generates it: its noise depends on its prompt index and index alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.parallel.world import World
from hybridflow.rollout.request import Request


class Claims:
    """A counter that the replicas of a mesh share, from zero for each deal.

    Collective: the mesh, to make it.
    """

    def __init__(self, world: World, mesh: DeviceMesh) -> None:
        everyone = world.coordinator(mesh.ranks)
        # The store may be older than this start of the job.
        token = everyone.decide("the name of a counter", secrets.token_hex(8) if everyone.is_lead else None)
        self._replica = world.coordinator(mesh.replica_of(world.rank))
        self._store = world.new_store(f"dealing/{token}") if self._replica.is_lead else None
        self._number = 0

    def begin(self) -> None:
        """Begin another deal. Collective: the mesh, though nobody waits."""
        self._number += 1

    def take(self, count: int) -> int:
        """Claim ``count`` samples for this replica, and return the number of the first. Collective: tp, pp."""
        first = None
        if self._store is not None:
            first = self._store.add(str(self._number), count) - count
        taken: int = self._replica.decide("what is generated here", first)
        return taken


class Deal:
    """What one replica generates of the samples of all.

    The first share of each fills its slots. The rest is in a queue, of which a replica takes whole groups as soon as
    fewer are going on there than it has slots: those whose responses are short take more.

    Args:
        groups: All samples, in the same order on all replicas, those of one prompt together; groups are equally large.
        place: Number of this replica.
        num_replicas: Number of replicas.
        num_slots: Samples that one replica decodes together.
        make_claims: Gives the counter; called only where there is a queue, which is then so on all replicas.

    Attributes:
        first: Requests that are dealt to this replica at the start.
        num_claimed: Samples that it took of the queue.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Request]],
        *,
        place: int,
        num_replicas: int,
        num_slots: int,
        make_claims: Callable[[], Claims],
    ) -> None:
        num_first = max(1, num_slots // max(1, len(groups[0]))) if groups and num_replicas > 1 else len(groups)
        self.first = [request for group in groups[place::num_replicas][:num_first] for request in group]
        self.num_claimed = 0
        self._queue = groups[num_replicas * num_first :]
        self._num_slots = num_slots
        self._claims = make_claims() if self._queue else None
        if self._claims is not None:
            self._claims.begin()

    @property
    def has_queue(self) -> bool:
        """Return whether samples are left that replicas share out as they go; the same on all replicas."""
        return len(self._queue) > 0

    def more(self, num_open: int) -> list[Request]:
        """Return further samples for this replica, which has ``num_open`` unfinished ones.

        An empty list means that it has enough, or that all are taken.

        All ranks of a replica call it at the same points, with the same number. Collective: tp, pp.
        """
        if self._claims is None or num_open >= self._num_slots:
            return []
        count = max(1, (self._num_slots - num_open) // len(self._queue[0]))
        first = self._claims.take(count)
        taken = [request for group in self._queue[first : first + count] for request in group]
        self.num_claimed += len(taken)
        if first + count >= len(self._queue):
            self._claims = None
        return taken
