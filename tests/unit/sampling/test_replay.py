"""An archive in the place of sampling: each response is found once, in any order of segments, or the run is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridflow.errors import CheckpointError, ConfigError, DataError
from hybridflow.recipe.load import load_recipe
from hybridflow.rollout.archive import SegmentName, write_segment
from hybridflow.rollout.log_file import LoggedSample
from hybridflow.rollout.request import Request, SamplingParams
from hybridflow.sampling.replay import Replay


def write_archive(folder: Path) -> None:
    """Three steps of two draws with two samples each, on two ranks."""
    for first, last in ((1, 2), (3, 3)):
        for rank in (0, 1):
            rows, prompts = [], {}
            for step in range(first, last + 1):
                prompt_index = 2 * step + rank
                prompts[prompt_index] = [prompt_index, 1]
                for index in (0, 1):
                    tokens = np.arange(1 + index, dtype=np.int32) + 10 * prompt_index
                    told = [-np.full(len(tokens), part + prompt_index + index / 2, np.float32) for part in (0.1, 0.2)]
                    versions = np.full(len(tokens), step - 1, np.int32)
                    sampled = LoggedSample(
                        prompt_index=prompt_index,
                        index=index,
                        tokens=tokens,
                        log_probs=told[0],
                        sampled_log_probs=told[1],
                        versions=versions,
                        finish="stop" if index else "length",
                    )
                    rows.append((step, sampled))
            write_segment(folder / "rollouts", SegmentName(first, last, rank), rows, prompts, {})


def ask(prompt_index: int, index: int, prompt: list[int] | None = None, most: int = 2) -> Request:
    params = SamplingParams(max_new_tokens=most)
    return Request(
        prompt=torch.tensor(prompt or [prompt_index, 1]), params=params, prompt_index=prompt_index, index=index
    )


def test_every_response_is_what_was_sampled(tmp_path: Path):
    write_archive(tmp_path)
    replay = Replay(tmp_path)
    assert replay.find([]) == {}, "a replica without a request"
    assert replay.find([ask(2, 1)]).keys() == {(2, 1)}, "the other rollout of the step has the same prompt"
    # Batches of another size than the run's own.
    for prompt_indices in ((2,), (3, 4, 5), (6, 7)):
        found = replay.find([ask(prompt_index, index) for prompt_index in prompt_indices for index in (1, 0)])
        assert found.keys() == {(prompt_index, index) for prompt_index in prompt_indices for index in (0, 1)}
        for (prompt_index, index), response in found.items():
            assert response.tokens.tolist() == [10 * prompt_index + place for place in range(1 + index)]
            assert response.log_probs.equal(-torch.full((1 + index,), 0.1 + prompt_index + index / 2))
            assert response.sampled_log_probs.equal(-torch.full((1 + index,), 0.2 + prompt_index + index / 2))
            assert response.versions.tolist() == [prompt_index // 2 - 1] * (1 + index)
            assert response.finish == ("stop" if index else "length")
    # What lies before the last batch is forgotten.
    assert replay._found.keys() == {(prompt_index, index) for prompt_index in (6, 7) for index in (0, 1)}
    assert replay._places.keys() == {SegmentName(3, 3, 0), SegmentName(3, 3, 1)}
    with pytest.raises(DataError, match="prompt 8, sample 0: is not in the archive; .*rollout.archive=true"):
        replay.find([ask(8, 0)])


def test_a_conversation_is_not_replayed(tmp_path: Path):
    numbers = np.zeros(3, np.float32)
    sampled = LoggedSample(
        **dict(prompt_index=2, index=0, log_probs=numbers, sampled_log_probs=numbers),
        tokens=np.array([5, 6, 7], np.int32),
        versions=np.array([0, -1, 0], np.int32),
    )
    write_segment(tmp_path / "rollouts", SegmentName(1, 1, 0), [(1, sampled)], {2: [2, 1]}, {})
    with pytest.raises(DataError, match="prompt 2, sample 0: is a conversation with an environment"):
        Replay(tmp_path).find([ask(2, 0, most=3)])


def test_a_resumed_run_reads_no_tokens_of_the_steps_before(tmp_path: Path):
    write_archive(tmp_path)
    for rank in (0, 1):
        path = tmp_path / "rollouts/segments" / str(SegmentName(1, 2, rank))
        prompts = (2 + rank, 4 + rank)
        tokens = np.array([token for each in prompts for token in (10 * each, 10 * each, 10 * each + 1)], np.int32)
        content = path.read_bytes()
        assert content.count(tokens.tobytes()) == 1
        path.write_bytes(content.replace(tokens.tobytes(), bytes(tokens.nbytes)))
    (response,) = Replay(tmp_path).find([ask(7, 1)]).values()
    assert response.tokens.tolist() == [70, 71]
    with pytest.raises(CheckpointError, match="step-000001-000002-rank-00000.h5"):
        Replay(tmp_path).find([ask(2, 0)])


def test_segments_are_read_when_their_samples_are_asked_for(tmp_path: Path):
    write_archive(tmp_path)
    (tmp_path / "rollouts/segments" / str(SegmentName(3, 3, 0))).write_bytes(b"damaged")
    replay = Replay(tmp_path)
    assert replay.find([ask(2, 0), ask(3, 0)]).keys() == {(2, 0), (3, 0)}
    with pytest.raises(CheckpointError, match="step-000003-000003-rank-00000.h5"):
        replay.find([ask(6, 0)])


def test_what_cannot_be_replayed_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="rollout.archive=true"):
        Replay(tmp_path)
    write_archive(tmp_path)
    with pytest.raises(DataError, match="prompt 4, sample 0: was sampled for another prompt"):
        Replay(tmp_path).find([ask(4, 0, prompt=[9, 9])])
    with pytest.raises(DataError, match="has 2 tokens; raise rollout.max_new_tokens=1"):
        Replay(tmp_path).find([ask(4, 1, most=1)])


@pytest.mark.parametrize(
    "setting, key",
    [
        ("rollout.environment={name: calculator}", "rollout.environment"),
        ("rollout.partial_rollouts=true", "rollout.partial_rollouts"),
        ("run_dir=runs/first", "run_dir"),
    ],
)
def test_what_would_be_ignored_is_refused(setting: str, key: str):
    with pytest.raises(ConfigError, match=f"rollout.replay=runs/first: .*{key}"):
        load_recipe("grpo", ["rollout.replay=runs/first", setting])


def test_other_weights_are_corrected_for():
    assert load_recipe("grpo").correction_kind == "none"
    assert load_recipe("grpo", ["rollout.replay=runs/first"]).correction_kind == "truncate"
