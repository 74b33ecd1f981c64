"""The names under which users know a sharding, and what each comes to."""

import pytest

from hybridflow.errors import LayoutError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.layout.sharding import in_our_words


@pytest.mark.parametrize(
    ("given", "dp", "fsdp", "keeps"),
    [
        ({"fsdp": 8}, 8, 8, False),
        ({"fsdp": 4, "dp": 8}, 8, 4, False),
        ({"dp": 8, "fsdp_sharding": "FULL_SHARD"}, 8, 8, False),
        ({"dp": 8, "fsdp_sharding": "SHARD_GRAD_OP"}, 8, 8, True),
        ({"fsdp": 8, "fsdp_sharding": "SHARD_GRAD_OP"}, 8, 8, True),
        ({"fsdp": 4, "dp": 8, "fsdp_sharding": "HYBRID_SHARD"}, 8, 4, False),
        ({"dp": 8, "zero": 3}, 8, 8, False),
        ({"dp": 8, "zero": 2}, 8, 8, True),
        ({"dp": 8, "zero": 1}, 8, 1, False),
        ({"dp": 1, "zero": 3}, 1, 1, False),
        ({"fsdp": 1}, 1, 1, False),
    ],
)
def test_names_of_shardings(given, dp, fsdp, keeps):
    layout = ParallelLayout(**in_our_words(given))
    assert (layout.dp, layout.fsdp, layout.keeps_gathered, layout.world_size) == (dp, fsdp, keeps, dp)
    assert ParallelLayout.parse(str(layout)) == layout
    assert layout.without_sharding() == ParallelLayout(dp=dp)


@pytest.mark.parametrize("given", [{"hsdp": 16}, {"dp": 16, "fsdp_sharding": "HYBRID_SHARD"}])
def test_a_hybrid_shards_within_a_node(given):
    layout = ParallelLayout(**in_our_words(given))
    assert layout.is_sharded and layout.world_size == 16 and ParallelLayout.parse(str(layout)) == layout
    assert layout.on_nodes(8) == ParallelLayout(dp=16, fsdp=8)
    assert layout.on_nodes(16) == ParallelLayout(fsdp=16)
    with pytest.raises(LayoutError, match="a node has 1 of 16 ranks"):
        layout.on_nodes(1)


def test_who_shares_and_who_repeats():
    mesh = DeviceMesh(name="m", layout=ParallelLayout(fsdp=2, dp=6), ranks=(5, 4, 3, 2, 1, 0), ranks_per_node=6)
    assert mesh.shard_ranks(3) == (3, 2) and mesh.twin_ranks(3) == (5, 3, 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fsdp": 4, "tp": 2}, "fsdp with tp=2: FSDP shards whole layers over data-parallel ranks alone; remove tp"),
        ({"hsdp": 4, "pp": 2}, "fsdp with pp=2"),
        ({"fsdp": 4, "dp": 6}, "fsdp=4 with dp=6: expected a dp that is a multiple of fsdp"),
        ({"dp": 4, "fsdp_sharding": "NO_SHARD"}, "fsdp_sharding='NO_SHARD': expected one of FULL_SHARD, SHARD_GRAD_OP"),
        ({"dp": 4, "zero": 4}, "zero=4: expected 1, 2 or 3"),
        ({"dp": 4, "zero": 3, "fsdp_sharding": "SHARD_GRAD_OP"}, "ask for different shardings"),
        ({"fsdp": 4, "zero": 1}, "ask for different shardings"),
        ({"hsdp": 8, "dp": 4}, "hsdp=8 with dp=4"),
        ({"fsdp": 0}, "fsdp=0: expected an integer of at least 1"),
    ],
)
def test_shardings_that_contradict_themselves(given, words):
    with pytest.raises(LayoutError) as caught:
        ParallelLayout(**in_our_words(given))
    assert words in str(caught.value)
