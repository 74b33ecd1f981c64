"""What a run makes of the checkpoints that it finds."""

import pytest

from hybridflow.checkpoint.store import begin_step, complete_step
from hybridflow.errors import CheckpointError
from hybridflow.trainer.checkpoints import check_new


def test_a_new_run_is_refused_at_once_where_an_earlier_one_has_a_checkpoint(tmp_path):
    check_new(tmp_path)
    begin_step(tmp_path, 3)
    check_new(tmp_path)
    complete_step(tmp_path, 3, {}, [], keep_last=1)
    with pytest.raises(CheckpointError, match="checkpoint of step 3; add --resume"):
        check_new(tmp_path)
