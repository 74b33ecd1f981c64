"""hybridflow's trainer in processes of its own, as many as ranks: a step for each line of standard input.

python -m step_bench.ours FOLDER SETTINGS           starts the ranks
python -m step_bench.ours FOLDER SETTINGS LINES     is one of them; the first reads what is asked from the file LINES
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rollout_bench.child import open_answers
from rollout_bench.ours import quiet

from step_bench.cases import GROUP_SIZE, KL_COEF, LEARNING_RATE, MAX_NEW_TOKENS, NUM_PROMPTS


def reward(prompt: str, response: str, answer: str) -> float:
    """As the rival's: no work."""
    return float(len(response) % 7)


def recipe_values(folder: str, settings: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """The recipe of all steps, its data being in ``work``."""
    return {
        "name": "bench-step",
        "algorithm": "grpo",
        "run_dir": str(work / "run"),
        "cluster": {"ranks": settings["ranks"], "threads_per_rank": settings["threads"] // settings["ranks"]},
        "model": {"path": folder},
        "data": {"train": str(work / "prompts.jsonl"), "held_out": str(work / "prompts.jsonl")},
        "actor": {"update": {settings["layout"]: settings["ranks"]}, "optimizer": {"lr": LEARNING_RATE}},
        "reward": {"function": "step_bench.ours:reward"},
        "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": MAX_NEW_TOKENS},
        "kl": {"coef": KL_COEF, "estimator": "k3", "place": "loss"},
        "trainer": {
            "steps": 10**6,
            "global_batch_size": NUM_PROMPTS * GROUP_SIZE,
            "micro_batch_tokens": settings["micro_batch_tokens"],
            "num_validation": 1,
        },
    }


def measure_rates(shape: Mapping[str, int], threads: int) -> dict[str, float]:
    """Operations per second of this machine's matrix products: of the model's shapes together, and of a square."""
    import torch
    from rollout_bench.cases import Shape
    from rollout_bench.machine import measure_products, measure_square

    from step_bench.cases import TRAINED_ROWS

    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    model = Shape(**shape)
    heads = model.heads + 2 * model.kv_heads
    sizes = {
        "qkv": (heads * model.head, model.hidden),
        "projection": (model.hidden, model.heads * model.head),
        "gate and up": (2 * model.ffn, model.hidden),
        "down": (model.hidden, model.ffn),
    }
    layers = [(name, torch.rand(size)) for _ in range(model.layers) for name, size in sizes.items()]
    matrices = [*layers, ("output", torch.rand(model.vocab, model.hidden))]
    rates = {
        "flop_per_s": measure_products(matrices, TRAINED_ROWS, repeats=3)["flop_per_s"],
        "square_flop_per_s": measure_square(torch.device("cpu"), torch.float32),
    }
    torch.set_num_threads(threads_before)
    return rates


def start_ranks(num_ranks: int, threads: int, prompts: Sequence[str]) -> int:
    """Write the prompts, start the ranks, and pass standard input on to the first of them."""
    from hybridflow.launch.local import run_local

    with tempfile.TemporaryDirectory() as work:
        lines = Path(work) / "lines"
        os.mkfifo(lines)
        with (Path(work) / "prompts.jsonl").open("w", encoding="utf-8") as rows:
            rows.writelines(json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in prompts)

        def pass_on() -> None:
            with lines.open("w", encoding="utf-8") as asked:
                for line in sys.stdin:
                    asked.write(line)
                    asked.flush()

        threading.Thread(target=pass_on, daemon=True).start()
        program = (sys.executable, "-m", "step_bench.ours", *sys.argv[1:])
        return run_local([str(lines)], num_ranks=num_ranks, threads_per_rank=threads, program=program)


def train(folder: str, settings: dict[str, Any], lines: Path) -> None:
    """Train, step for step, as long as there are lines."""
    answer = open_answers()
    quiet()
    import megatron.core
    import torch

    from hybridflow.parallel.rendezvous import open_store
    from hybridflow.parallel.start import find_start
    from hybridflow.parallel.world import join_world
    from hybridflow.recipe.load import recipe_from_dict
    from hybridflow.rollout.request import Request, expand
    from hybridflow.sampling import rollouts
    from hybridflow.trainer import trainer as trainer_module

    lengths: list[int] = []
    source = lines.open(encoding="utf-8") if os.environ["RANK"] == "0" else None

    def next_asked(source: IO[str]) -> dict[str, Any] | None:
        """The next step that is asked for; what else is asked is answered here. None: no more is."""
        for line in source:
            asked: dict[str, Any] = json.loads(line)
            if asked["do"] == "step":
                return asked
            answer(measure_rates(asked["shape"], settings["threads"]))
        return None

    def expand_forced(request: Request, num: int) -> list[Request]:
        """Responses end after as many tokens as they are to have, whatever the model says."""
        first = request.prompt_index % NUM_PROMPTS * num
        return [
            replace(ask, params=replace(ask.params, max_new_tokens=lengths[first + index], stop_ids=()))
            for index, ask in enumerate(expand(request, num))
        ]

    records: list[Record] = []

    class Record(trainer_module.Record):
        """Keeps what was measured of the last step, without the wait for its turn."""

        measured: dict[str, float]

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            records.append(self)

        def end_step(self, step: int, shares: Any) -> dict[str, float]:
            own = [each._replace(spans=[span for span in each.spans if span[1] != "train_step"]) for each in shares]
            self.measured = super().end_step(step, own)
            return self.measured

    class Turns(trainer_module.Decisions):
        """Lets a step begin when it is asked for."""

        began_s = began_cpu_s = 0.0

        def next_step(self) -> dict[str, int] | None:
            found = self._found()
            if source is not None:
                answer(found)
            asked = self._everyone.decide("what is to be done", None if source is None else next_asked(source))
            if asked is None:
                # Nobody wants another one.
                os._exit(0)
            lengths[:] = asked["lengths"]
            # The wait was not the step's.
            records[-1].begin_step(self._progress.step, None)
            self.began_s, self.began_cpu_s = time.perf_counter(), time.process_time()
            return super().next_step()

        def _found(self) -> dict[str, Any]:
            """What there is to say before the next line."""
            if self._progress.step:
                measured = records[-1].measured
                step_s = time.perf_counter() - self.began_s
                times = {name: value for name, value in measured.items() if name.startswith("time/")}
                # With what comes behind a step's own clock: writing down its metrics.
                times["time/control_s"] += step_s - times.pop("time/step_s")
                train = self._job.train
                num_prompt_tokens = sum(len(train.prompt(prompt_index)) for prompt_index in range(train.num_rows))
                num_tokens = int(measured["batch/num_tokens"]) - num_prompt_tokens * GROUP_SIZE
                cpu_s = sum(self._everyone.gather(time.process_time() - self.began_cpu_s, "processor time"))
                return {"step_s": step_s, "cpu_s": cpu_s, "num_tokens": num_tokens, "times": times}
            return {"versions": {"torch": torch.__version__, "megatron-core": megatron.core.__version__}}

    rollouts.expand = expand_forced
    trainer_module.Record, trainer_module.Decisions = Record, Turns
    start = find_start()
    world = join_world(start, open_store(start, start_deadline_s=300.0), deadline_s=3600.0, start_deadline_s=300.0)
    trainer_module.train(recipe_from_dict(recipe_values(folder, settings, lines.parent)), world)


def main() -> int:
    """Start the ranks, or be one."""
    folder, settings = sys.argv[1], json.loads(sys.argv[2])
    if len(sys.argv) == 3:
        return start_ranks(settings["ranks"], settings["threads"] // settings["ranks"], settings["prompts"])
    train(folder, settings, Path(sys.argv[3]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
