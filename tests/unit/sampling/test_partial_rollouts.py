"""Responses that there are before a step samples: what is begun for the next one, and what is not generated again."""

from __future__ import annotations

import pytest
import torch

from hybridflow.rollout.request import Request, Response, RolloutStopped, SamplingParams
from hybridflow.sampling.known_responses import KnownResponses, SamplingProgress
from hybridflow.sampling.partial_rollouts import PartialRollouts


def ask(prompt_index, index=0):
    return Request(
        prompt=torch.tensor([1]), params=SamplingParams(max_new_tokens=9), prompt_index=prompt_index, index=index
    )


def response(num_tokens, finish="stop"):
    numbers = torch.zeros(num_tokens)
    return Response(
        tokens=numbers.long(), log_probs=numbers, sampled_log_probs=numbers, versions=numbers.int(), finish=finish
    )


class Engine:
    """Decodes a token of each open request at a time, but of those whose length is 0; all by their prompt indices."""

    def __init__(self, lengths, finish=None):
        self.lengths, self.finish, self.asked = lengths, finish or {}, []

    def drive(self, requests, purpose, progress, *, more, expected):
        assert purpose == "rollout"
        self.expected = [each.prompt_index for each in expected]
        running = dict.fromkeys(requests, 0)
        while True:
            others = more(len(running))
            self.asked.append([each.prompt_index for each in others])
            running |= dict.fromkeys(others, 0)
            if not running:
                return
            running = {each: count + (self.lengths[each.prompt_index] > 0) for each, count in running.items()}
            done = [each for each, count in running.items() if count and count == self.lengths[each.prompt_index]]
            pairs = [(each, response(running.pop(each), self.finish.get(each.prompt_index, "stop"))) for each in done]
            if pairs:
                progress.finished(pairs)
            if progress.is_stopping():
                raise RolloutStopped([(each, response(count, "paused")) for each, count in running.items()])


class Progress:
    """Stops once it was asked so often."""

    def __init__(self, most=99):
        self.told, self.left = [], most

    def finished(self, pairs):
        self.told.append([each.prompt_index for each, _ in pairs])

    def is_stopping(self):
        self.left -= 1
        return self.left < 0


def named(pairs):
    return [(each.prompt_index, got.finish, len(got.tokens)) for each, got in pairs]


def begun(carry_over):
    return {key: (got.finish, len(got.tokens)) for key, got in carry_over.take().items()}


def test_the_next_step_is_begun_as_slots_become_free_and_paused_when_this_one_is_done():
    engine, progress, carry_over = Engine({1: 1, 2: 3, 3: 1, 4: 5, 5: 1}), Progress(), PartialRollouts()
    steps = [ask(1), ask(2)], [ask(3), ask(4), ask(5)]
    found = carry_over.drive(engine, *steps, progress, num_slots=2)
    # After the first token 1 is done, after the second 3, after the third 2.
    assert named(found) == [(1, "stop", 1), (2, "stop", 3)] and progress.told == [[1], [2]]
    assert engine.expected == [1, 2, 3, 4, 5] and engine.asked == [[], [3], [4]]
    assert begun(carry_over) == {(3, 0): ("stop", 1), (4, 0): ("paused", 1)}
    assert begun(carry_over) == {}
    # Two at once where there is room for two; one that failed, or has no token yet, begins anew.
    engine = Engine({1: 2, 3: 1, 4: 1, 5: 0}, {4: "failed"})
    assert named(carry_over.drive(engine, [ask(1)], steps[1], Progress(), num_slots=3)) == [(1, "stop", 2)]
    assert engine.asked == [[3, 4], [5]] and begun(carry_over) == {(3, 0): ("stop", 1)}
    # No more than there are.
    engine = Engine({1: 3, 3: 1})
    assert named(carry_over.drive(engine, [ask(1)], [ask(3)], Progress(), num_slots=9)) == [(1, "stop", 3)]
    assert engine.asked == [[3], [], []] and begun(carry_over) == {(3, 0): ("stop", 1)}
    # None where more of this step wait than there are slots.
    engine = Engine({1: 1, 2: 1, 3: 2, 4: 1, 5: 1, 6: 1})
    carry_over.drive(engine, [ask(1), ask(2), ask(3)], [ask(4), ask(5), ask(6)], Progress(), num_slots=1)
    assert engine.asked == [[], []] and begun(carry_over) == {}


def test_a_step_that_is_left_keeps_its_own_responses_alone():
    engine, carry_over, progress = Engine({1: 1, 2: 5, 3: 5}), PartialRollouts(), Progress(1)
    with pytest.raises(RolloutStopped) as stopped:
        carry_over.drive(engine, [ask(1), ask(2)], [ask(3)], progress, num_slots=2)
    assert named(stopped.value.unfinished) == [(2, "paused", 2)] and progress.told == [[1]]
    assert begun(carry_over) == {}
    # Asked to stop when all is done, it is done.
    found = carry_over.drive(Engine({1: 1, 3: 2}), [ask(1)], [ask(3)], Progress(0), num_slots=2)
    assert named(found) == [(1, "stop", 1)]
    assert begun(carry_over) == {(3, 0): ("paused", 1)}


class Log:
    def __init__(self):
        self.kept = []

    def add(self, samples):
        self.kept += [(each.prompt_index, each.finish) for each in samples]


def test_what_is_known_is_not_generated_again_and_is_counted():
    log = Log()
    found = {
        **{(1, 0): response(1), (2, 0): response(2, "paused")},
        **{(3, 0): response(3, "length"), (4, 0): response(4, "paused"), (6, 0): response(1), (9, 0): response(1)},
    }
    known = KnownResponses(found, [(1, 0), (2, 0)], SamplingProgress(lambda: False, log))
    missing = known.missing([ask(2), ask(1), ask(5)]) + known.missing([ask(3), ask(6), ask(4)])
    assert [(each.prompt_index, each.begun) for each in missing] == [(2, found[2, 0]), (5, None), (4, found[4, 0])]
    assert named(known.again) == [(1, "stop", 1), (3, "length", 3), (6, "stop", 1)]
    assert log.kept == [(1, "stop"), (3, "length"), (6, "stop")]
    # 1, 2 and 4 were begun before this step or start, of which 1 was done; 3 and 6 are of an earlier start.
    assert known.counts(7) == {"rollout/reused": 2, "rollout/continued": 3, "rollout/claimed": 7}


def test_a_log_keeps_what_can_be_gone_on_with():
    log = Log()
    pairs = [(ask(1), response(2)), (ask(2), response(2, "failed")), (ask(3), response(0, "paused"))]
    SamplingProgress(lambda: False, log).finished([*pairs, (ask(4), response(1, "paused"))])
    SamplingProgress(lambda: False).finished(pairs)
    assert log.kept == [(1, "stop"), (4, "paused")]
