"""Every element is written once, by a rank that holds it, held against arrays that are cut in numpy."""

from __future__ import annotations

from collections import defaultdict
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.checkpoint import owners
from hybridflow.checkpoint.owners import owned_weights, writes_state
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.shapes import known_models, model_spec
from hybridflow.reshard.spec import ITEM_BYTES, ModelSpec, num_elements
from tests.support.reshard_cases import make_mesh
from tests.unit.reshard.test_optimizer import LAYOUTS, dealt_state, make_model, whole_array, whole_state

# Tensor parallel ranks that are replicas of each other inside experts.
MORE = [ParallelLayout.parse(text) for text in ("tp2.dp2.etp1", "tp4.ep2.etp1", "tp4.dp2.ep2.etp2")]


@st.composite
def meshes(draw: st.DrawFn) -> DeviceMesh:
    """Any layout, over ranks below 12 in any order."""
    layout = draw(st.sampled_from([*LAYOUTS, *MORE]))
    return make_mesh(str(layout), tuple(draw(st.permutations(range(12)))[: layout.world_size]))


models = st.builds(make_model, st.integers(1, 40), st.booleans())


@settings(max_examples=120)
@given(meshes(), models, st.sampled_from([16, 256, 1 << 20]))
def test_weights_are_written_once_by_a_holder(mesh: DeviceMesh, model: ModelSpec, smallest_bytes: int) -> None:
    with mock.patch.object(owners, "SMALLEST_BYTES", smallest_bytes):
        owned = owned_weights(model, mesh)
    held, wholes = whole_state(model, mesh), {spec.name: whole_array(spec) for spec in model.tensors}
    written = {name: np.zeros(array.shape, dtype=int) for name, array in wholes.items()}
    assert owned.keys() == set(mesh.ranks)
    for rank, boxes in owned.items():
        for name, box in boxes:
            place = tuple(slice(*edge) for edge in box)
            assert np.isin(wholes[name][place], held[name, rank]).all(), f"rank {rank} does not hold {box} of {name}"
            written[name][place] += 1
    assert all((times == 1).all() for times in written.values())


@settings(max_examples=120)
@given(meshes(), models)
def test_state_of_a_distributed_optimizer_is_written_once(mesh: DeviceMesh, model: ModelSpec) -> None:
    times: dict[str, list[np.ndarray]] = defaultdict(list)
    writes = {rank: writes_state(model, mesh, rank) for rank in mesh.ranks}
    for (name, rank), elements in dealt_state(model, mesh).items():
        if name in writes[rank]:
            times[name].append(elements[elements >= 0])
    for spec in model.tensors:
        found = np.sort(np.concatenate(times[spec.name]))
        np.testing.assert_array_equal(found, np.arange(whole_array(spec).size), err_msg=spec.name)


@pytest.mark.parametrize(
    ("name", "layout"), [("llama3-8b", "tp2.pp2.dp4"), ("qwen2.5-0.5b", "dp8"), ("llama3-1b", "tp8")]
)
def test_bytes_are_dealt_evenly(name: str, layout: str) -> None:
    model, mesh = model_spec(known_models()[name]), make_mesh(layout)
    item_bytes = {tensor.name: ITEM_BYTES[tensor.dtype] for tensor in model.tensors}
    load = {
        rank: sum(num_elements(box) * item_bytes[tensor] for tensor, box in boxes)
        for rank, boxes in owned_weights(model, mesh).items()
    }
    # Stages are not equal: the first embeds, the last has the output. So each is held against its own share.
    stages: dict[int, list[int]] = defaultdict(list)
    for rank, num_bytes in load.items():
        stages[mesh.coordinate(rank).pp].append(num_bytes)
    assert sum(load.values()) == sum(tensor.num_bytes for tensor in model.tensors)
    for loads in stages.values():
        assert max(loads) <= 1.02 * sum(loads) / len(loads), load


def test_twins_take_turns() -> None:
    """Norms, which all tensor parallel ranks hold, are not all written by the first."""
    model, mesh = model_spec(known_models()["llama3-8b"]), make_mesh("tp4.dp2")
    whole = {tensor.name for tensor in model.tensors if tensor.tp_dim is None}
    counts = [len(writes_state(model, mesh, rank) & whole) for rank in range(4)]
    assert sum(counts) == len(whole) and min(counts) >= len(whole) // 8, counts


def test_a_box_is_cut_along_its_longest_dim_wherever_it_begins() -> None:
    assert list(owners._divide(((20, 26), (0, 3)), 3)) == [((low, low + 2), (0, 3)) for low in (20, 22, 24)]
    assert list(owners._divide(((0, 2), (1, 6)), 2)) == [((0, 2), (1, 4)), ((0, 2), (4, 6))]
