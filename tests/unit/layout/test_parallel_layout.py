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


def test_a_rollout_has_the_chunks_of_a_stage_in_one_piece():
    # Stage 0 has the chunks of 1 and 3 layers, stage 1 those of 2 and 4.
    for update, rollout in (
        ("pp2.vpp2.cp2.layers1-2-3-4", "pp2.dp2.layers4-6"),
        ("pp2.dp3.layers1-2", "pp2.dp3.layers1-2"),
    ):
        assert ParallelLayout.parse(update).for_rollout() == ParallelLayout.parse(rollout)
