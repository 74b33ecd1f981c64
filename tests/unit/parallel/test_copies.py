"""Copies to a device."""

import torch

from hybridflow.parallel.copies import to_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Pinning:
    """A tensor that notes what is asked of it."""

    def __init__(self, device):
        self.device, self.asked = device, []

    def pin_memory(self):
        self.asked.append("pin")
        return self

    def to(self, device, non_blocking=False):
        self.asked.append((device, non_blocking))
        return self


def asked(source, target):
    return to_device(Pinning(source), target).asked


def test_only_copies_out_of_pinned_memory_are_not_waited_for():
    assert asked(CPU, GPU) == ["pin", (GPU, True)]
    # What comes to the host is read there at once.
    assert asked(GPU, CPU) == [(CPU, False)]
    assert asked(GPU, GPU) == [(GPU, False)]


def test_a_tensor_stays_itself_on_its_device():
    values = torch.arange(3)
    assert to_device(values, CPU) is values
