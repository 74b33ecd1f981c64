"""Messages between the stages of a pipeline that generates."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from hybridflow.rollout.replica import Replica
from tests.cuda.fake.machine import DEVICE, fake_cuda


def test_tokens_go_back_through_the_host_and_do_not_meet_the_hidden_states(monkeypatch):
    log = []
    event = SimpleNamespace(record=lambda: log.append("recorded"), synchronize=lambda: log.append("copied"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)

    def isend(tensor, dst, group):
        log.append((tensor.device.type, dst))
        return SimpleNamespace(wait=lambda: log.append("sent"))

    monkeypatch.setattr(dist, "isend", isend)
    with fake_cuda(monkeypatch, rank=2, size=3):
        replica = Replica.__new__(Replica)
        replica.groups, replica._stage_ranks = SimpleNamespace(pp=None), [0, 1, 2]
        take = replica.send_tokens(torch.zeros(4, dtype=torch.int64, device=DEVICE))
        assert log == ["recorded"], "the host goes on before they are there"
        assert take().device.type == "cpu"
    assert log == ["recorded", "copied", ("cpu", 0), ("cpu", 1), "sent", "sent"]
