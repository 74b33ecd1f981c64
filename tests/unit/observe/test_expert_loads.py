"""The loads of experts: a run that goes on has the lines up to its checkpoint, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.observe.expert_loads import ExpertLoadsFile


@pytest.mark.parametrize("resumed_step, num_kept", [(None, 0), (1, 1), (9, 3)])
def test_lines_up_to_the_checkpoint_are_kept_as_they_are(tmp_path: Path, resumed_step: int | None, num_kept: int):
    path = tmp_path / "expert_loads.jsonl"
    ExpertLoadsFile(tmp_path, None).write(1, {})
    assert not path.exists()
    for step in (1, 2, 3):
        ExpertLoadsFile(tmp_path, step - 1).write(step, {0: [0.5, 1.5], 3: [1.00004, 0.9999]})
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[0] == b'{"step":1,"loads":{"0":[0.5,1.5],"3":[1.0,0.9999]}}\n'
    # Lines that a kill has cut short.
    path.write_bytes(b"".join([lines[0], lines[1][:25] + lines[1], *lines[1:], b'{"step":4,"lo']))
    ExpertLoadsFile(tmp_path, resumed_step)
    assert path.read_bytes().splitlines(keepends=True) == lines[:num_kept]
