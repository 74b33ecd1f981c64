"""The overlong penalty against constants worked out by hand."""

import pytest
import torch

from hybridflow.algorithms.shaping import overlong_penalty


def test_overlong_penalty_by_hand():
    # At most 20 tokens, the last 5 of which are paid for: from 15 on 0.4 each.
    lengths = torch.tensor([0, 14, 15, 16, 18, 20])
    found = overlong_penalty(lengths, max_tokens=20, buffer_tokens=5, factor=2.0)
    torch.testing.assert_close(found, torch.tensor([0.0, 0, 0, -0.4, -1.2, -2]))
    found = overlong_penalty(lengths, max_tokens=20, buffer_tokens=1, factor=2.0)
    torch.testing.assert_close(found, torch.tensor([0.0, 0, 0, 0, 0, -2]))


def test_there_is_no_penalty_without_a_buffer():
    with pytest.raises(ValueError, match="buffer_tokens=0"):
        overlong_penalty(torch.tensor([1]), max_tokens=20, buffer_tokens=0, factor=1.0)
