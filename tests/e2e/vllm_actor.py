"""Run by vLLM's own environment: policies of the Python API that vLLM samples from.

python vllm_actor.py DIRECTORY WITHOUT_TABLE        prints one line of JSON at the end
"""

import json
import sys

import transformers
import vllm

from hybridflow import GRPO, LoraConfig, PPOTrainer, Reward, vLLMActor
from hybridflow.errors import ConfigError
from hybridflow.rollout.engines.vllm_engine import VllmEngine

SAMPLING = {"max_new_tokens": 6, "temperature": 0.8}
PROMPTS = ["1+1=", "2+3=", "4+4=", "5+1="] * 2


def score(prompt, response, answer):
    return float(sum(map(ord, response)) % 3)


def of_a_trainer(model):
    """Metrics of steps with a critic, and the class of what sampled in them."""
    config = {"batch_size": 8, "rollout_batch_size": 8, "lr": 1e-2, "kl_coef": 0.04, **SAMPLING}
    with PPOTrainer(config, actor_model=model, reward=score) as trainer:
        steps = [trainer.step(PROMPTS) for _ in range(3)]
        engine = trainer.session().trainer.roles.actor.rollouts.engine
    assert type(engine) is VllmEngine, engine
    return steps


def of_a_flow(model, lr=1e-2):
    """Metrics of steps on groups of samples."""
    flow = model.sample(group_size=4, **SAMPLING) >> Reward(score).score() >> GRPO(lr=lr, batch_size=8).update()
    return flow.run(PROMPTS, steps=3)


def refusal(path):
    """What is said of vLLM's own object."""
    llm = vllm.LLM(path, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8)
    try:
        vLLMActor(llm)
    except ConfigError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    path, other = sys.argv[1:]
    in_memory, without_table = map(transformers.AutoModelForCausalLM.from_pretrained, (path, other))
    told = {
        "trainer": of_a_trainer(vLLMActor(path)),
        "in_memory": of_a_trainer(vLLMActor(in_memory, path)),
        "adapters": of_a_flow(vLLMActor(path, lora=LoraConfig(r=4))),
        "without_table": of_a_flow(vLLMActor(without_table, other, lora=LoraConfig(r=4)), lr=1e-3),
        "refusal": refusal(path),
    }
    print(json.dumps(told))
