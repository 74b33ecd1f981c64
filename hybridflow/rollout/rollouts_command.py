"""``hybridflow rollouts``: what a run has sampled, for a person to read or to train on. Light at import."""

from __future__ import annotations

import argparse
import heapq
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.errors import ConfigError, DataError
from hybridflow.observe.rank_log import LOGS_DIR
from hybridflow.observe.starts import RECIPE_FILE, kept_recipe
from hybridflow.rollout.export import KINDS, Export, as_lines
from hybridflow.rollout.request import OBSERVED
from hybridflow.sections import read_yaml

if TYPE_CHECKING:
    from hybridflow.data.tokenizer import Tokenizer
    from hybridflow.rollout.archive import Archived

_EXAMPLES = """examples:
  hybridflow rollouts runs/grpo
  hybridflow rollouts runs/grpo --worst
  hybridflow rollouts runs/grpo --best --steps 50-60 --number 3
  hybridflow rollouts runs/grpo --grep '\\b42\\b'
  hybridflow rollouts runs/grpo --json | jq -c '[.step, .score, .response]'
  hybridflow rollouts runs/grpo --export best.jsonl --as sft --min-score 1
  hybridflow rollouts runs/grpo --export pairs.jsonl --as dpo --steps 50-60

A run archives samples of two prompts of at most 100 steps, and with rollout.archive=true all samples. A sample enters
the archive when the next checkpoint is complete. --export writes
the samples of all steps, unless --steps names some.

exit status: 0 shown (also if nothing matches) or written; 2 the run has no archive or no tokenizer, or there is nothing
  to write; 3 a file is damaged; 4 the file cannot be written
"""

_NUMBER = 10


