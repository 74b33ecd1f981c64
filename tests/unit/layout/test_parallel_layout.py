"""Layouts that are refused, and what the message says."""

import pytest

from hybridflow.errors import LayoutError
from hybridflow.layout.parallel_layout import ParallelLayout


@pytest.mark.parametrize("text", ["tp2.dp3.ep3.etp1", "cp2.dp3.ep3", "tp3.dp2.ep2.etp1"])
def test_ranks_that_share_experts_are_whole_replicas_or_parts_of_one(text):
    with pytest.raises(LayoutError, match=r"etp·ep = [23] ranks that share experts .* tp·cp = [23] ranks.*; choose an"):
        ParallelLayout.parse(text)


def test_a_rollout_in_which_experts_do_not_fit_names_the_key():
    layout = ParallelLayout.parse("tp2.cp3.ep3.etp1")
    with pytest.raises(LayoutError, match=r"the rollout of layout tp2.*etp·ep = 3 .*; or set actor\.rollout"):
        layout.for_rollout()
