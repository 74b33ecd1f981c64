"""The table of scaling on paper."""

import sys

import table_scaling
from table_scaling import best_placements


def test_34b_models_share_all_of_64_gpus():
    # The choice in arXiv 2409.19256 up to 64 A100.
    found = best_placements("34b", 64, 1024, "a100-80g")
    assert [len(each.placement) for each in found][:2] == [1, 2]
    assert {mesh for one in found[0].placement for mesh in one.meshes} == {
        *("actor.update", "actor.rollout", "critic", "reference", "reward")
    }


def test_a_row_has_the_best_and_says_where_nothing_fits(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table_scaling.py", "--models", "7b", "--gpus", "1,8", "--weak"])
    table_scaling.main()
    header, _, none, some = capsys.readouterr().out.splitlines()
    assert header.startswith("| model | GPUs |") and none.endswith("nothing fits |")
    cells = [cell.strip() for cell in some.split("|")[1:-1]]
    assert cells[:3] == ["7B", "8", "64"] and cells[-1] == "together" and cells[3] == cells[5]
