"""The commands ``hybridflow generate`` and ``hybridflow serve``. Light at import."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.config.cluster import ClusterConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.families.hub_cache import find_model
from hybridflow.launch.local import run_local
from hybridflow.parallel.rank import MEETING_VARIABLE, run_rank, silence_libraries
from hybridflow.parallel.signals import CaughtSignals
from hybridflow.parallel.start import find_start, is_launched
from hybridflow.serving.files import sampling_of
from hybridflow.serving.results import check_free

if TYPE_CHECKING:
    from hybridflow.parallel.world import World

Load = Callable[[], "Callable[[World], int]"]

_GRACE_MARGIN_S = 30.0

_GENERATE_EXAMPLES = """examples:
  hybridflow generate --model models/sums --prompts prompts.jsonl --out answers.jsonl --max-new-tokens 64
  hybridflow generate --model models/sums --prompts prompts.jsonl --out answers.h5 -n 8 --temperature 0.7 --log-probs
  hybridflow generate --model runs/quickstart --prompts prompts.jsonl --out answers.jsonl
  hybridflow generate --model models/sums --prompts prompts.jsonl --out answers.jsonl --ranks 4 --layout tp2.dp2
  hybridflow generate --model models/sums --prompts prompts.jsonl --out answers.jsonl --dry-run
  srun --ntasks 8 hybridflow generate --model models/sums --prompts prompts.jsonl --out answers.jsonl --layout tp2.dp4

a line of the prompts: {"prompt": "1+1=", "id": 7, "sampling": {"temperature": 0.2, "n": 4}}. Instead of prompt, a line
  may have prompt_ids (token ids) or messages (a conversation, perhaps with chat_template_kwargs). With --images-field
  images it may have images: {"prompt": [{"role": "user", "content": "<image>How many?"}], "images": ["7.png"]}. After
  a kill or a signal the same command continues.

exit status: 0 all samples are generated; 1 some samples failed; 2 the request is wrong; 3 a checkpoint is damaged;
  4 a file cannot be written; 75 stopped, finished samples are kept: run the same command again
"""

_SERVE_EXAMPLES = """examples:
  hybridflow serve --model models/sums
  hybridflow serve --model models/sums --port 8001 --ranks 2 --layout tp2
  hybridflow serve --model models/sums --host 0.0.0.0 --token-env SERVE_TOKEN
  srun --ntasks 4 hybridflow serve --model models/sums --layout tp2.dp2 --host 0.0.0.0 --token-env SERVE_TOKEN

