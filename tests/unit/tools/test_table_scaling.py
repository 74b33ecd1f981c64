"""The table of scaling on paper."""

import sys

import pytest
import table_scaling
from table_scaling import best_placements


@pytest.mark.parametrize("name", ["13b", "34b"])
@pytest.mark.parametrize(("gpus", "sets"), [(64, 1), (128, 2)])
def test_models_share_all_of_64_gpus_and_have_half_of_128_each(name, gpus, sets):
    # The choices in arXiv 2409.19256, whose nodes share 200 Gb/s, and whose engine takes 0.9 of a GPU.
    found = best_placements(name, gpus, 1024, "a100-80g-one-port", blocks=2, cache_memory=0.9)
    assert len(found[0].placement) == sets
    assert {mesh for one in found[0].placement for mesh in one.meshes} == {
        *("actor.update", "actor.rollout", "critic", "reference", "reward")
    }
    assert {len(one.ranks) for one in found[0].placement} == {gpus // sets}


@pytest.mark.slow
def test_models_are_apart_on_96_gpus_where_batches_are_cut_evenly():
    # Their nodes are no power of two, and 12 replicas have 1,024 responses in unequal parts, which verl refuses.
    found = best_placements("34b", 96, 1024, "a100-80g-one-port", is_even=True)
    first, second = found[0].placement
    assert [len(one.ranks) for one in (first, second)] == [64, 32]
    assert set(first.meshes) == {"actor.update", "actor.rollout", "reference", "reward"}
    assert all(len(each.placement) > 1 for each in found)


def test_a_row_has_the_best_and_says_where_nothing_fits(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table_scaling.py", "--models", "7b", "--gpus", "1,8", "--weak"])
    table_scaling.main()
    header, _, none, some = capsys.readouterr().out.splitlines()
    assert header.startswith("| model | GPUs |") and none.endswith("nothing fits |")
    cells = [cell.strip() for cell in some.split("|")[1:-1]]
    assert cells[:3] == ["7B", "8", "64"] and cells[-1] == "together" and cells[3] == cells[5]


def test_rows_are_kept_and_drawn(tmp_path, capsys, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    words = ["table_scaling.py", "--models", "7b", "--gpus", "8", "--weak", "--blocks", "1", "--rows", str(rows)]
    monkeypatch.setattr(sys, "argv", words)
    table_scaling.main()
    before = capsys.readouterr().out
    assert len(rows.read_text().splitlines()) == 1
    monkeypatch.setattr(table_scaling, "search", None)
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new/folder"
    monkeypatch.setattr(sys, "argv", [*words, "--draw", str(folder)])
    table_scaling.main()
    assert capsys.readouterr().out == before
    assert "<svg" in (folder / "scaling_weak.svg").read_text()
    assert not (folder / "scaling_strong.svg").exists()


def test_the_best_is_the_faster_of_together_and_split():
    row = {"model": "7b", "gpus": 16, "responses": 128, "together": 4.0, "split": 2.0, "placement": "8: a; 8: b"}
    # 128 prompts and responses of 1,024 tokens in 2 s on 16 GPUs.
    assert table_scaling.cells(row) == ("7B", "16", "128", "2 s", "8192", "4 s", "2 s", "8: a; 8: b")
    row |= {"together": None, "split": None}
    assert table_scaling.cells(row)[-1] == "nothing fits"
