"""The loss of one micro-batch, and what is told of it, worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from hybridflow.algorithms.losses import Totals
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.recipe.load import load_recipe
from hybridflow.roles.advantage import KLCoefficient, LagrangeMultiplier
from hybridflow.roles.critic import Critic
from hybridflow.roles.policy_loss import LOSS_SUMS, SAMPLER_SUMS, PolicyLoss

# Two responses, of two tokens that count each; the others say what must not be looked at.
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
OLD = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -9.0, -4.0]])
COLUMNS = {
    "response_mask": MASK,
    "old_log_probs": OLD,
    "advantages": torch.tensor([[1.0, 1.0, 7.0], [-1.0, 7.0, -1.0]]),
    # The trainer over the sampler: e^-0.1, e^0.2; e^-0.3, 4.
    "rollout_log_probs": OLD - torch.tensor([[-0.1, 0.2, 50.0], [-0.3, 50.0, math.log(4)]]),
    "ref_log_probs": OLD - torch.tensor([[0.5, 0.25, 50.0], [-1.0, 50.0, 2.0]]),
}
RATIOS = torch.tensor([[1.5, 1.4, 30.0], [0.5, 30.0, 5.0]])
ENTROPY = torch.tensor([[0.1, 0.2, 9.0], [0.3, 9.0, 0.4]])
# The global mini-batch has eight tokens in four responses.
TOTALS = Totals(num_tokens=8, num_sequences=4, max_response_tokens=3)
# Where the ratio is 5 the bound of bad actions, 3 times the advantage, is what counts.
WEIGHTS = [math.exp(-0.1), math.exp(0.2), math.exp(-0.3), 2.0]
LOSSES = [-1.2, -1.2, 0.8, 3.0]


def policy_loss_of(*overrides):
    words = "loss.clip_low=0.2", "loss.clip_high=0.2", "loss.dual_clip=3", "loss.aggregation=token-mean"
    recipe = load_recipe("grpo", [*words, "correction.kind=truncate", *overrides])
    return PolicyLoss(recipe, KLCoefficient(recipe))


def test_a_loss_and_its_sums_by_hand():
    policy_loss = policy_loss_of("kl={coef: 0.1, place: loss, estimator: k2}", "loss.entropy_coef=0.01")
    loss, sums = policy_loss(OLD + RATIOS.log(), ENTROPY, COLUMNS, TOTALS)
    found = dict(zip(LOSS_SUMS, sums.tolist(), strict=True))
    logs = [math.log(ratio) for ratio in (1.5, 1.4, 0.5, 5.0)]
    kl = sum((each + apart) ** 2 / 2 for each, apart in zip(logs, (0.5, 0.25, -1.0, 2.0), strict=True))
    policy = sum(weight * each for weight, each in zip(WEIGHTS, LOSSES, strict=True)) / 8
    whole = policy + 0.1 * kl / 8 - 0.01 * (0.1 + 0.2 + 0.3 + 0.4) / 8
    assert float(loss) == pytest.approx(whole)
    # The first two tokens are clipped above, the third below.
    assert found == pytest.approx(
        {
            **{"policy_loss": policy, "loss": whole, "num_clipped": 3 / 8, "num_clipped_low": 1 / 8},
            **{"num_dual_clipped": 1 / 8, "entropy": 1.0 / 8, "kl_to_old": -sum(logs) / 8},
        }
    )


def test_the_distance_to_sampler_and_reference_by_hand():
    sums, largest = policy_loss_of("kl.coef=0.1").compare(OLD + 7.0, COLUMNS)
    apart = [-0.1, 0.2, -0.3, math.log(4)]
    sampler_kl = sum(math.exp(each) - 1 - each for each in apart)
    expected = {
        **{"tokens": 4, "sequences": 2, "abs_diff": sum(map(abs, apart)), "sampler_kl": sampler_kl},
        # Means of two responses.
        "reference_kl": (0.5 + 0.25) / 2 + (-1.0 + 2.0) / 2,
        **{"bounded": 1, "weight": sum(WEIGHTS), "square_weight": sum(each**2 for each in WEIGHTS)},
    }
    assert dict(zip(SAMPLER_SUMS, sums.tolist(), strict=True)) == pytest.approx(expected, rel=1e-5)
    assert float(largest) == pytest.approx(math.log(4))


def test_the_loss_of_values_and_its_clips_by_hand():
    rows = {
        "response_mask": [[1.0, 1.0], [1.0, 0.0]],
        "values": [[0.0, 1.0], [0.0, 0.0]],
        "returns": [[1.0, 0.0], [2.0, 9.0]],
    }
    part = Batch(
        torch.arange(2),
        {name: Ragged.from_list([torch.tensor(row) for row in each], torch.float32) for name, each in rows.items()},
    )
    critic = object.__new__(Critic)
    critic.model = SimpleNamespace(values=lambda output, micro_batch: output)
    critic._settings = SimpleNamespace(value_clip=0.5)
    critic._values, critic._returns = "values", "returns"
    # The second sample comes first.
    micro_batch = SimpleNamespace(samples=[1, 0], pad=lambda values: values)
    loss, told = critic._loss(torch.tensor([[1.0, 3.0], [2.0, 0.8]]), micro_batch, part, TOTALS)
    # The second's first value moved by 1 towards its return of 2, and counts as if it had moved by 0.5. The first's
    # moved past its return of 1, which the clip does not forgive, and its other one by less than the clip.
    assert float(loss) == pytest.approx((0.5 * 1.5**2 + 0.5 * 1.0**2 + 0.5 * 0.8**2) / 8)
    assert told.tolist() == pytest.approx([float(loss), 1 / 8])


@pytest.mark.parametrize(
    ("kl", "in_reward", "in_loss"),
    [
        ("kl={coef: 0.1, place: reward}", True, False),
        ("kl={coef: 0.1, place: loss, estimator: k2}", False, True),
        ("kl={coef: 0, place: reward}", False, False),
        ("kl={coef: 0, place: loss, estimator: k2}", False, False),
    ],
)
def test_the_kl_counts_in_one_place(kl, in_reward, in_loss):
    found = KLCoefficient(load_recipe("grpo", [kl]))
    assert (found.is_in_reward, found.is_in_loss) == (in_reward, in_loss)


def test_coefficients_follow_what_a_step_measured():
    fixed = KLCoefficient(load_recipe("grpo", ["kl.coef=0.1"]))
    fixed.advance(9.0, num_samples=10)
    assert fixed.value == 0.1
    adaptive = KLCoefficient(load_recipe("grpo", ["kl={coef: 0.1, target: 0.5, horizon: 100}"]))
    # A miss of 0.55 / 0.5 - 1 = 10 %, over 10 of 100 samples.
    adaptive.advance(0.55, num_samples=10)
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    price = LagrangeMultiplier(load_recipe("safe-rlhf", ["lagrange={limit: 0.3, init: 0.5, lr: 0.25, max: 2}"]))
    assert price.value == 0.5
    price.advance(0.8)
    assert price.value == pytest.approx(0.5 * math.exp(0.25 * 0.5 * (0.8 - 0.3)))
    price.advance(1e3)
    assert price.value == pytest.approx(2.0)
