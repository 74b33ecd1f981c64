"""TRL's GRPO trainer in a process of its own, and the model that all start from; without hybridflow.

python -m step_bench.trl make FOLDER SHAPE         random weights and a tokenizer, as a checkpoint of Hugging Face
python -m step_bench.trl train FOLDER SETTINGS     a step for each line of standard input
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

from rollout_bench.child import open_answers
from rollout_bench.peers import make

from step_bench.cases import GROUP_SIZE, KL_COEF, LEARNING_RATE, MAX_NEW_TOKENS

EOS = 2


def make_checkpoint(folder: str, shape: dict[str, Any], dtype: str) -> None:
    """The model, and a tokenizer that has a word for each id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    make(folder, shape, dtype)
    words = {f"w{index}": index for index in range(shape["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1", eos_token="w2").save_pretrained(
        folder
    )


def train(folder: str, settings: dict[str, Any]) -> None:
    """Steps, each begun by a line that gives the responses' lengths; answered with the seconds that it took."""
    answer = open_answers()
    import torch
    import transformers
    import trl
    from datasets import Dataset

    torch.set_num_threads(settings["threads"])

    class Turns(transformers.TrainerCallback):
        """Lets a step begin when it is asked for."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            line = sys.stdin.readline()
            if not line:
                # Nobody wants another one.
                os._exit(0)
            forced.lengths = torch.tensor(json.loads(line)["lengths"])
            forced.made = 0
            self.began_s, self.began_cpu_s = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended_s, cpu_s = time.perf_counter(), time.process_time() - self.began_cpu_s
            answer({"step_s": ended_s - self.began_s, "cpu_s": cpu_s, "num_tokens": forced.num_tokens})

    forced = _forced_lengths(torch, transformers)
    with tempfile.TemporaryDirectory() as output:
        config = trl.GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=settings["checkpointing"],
            per_device_train_batch_size=settings["batch"],
            gradient_accumulation_steps=len(settings["prompts"]) * GROUP_SIZE // settings["batch"],
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_NEW_TOKENS,
            beta=KL_COEF,
            loss_type="grpo",
            learning_rate=LEARNING_RATE,
            max_steps=10**6,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in settings["prompts"]]),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder),
            callbacks=[Turns()],
        )
        model = trainer.accelerator.unwrap_model(trainer.model)
        generate = model.generate

        def generate_forced(*args: Any, **kwargs: Any) -> Any:
            found = generate(*args, logits_processor=transformers.LogitsProcessorList([forced]), **kwargs)
            new = found[:, found.shape[1] - forced.made :]
            forced.num_tokens = int(((new == EOS).int().argmax(1) + 1).sum())
            return found

        model.generate = generate_forced
        answer({"versions": {"trl": trl.__version__, "transformers": transformers.__version__}})
        trainer.train()


def _forced_lengths(torch: Any, transformers: Any) -> Any:
    """Lets responses end after as many tokens as they are to have, whatever the model says."""

    class Forced(transformers.LogitsProcessor):
        lengths: Any = None
        made = 0
        num_tokens = 0

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.made += 1
            is_last = (self.lengths == self.made)[:, None]
            is_end = torch.arange(scores.shape[1]) == EOS
            return scores.masked_fill(is_last ^ is_end, -torch.inf)

    return Forced()


def main() -> None:
    """Make the checkpoint, or train."""
    what, folder, told = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    if what == "make":
        make_checkpoint(folder, **told)
    else:
        train(folder, told)


if __name__ == "__main__":
    main()
