"""A tokenizer that the run trained is where every rank looks for it, or the job does not begin."""

import pytest

from hybridflow.data.pieces import train_tokenizer
from hybridflow.errors import DataError
from hybridflow.trainer.open import _open_trained


def test_a_rank_that_does_not_see_the_trained_tokenizer_names_the_file_system(tmp_path):
    trained = tmp_path / "run/tokenizer.model"
    with pytest.raises(DataError, match=r"tokenizer\.model: the lowest rank trained it, and rank 3 .* all ranks share"):
        _open_trained(trained, 3)
    train_tokenizer(["1+2=3", "4+5=9"], path=trained, vocab_size=16)
    assert _open_trained(trained, 3).path == trained


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "missing"), (b"", "is not a sentencepiece model"), (b"else", "is not a sentencepiece m")],
)
def test_what_the_run_trained_is_to_be_copied_from_its_checkpoint(content, says, tmp_path):
    (tmp_path / "checkpoints/step_000007").mkdir(parents=True)
    if content is not None:
        (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(DataError, match=f"{says}.*; .* from .*/step_000007/actor/assets/tokenizer.model$") as raised:
        _open_trained(tmp_path / "tokenizer.model", 0)
    assert "anew" not in str(raised.value), "another one would give other tokens"
