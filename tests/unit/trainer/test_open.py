"""A tokenizer that the run trained is where every rank looks for it, or the job does not begin."""

import pytest

from hybridflow.errors import DataError
from hybridflow.trainer.open import _check_there


def test_a_rank_that_does_not_see_the_trained_tokenizer_names_the_file_system(tmp_path):
    trained = tmp_path / "run/tokenizer.model"
    with pytest.raises(DataError, match=r"tokenizer\.model: the lowest rank trained it, and rank 3 .* all ranks share"):
        _check_there(trained, 3)
    trained.parent.mkdir()
    trained.touch()
    _check_there(trained, 3)