def add_rollouts(commands: Any) -> None:
    """Add it to the sub-commands of a parser."""
    rollouts = commands.add_parser(
        "rollouts",
        help="show or export the samples of a run",
        description="Print samples of a run's archive: prompt, response, score, and the weights that sampled them. "
        "Without --best, --worst, --grep or --steps, print those of the last step. --export writes samples as rows "
        "to train on.",
        epilog=_EXAMPLES,
    )
    rollouts.add_argument("run_dir", type=Path, metavar="RUN", help="directory of a run")
    order = rollouts.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="samples with the highest scores, best first")
    order.add_argument("--worst", action="store_true", help="samples with the lowest scores, worst first")
    rollouts.add_argument("--grep", metavar="REGEX", help="samples whose prompt or response matches")
    rollouts.add_argument("--steps", metavar="N[-M]", help="samples of these training steps only")
    rollouts.add_argument("--number", type=int, metavar="N", help=f"most samples to print (default: {_NUMBER})")
    rollouts.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer of the run, if the run directory has none"
    )
    rollouts.add_argument("--json", action="store_true", help="print JSON, one object per sample and line, with tokens")
    rollouts.add_argument(
        "--export", type=Path, metavar="FILE", help="write JSON lines for data.train; print no samples"
    )
    rollouts.add_argument(
        "--as",
        dest="kind",
        choices=KINDS,
        help="with --export: sft, the best response to each prompt, with an environment the best conversation; dpo, "
        "the best and the worst response of each group; kto, every response and whether it is wanted",
    )
    rollouts.add_argument(
        "--min-score",
        type=float,
        metavar="SCORE",
        help="with --export: lowest score of a response that is to be imitated, preferred or wanted",
    )
    rollouts.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: An option is wrong, or the run has no archive.
        DataError: There is no run, no tokenizer, or no row to be written.
        CheckpointError: The archive is damaged.
        WriteError: The file cannot be written.
    """
    from hybridflow.data.tokenizer import open_tokenizer
    from hybridflow.observe.console import print_out
    from hybridflow.observe.status import check_run
    from hybridflow.rollout.archive import list_segments

    _check_export(arguments)
    _check_numbers(arguments)
    steps, pattern = _steps(arguments.steps), _pattern(arguments.grep)
    folder = arguments.run_dir / "rollouts"
    if not list_segments(folder):
        check_run(arguments.run_dir)
        raise ConfigError(
            f"{folder}: holds no archive; samples enter it with each checkpoint, unless rollout.archive=false, or "
            "the run learns from given responses"
        )
    tokenizer = open_tokenizer(
        find_tokenizer(arguments.run_dir) if arguments.tokenizer is None else arguments.tokenizer
    )
    if arguments.export is not None:
        return _export(arguments, folder, steps, pattern, tokenizer)
    if steps is None and not (arguments.best or arguments.worst or pattern):
        last = _last_step(folder)
        steps = range(last, last + 1)
    chosen = _choose(_matching(folder, steps, pattern, tokenizer), arguments)
    lines = [_as_json(each, tokenizer) if arguments.json else _as_text(each, tokenizer) for each in chosen]
    if lines:
        print_out("\n".join(lines) if arguments.json else "\n\n".join(lines))
    else:
        print("hybridflow: no sample matches", file=sys.stderr, flush=True)
    return 0


def _check_export(arguments: argparse.Namespace) -> None:
    """Refuse options of which one would be ignored."""
    if (arguments.export is None) != (arguments.kind is None):
        raise ConfigError(f"--export FILE and --as {'|'.join(KINDS)}: one was given without the other; give both")
    shown = [name for name in ("best", "worst", "number", "json") if getattr(arguments, name) not in (None, False)]
    if arguments.export is not None and shown:
        raise ConfigError(f"--{shown[0]}: says what is shown, and with --export nothing is; leave it out")
    if arguments.export is None and arguments.min_score is not None:
        raise ConfigError("--min-score: is for --export; to see the best samples give --best")


def _check_numbers(arguments: argparse.Namespace) -> None:
    if arguments.number is not None and arguments.number < 1:
        raise ConfigError(f"--number {arguments.number}: expected at least 1")
    if arguments.min_score is not None and math.isnan(arguments.min_score):
        raise ConfigError("--min-score nan: expected a number; no score reaches it")


def _export(
    arguments: argparse.Namespace,
    folder: Path,
    steps: range | None,
    pattern: re.Pattern[str] | None,
    tokenizer: Tokenizer,
) -> int:
    """Write rows, all of them or none."""
    from hybridflow.observe.files import named_file, replace_by_pieces, writing

    out = named_file(arguments.export, "--export")
    rollout = _rollout_section(arguments.run_dir)
    stop, has_environment = list(rollout.get("stop", ())), rollout.get("environment") is not None
    export = Export(arguments.kind, tokenizer, arguments.min_score, stop, has_environment=has_environment)
    rows = export.rows(_matching(folder, steps, pattern, tokenizer))
    with writing(arguments.export, "give --export another file"):
        replace_by_pieces(out, as_lines(rows))
    left_out = f"; left out: {export.told()}" if export.left_out else ""
    print(f"hybridflow: wrote {len(rows)} rows to {arguments.export}{left_out}", file=sys.stderr, flush=True)
    if stop and any("solution" in row for row in rows):
        told = (
            f"hybridflow: to train on the tokens that were sampled, set rollout.stop={json.dumps(stop)}, as in the run"
        )
        print(told, file=sys.stderr, flush=True)
    return 0


def _rollout_section(run_dir: Path) -> dict[str, Any]:
    """Return ``rollout`` of a run, from the recipe of its last start. A resumed run has the same ``stop``.

    Raises:
        ConfigError: It kept no recipe.
    """
    kept = kept_recipe(run_dir)
    recipe = None if kept is None else read_yaml(kept)
    if not isinstance(recipe, dict) or not isinstance(recipe.get("rollout"), dict):
        raise ConfigError(
            f"{run_dir}: {LOGS_DIR}/*/{RECIPE_FILE} is missing or no recipe, so the texts that ended responses "
            "(rollout.stop) are not known; copy the run's logs too"
        )
    rollout: dict[str, Any] = recipe["rollout"]
    return rollout


def _matching(
    folder: Path, steps: range | None, pattern: re.Pattern[str] | None, tokenizer: Tokenizer
) -> Iterator[Archived]:
    for sample in _samples(folder, steps):
        texts = (sample.prompt, sample.response)
        if pattern is None or any(pattern.search(tokenizer.decode(tokens)) for tokens in texts):
            yield sample


def _steps(text: str | None) -> range | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,15})(?:-([0-9]{1,15}))?", text)
    if match is None:
        raise ConfigError(f"--steps {text}: expected a step, or the first and the last, such as 10-20")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ConfigError(f"--steps {text}: the last step is before the first; give {last}-{first}")
    return range(first, last + 1)


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(f"--grep {text!r}: no regular expression: {error}") from None


def find_tokenizer(run_dir: Path) -> Path:
    """Return the path of the run's own tokenizer, or that of its checkpoints.

    Raises:
        DataError: There is none.
    """
    from hybridflow.data.tokenizer import tokenizer_in

    for folder in (run_dir, *sorted(run_dir.glob("checkpoints/*/actor")), run_dir / "checkpoints/reference"):
        if (found := tokenizer_in(folder)) is not None:
            return found
    raise DataError(f"{run_dir}: holds no tokenizer; give the run's own with --tokenizer")


def _last_step(folder: Path) -> int:
    """Return the last step with samples; the names of segments also count steps of which nothing is archived."""
    from hybridflow.rollout.archive import list_segments, read_places

    last = 0
    for name in sorted(list_segments(folder), key=lambda each: -each.last):
        if name.last <= last:
            break
        last = max(last, int(read_places(folder, name)["step"].max()))
    return last


def _samples(folder: Path, steps: range | None) -> Iterator[Archived]:
    """Yield the samples of some steps, or of all, one segment at a time."""
    from hybridflow.rollout.archive import list_segments, read_segment

    for name in list_segments(folder):
        if steps is None or (name.first < steps.stop and name.last >= steps.start):
            yield from (each for each in read_segment(folder, name) if steps is None or each.step in steps)


def _choose(samples: Iterator[Archived], arguments: argparse.Namespace) -> list[Archived]:
    number = _NUMBER if arguments.number is None else arguments.number
    if arguments.best:
        return heapq.nlargest(number, _scored(samples), key=lambda each: each.score)
    if arguments.worst:
        return heapq.nsmallest(number, _scored(samples), key=lambda each: each.score)
    return heapq.nsmallest(number, samples, key=lambda each: (each.step, each.prompt_index, each.index))


def _scored(samples: Iterator[Archived]) -> Iterator[Archived]:
    return (each for each in samples if not math.isnan(each.score))


def _as_text(sample: Archived, tokenizer: Tokenizer) -> str:
    weights = sorted({*sample.versions} - {OBSERVED})
    facts = [
        f"step {sample.step}",
        f"prompt {sample.prompt_index}",
        f"sample {sample.index}",
        "score unknown" if math.isnan(sample.score) else f"score {sample.score:g}",
        f"{len(sample.response)} tokens, {'ended by itself' if sample.finish == 'stop' else 'cut at the most tokens'}",
        f"log-probability {sum(sample.log_probs):.2f}",
        f"weights after {'-'.join(map(str, sorted({weights[0], weights[-1]})))} updates" if weights else "empty",
    ]
    texts = {"prompt": sample.prompt, "response": sample.response}
    break_ = "\n" + " " * 12
    shown = [f"  {name:<9} {tokenizer.decode(tokens)}".replace("\n", break_) for name, tokens in texts.items()]
    return "\n".join([" | ".join(facts), *shown])


def _as_json(sample: Archived, tokenizer: Tokenizer) -> str:
    texts = {"prompt": tokenizer.decode(sample.prompt), "response": tokenizer.decode(sample.response)}
    tokens = {"prompt_tokens": sample.prompt, "response_tokens": sample.response}
    # JSON has no NaN: a score, or what an engine does not tell of a token, is null.
    known = {name: _known(getattr(sample, name)) for name in ("log_probs", "sampled_log_probs")}
    score = _known([sample.score])[0]
    row = {**sample._asdict(), **tokens, **texts, **known, "score": score}
    return json.dumps(row, ensure_ascii=False, allow_nan=False)


def _known(numbers: list[float]) -> list[float | None]:
    return [None if math.isnan(number) else number for number in numbers]