exit status: 0 asked to end by SIGTERM or SIGINT, 2 an error in what was asked for, else as for hybridflow train
"""


_Options = tuple[tuple[str, Callable[[str], object], str | None, object, str], ...]
"""Option, its type, the name of its value, default, help."""

_SAMPLING_NUMBERS: _Options = (
    ("-n", int, "N", None, "samples of each prompt (default: 1)"),
    ("--max-new-tokens", int, "N", 256, "longest response in tokens (default: 256)"),
    ("--min-new-tokens", int, "N", None, "shortest response in tokens (default: 0)"),
    ("--temperature", float, "X", None, "divide the logits by X; 0: greedy (default: 1)"),
    ("--top-k", int, "K", None, "keep the K likeliest tokens (default: 0, all)"),
    ("--top-p", float, "P", None, "keep the likeliest tokens that together reach P (default: 1, all)"),
    ("--min-p", float, "P", None, "keep tokens at least P times as likely as the likeliest (default: 0, all)"),
    ("--repetition-penalty", float, "X", None, "divide logits of tokens in prompt and response by X (default: 1)"),
    ("--presence-penalty", float, "X", None, "subtract X from logits of sampled tokens (default: 0)"),
    ("--frequency-penalty", float, "X", None, "subtract X for each time that a token was sampled (default: 0)"),
)

_MODEL: _Options = (
    ("--ranks", int, "N", 1, "ranks to start on this machine (default: 1)"),
    ("--threads", int, "N", None, "CPU threads of each rank (default: 1, or OMP_NUM_THREADS with one rank)"),
    ("--layout", str, "LAYOUT", None, "such as tp2.pp1.dp2 (default: each rank has the whole model)"),
    ("--max-context", int, "N", None, "longest sequence in tokens (default: the model's)"),
    (
        "--image-max-pixels",
        int,
        "N",
        None,
        "most pixels of an image; a larger one is made smaller (default: as the model's settings say)",
    ),
    ("--max-concurrent", int, "N", 64, "sequences decoded together (default: 64)"),
    (
        "--cache-memory",
        float,
        "X",
        0.5,
        "memory of each rank's key-value cache: bytes, or below 1 a share of the free memory (default: 0.5)",
    ),
)

_SERVER: _Options = (
    ("--name", str, "NAME", None, "what clients call the model (default: its directory's name)"),
    ("--host", str, None, "127.0.0.1", "address to listen on (default: 127.0.0.1); another needs --token-env"),
    ("--port", int, None, 8000, "0 for a free one (default: 8000)"),
    ("--token-env", str, "VARIABLE", None, "environment variable with the token that clients must send"),
    ("--seed", int, "N", None, "of the noise (default: another at each start)"),
    ("--max-waiting", int, "N", 1024, "most samples open at one time; more are refused with 429 (default: 1024)"),
    ("--request-s", float, "S", 600.0, "longest time of a request, in seconds (default: 600)"),
    ("--grace-s", float, "S", 30.0, "time for open requests after SIGTERM, in seconds (default: 30)"),
)


def add_serving(commands: Any) -> None:
    """Add both sub-commands to those of a parser."""
    _add_generate(commands)
    _add_serve(commands)


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="answer the prompts of a file with a model",
        description="Answer each prompt of a file. Without a launcher, start --ranks ranks on this machine; under "
        "torchrun, mpirun or srun, join the ranks that are there. Finished samples are kept in OUT.parts, and the same "
        "command continues from there.",
        epilog=_GENERATE_EXAMPLES,
    )
    _add_model(generate)
    generate.add_argument(
        "--prompts",
        required=True,
        type=Path,
        metavar="FILE",
        help="JSON lines, Parquet, a directory of datasets, or HDF5 with the strings in `prompt`",
    )
    generate.add_argument(
        "--prompt-field",
        default="prompt",
        metavar="NAME",
        help="field of the file that holds the prompt (default: prompt); outer.inner names a field of a field",
    )
    generate.add_argument(
        "--images-field",
        metavar="NAME",
        help="field of the file that holds the images of a prompt, as data.images_field of a recipe (default: prompts "
        "are text)",
    )
    generate.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="JSON lines; HDF5 if the name ends in .h5 or .hdf5"
    )
    generate.add_argument(
        "--force", action="store_true", help="replace an existing output, and the parts of another command"
    )
    generate.add_argument("--strict", action="store_true", help="stop if a prompt cannot be answered")
    generate.add_argument("--dry-run", action="store_true", help="check everything, print what would be done, and stop")
    _add_sampling(generate)
    generate.set_defaults(run=_generate)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling, for prompts without their own parameters")
    _add_options(group, _SAMPLING_NUMBERS)
    group.add_argument("--greedy", action="store_true", default=None, help="take the likeliest token")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end a response at TEXT; repeat for several texts"
    )
    group.add_argument("--bad", action="append", metavar="TEXT", help="never sample TEXT; repeat for several texts")
    group.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the noise (default: 1)")
    group.add_argument("--log-probs", action="store_true", help="write the log-probability of each token")
    group.add_argument(
        "--prompt-log-probs", action="store_true", help="write the log-probability of each token of the prompt"
    )


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's interface has it",
        description="Serve /v1/completions, /v1/chat/completions, /v1/models and /health, on this machine alone unless "
        "told otherwise. Requests join and leave the running batch at any token. A chat may have images, inside the "
        "request, if the model reads some. It takes pip install 'hybridflow[serve]'.",
        epilog=_SERVE_EXAMPLES,
    )
    _add_model(serve)
    _add_options(serve, _SERVER)
    serve.set_defaults(run=_serve)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        type=find_model,
        metavar="DIR",
        help="Hugging Face directory, a name in Hugging Face's cache, a run (its latest checkpoint), or a checkpoint "
        "of hybridflow or Megatron",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="tokenizer (default: the model's own)")
    parser.add_argument(
        "--chat-template-kwargs",
        type=_kwargs,
        default={},
        metavar="JSON",
        help="variables of the chat template, such as '{\"enable_thinking\": false}' for Qwen3 (default: none)",
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="number format (default: the model's)")
    _add_options(parser, _MODEL)


def _kwargs(text: str) -> dict[str, Any]:
    from hybridflow.data.chat import read_kwargs

    try:
        return read_kwargs(json.loads(text), "JSON")
    except (ValueError, RecursionError, DataError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _add_options(group: argparse._ActionsContainer, options: _Options) -> None:
    for flag, kind, metavar, default, text in options:
        group.add_argument(flag, type=kind, metavar=metavar, default=default, help=text)


def _generate(arguments: argparse.Namespace) -> int:
    _check_numbers(arguments)
    if arguments.image_max_pixels is not None and arguments.images_field is None:
        raise ConfigError("--image-max-pixels: is for images; give --images-field too, or leave it out")
    if arguments.dry_run:
        silence_libraries()
        from hybridflow.serving.batch import dry_run

        return dry_run(arguments)

    def load() -> Callable[[World], int]:
        from hybridflow.serving.batch import generate

        return lambda world: generate(arguments, world)

    def check() -> None:
        sampling_of(arguments)
        if not arguments.prompts.exists():
            raise DataError(f"--prompts {arguments.prompts}: there is no such file")
        check_free(arguments.out, is_forced=arguments.force)

    return _start(arguments, check, load)


def _serve(arguments: argparse.Namespace) -> int:
    _check_numbers(arguments)
    from hybridflow.serving.endpoint import is_loopback, token_of

    token_of(arguments)
    if not is_loopback(arguments.host) and arguments.token_env is None:
        raise ConfigError(
            f"--host {arguments.host}: others than this machine's users could reach it; give --token-env VARIABLE, "
            "with a token in that environment variable"
        )

    def load() -> Callable[[World], int]:
        from hybridflow.serving.serve import serve

        return lambda world: serve(arguments, world)

    return _start(arguments, lambda: None, load, save_s=arguments.grace_s + _GRACE_MARGIN_S, is_server=True)


def _start(
    arguments: argparse.Namespace,
    check: Callable[[], None],
    load: Load,
    *,
    save_s: float | None = None,
    is_server: bool = False,
) -> int:
    """Run as a rank, or start ranks on this machine, after the checks that need no ranks."""
    # hybridflow's own launcher passes on the first Ctrl-C.
    is_passed = MEETING_VARIABLE in os.environ
    signals = CaughtSignals(asks_at_interrupt=is_passed, speaks=False) if is_launched() else None
    start = find_start()
    if start.launcher == "alone":
        check()
        if arguments.ranks > 1:
            return run_local(
                arguments.words,
                num_ranks=arguments.ranks,
                threads_per_rank=1 if arguments.threads is None else arguments.threads,
                save_s=save_s,
            )
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    return run_rank(start, CaughtSignals() if signals is None else signals, load, ClusterConfig())


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Refuse numbers that no use has.

    Raises:
        ConfigError: Names the first.
    """
    least: dict[str, float] = {"ranks": 1, "threads": 1, "max_concurrent": 1, "max_context": 2}
    least |= {"max_waiting": 1, "seed": 0, "grace_s": 0, "port": 0, "image_max_pixels": 1}
    for name, bound in least.items():
        value = getattr(arguments, name, None)
        if value is not None and not value >= bound:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected at least {bound:g}")
    for name in ("cache_memory", "request_s"):
        value = getattr(arguments, name, None)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected more than 0")
    if getattr(arguments, "port", 0) > 65535:
        raise ConfigError(f"--port {arguments.port}: expected at most 65535")
    variable = getattr(arguments, "token_env", None)
    if variable is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        # It is not repeated: it may be the token itself.
        raise ConfigError("--token-env: expected the name of an environment variable, such as SERVE_TOKEN")
