"""The command ``hybridflow init``: it writes a short recipe and a reward function to begin with. No torch."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hybridflow.config.recipe import Recipe
from hybridflow.data.chat import template_in
from hybridflow.data.images import IMAGES
from hybridflow.errors import ConfigError, DataError, WriteError
from hybridflow.exit_status import DONE
from hybridflow.families.hub_cache import data_set_hint, download_hint, find_model
from hybridflow.families.images import reads_images
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.launch.init_fields import fields_in, first_row
from hybridflow.observe.console import complain
from hybridflow.observe.files import replace_file, writing
from hybridflow.plugins import split_name
from hybridflow.recipe.defaults import one_line
from hybridflow.recipe.load import recipe_from_dict
from hybridflow.recipe.nested import put_under
from hybridflow.recipe.other_names import algorithm_hint

EXAMPLES = """examples:
  hybridflow init
  hybridflow init --algorithm grpo --model models/Qwen2.5-0.5B-Instruct --data data/train.jsonl
  hybridflow init dpo.yaml --algorithm dpo --model models/Qwen3-4B --data pairs.jsonl --held-out more.jsonl --ranks 8
  hybridflow init --algorithm ppo --model models/llama --data data/train.jsonl --reward mine:score --nodes 2 --force

exit status: 0 written; 2 the request is wrong; 4 a file is there already, or cannot be written
"""

_SHOWN = (
    *("actor.optimizer.lr", "critic.optimizer.lr", "rollout.group_size", "rollout.max_new_tokens"),
    *("trainer.steps", "trainer.global_batch_size"),
)
"""Settings that users change first."""

_HEAD = '''"""Scores responses. `hybridflow train` imports this file from the directory in which it is started."""

'''

_SCORE = '''from difflib import SequenceMatcher


def {name}(prompt: str, response: str, answer: str) -> float:
    """Return how good a response is: any finite number, larger is better. Change it to what you want."""
    said, right = response.strip(), str(answer).strip()
    if not right:
        # The row has no answer. Short responses are better, until you say what is.
        return -len(said) / 1000
    if said == right:
        return 1.0
    # Part of a point for what is nearly right, so that there is something to learn from early on.
    return 0.5 * SequenceMatcher(None, said, right).ratio()
'''

_COST = '''
def {name}(prompt: str, response: str, answer: str) -> float:
    """Return how harmful a response is. `lagrange.limit` is the mean that is allowed. Here long responses cost."""
    return len(response) / 100
'''


def add_init(commands: Any) -> None:
    """Add the sub-command to those of a parser."""
    parser = commands.add_parser(
        "init",
        help="write a recipe and a reward function to begin with",
        description="Write a short recipe and, where responses are scored, a Python file with a reward function. On a "
        "terminal, the command asks unless --algorithm, --model and --data are given. `hybridflow train FILE` runs the "
        "recipe.",
        epilog=EXAMPLES,
    )
    parser.add_argument("file", nargs="?", default="recipe.yaml", help="recipe to write (default: recipe.yaml)")
    parser.add_argument("--algorithm", metavar="NAME", help=f"one of {', '.join(ALGORITHMS)}")
    parser.add_argument("--model", metavar="DIR", help="model to train: a directory, or a name in Hugging Face's cache")
    parser.add_argument("--data", metavar="FILE", help="training data")
    parser.add_argument("--held-out", metavar="FILE", help="data for validation")
    parser.add_argument(
        "--reward",
        metavar="NAME",
        help="MODULE:FUNCTION, whose file is written unless it is there, or a reward of hybridflow such as exact_match "
        "(default: rewards:score)",
    )
    parser.add_argument("--teacher", metavar="DIR", help="directory of the model that distill learns from")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks (default: all GPUs, or the launcher's)")
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes that the ranks are on")
    parser.add_argument("--force", action="store_true", help="write over a recipe that is there; never over a reward")
    parser.set_defaults(run=_init)


def _init(arguments: argparse.Namespace) -> int:
    path = Path(arguments.file)
    if path.exists() and not arguments.force:
        raise WriteError(f"{path}: is there already; give another file, or --force to write over it")
    _answer(arguments, is_asked=sys.stdin.isatty())
    values = _values(arguments)
    recipe = recipe_from_dict(values, source=str(path))
    functions = _functions_of(values, is_named=arguments.reward is not None)
    for file, text in {path: _recipe_text(path, values, recipe, arguments.nodes), **functions}.items():
        _write(file, text)
    print(f"wrote {' and '.join(map(str, (path, *functions)))}; next: {_command(path, arguments.nodes)}")
    return DONE


def _answer(arguments: argparse.Namespace, *, is_asked: bool) -> None:
    """Fill in what no option gave, by asking or with a default.

    Raises:
        ConfigError: Something is missing and nobody can be asked, or an option is wrong.
    """
    needed = {
        "algorithm": ("algorithm, such as grpo, ppo, sft or dpo", _known_algorithm),
        "model": ("model: a directory, or a name in Hugging Face's cache", _is_model("--model")),
        "data": ("training data", _there("--data")),
    }
    if not is_asked:
        missing = [f"--{name}" for name in needed if getattr(arguments, name) is None]
        if missing:
            raise ConfigError(f"init: {', '.join(missing)}: missing; give them, or start on a terminal to be asked")
    has_all = all(getattr(arguments, name) is not None for name in needed)
    for name, (question, check) in needed.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, _ask(question, check))
        check(getattr(arguments, name))
    if arguments.algorithm == "distill" and arguments.teacher is None:
        if not is_asked:
            raise ConfigError("init: --teacher: missing; algorithm=distill learns from a model, name its directory")
        arguments.teacher = _ask("directory of the teacher", _is_model("--teacher"))
    if is_asked and not has_all:
        _ask_for_more(arguments)
    for name, check in (("held_out", _there("--held-out")), ("teacher", _is_model("--teacher"))):
        if getattr(arguments, name) is not None:
            check(getattr(arguments, name))
    for name in ("ranks", "nodes"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: expected a number of at least 1")


def _ask_for_more(arguments: argparse.Namespace) -> None:
    """Ask for what has a default: nothing, or what ``_values`` takes."""
    if arguments.held_out is None:
        arguments.held_out = _ask("data for validation (Enter: none)", _optional(_there("--held-out"))) or None
    if arguments.reward is None and _is_scored(arguments.algorithm):
        arguments.reward = _ask("reward (Enter: rewards:score)", _optional(lambda text: None)) or None
    if arguments.ranks is None and arguments.nodes is None:
        text = _ask("ranks (Enter: all GPUs, or what the launcher starts)", _optional(_is_number))
        arguments.ranks = int(text) if text else None


def _ask(question: str, check: Callable[[str], None]) -> str:
    """Return an answer that passes a check; asks again until one does."""
    while True:
        try:
            answer = input(f"{question}: ").strip()
        except EOFError:
            raise ConfigError(f"init: {question}: no answer; give it, or use options (--help)") from None
        try:
            check(answer)
        except ConfigError as error:
            complain(error)
        else:
            return answer


def _known_algorithm(text: str) -> None:
    if text not in ALGORITHMS:
        hint = algorithm_hint(text)
        raise ConfigError(f"--algorithm {text!r}: {hint}expected one of {', '.join(ALGORITHMS)}")


def _there(option: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        if "*" not in text and "://" not in text and not os.path.exists(text):
            raise ConfigError(
                f"{option} {text!r}: no such file or directory; name one that is there{data_set_hint(text)}"
            )

    return check


def _is_model(option: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        if not find_model(text).exists():
            raise ConfigError(f"{option} {text!r}: no such directory; name one that is there{download_hint(text)}")

    return check


def _is_number(text: str) -> None:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"found {text!r}, expected a number of at least 1")


def _optional(check: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: check(text) if text else None


def _is_scored(algorithm: str) -> bool:
    """Return whether training, and not only validation, needs a reward."""
    traits = ALGORITHMS[algorithm].traits
    return "reward" in traits.reads and not traits.is_offline and "teacher" not in traits.reads


def _values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the recipe's keys, in the order of the file."""
    data: dict[str, Any] = {"train": arguments.data, **_fields(arguments)}
    if arguments.held_out is not None:
        data["held_out"] = arguments.held_out
    if _has_chat_template(find_model(arguments.model)):
        data["prompt_as_message"] = True
    values = {
        "algorithm": arguments.algorithm,
        "model": arguments.model,
        "data": data if len(data) > 1 else arguments.data,
    }
    if arguments.reward is not None and not _is_scored(arguments.algorithm):
        raise ConfigError(f"--reward {arguments.reward}: algorithm={arguments.algorithm} scores nothing; remove it")
    if _is_scored(arguments.algorithm):
        values["reward"] = "rewards:score" if arguments.reward is None else arguments.reward
    if "cost" in ALGORITHMS[arguments.algorithm].traits.needs:
        values["cost"] = {"function": "costs:cost"}
    if arguments.teacher is not None:
        values["teacher"] = {"model": {"path": arguments.teacher}}
    if arguments.ranks is not None:
        values["cluster"] = {"ranks": arguments.ranks}
        if arguments.nodes is not None:
            if arguments.ranks % arguments.nodes:
                raise ConfigError(
                    f"--ranks {arguments.ranks} does not fill --nodes {arguments.nodes}; give a multiple of it"
                )
            values["cluster"]["ranks_per_node"] = arguments.ranks // arguments.nodes
    return values


def _fields(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the keys that name fields of the data; warn of those that it lacks."""
    try:
        row = first_row(arguments.data)
    except (DataError, OSError) as error:
        # The recipe is right once the data are.
        complain(str(error))
        return {}
    if row is None:
        return {}
    named, lacking = fields_in(row, ALGORITHMS[arguments.algorithm].traits)
    if row.get(IMAGES) and reads_images(str(find_model(arguments.model))):
        named["images_field"] = IMAGES
    there = f"{arguments.data}: its first row has the fields {', '.join(map(repr, sorted(row)))}"
    needed = [f"data.{key}" for key in lacking if key != "answer_field"]
    if needed:
        complain(f"{there}; set {' and '.join(needed)} in the recipe to the names of yours")
    elif lacking:
        complain(f"{there}, and none known for an answer; set data.answer_field in the recipe, or rewards get none")
    return named


def _has_chat_template(model: Path) -> bool:
    """Return whether a directory of Hugging Face has a chat template: the model expects messages."""
    try:
        return template_in(model) is not None
    except DataError:
        # Training reads it again, and says what is wrong.
        return False


def _functions_of(values: Mapping[str, Any], *, is_named: bool) -> dict[Path, str]:
    """Return the files of the functions that a recipe names and that are not there, and what is to be in them.

    A reward that the user has named may be one that is installed.

    Raises:
        ConfigError: A file is there, without its function.
    """
    found = {}
    for named, body in ((values.get("reward", ""), _SCORE), (values.get("cost", {}).get("function", ""), _COST)):
        module, name = split_name(named)
        path = Path(*module.split(".")).with_suffix(".py") if ":" in named else None
        if path is None or (is_named and not path.is_file() and _is_installed(module)):
            continue
        if not path.is_file():
            found[path] = _HEAD + body.format(name=name)
        elif name not in _defined(path):
            raise ConfigError(f"{path}: does not define {name}; define it, or give another --reward")
    return found


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _defined(path: Path) -> set[str]:
    """Return the names that a Python file defines or imports at its top level."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as Python: {error}; mend it, or give another --reward") from None
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _recipe_text(path: Path, values: Mapping[str, Any], recipe: Recipe, nodes: int | None) -> str:
    """Return the recipe: its keys with a word on each, and the defaults that users change first."""
    plan = shlex.join(["hybridflow", "plan", "job", str(path), *([] if nodes is None else ["--nodes", str(nodes)])])
    lines = [f"# Run it: {_command(path, nodes)}", f"# What it leaves out has defaults: {plan}"]
    comments = _comments(values)
    for key, value in values.items():
        comment = comments.get(key)
        lines.append(one_line(key, value) + (f"  # {comment}" if comment else ""))
    shown: dict[str, Any] = {}
    for key in _SHOWN:
        # One token: nothing is sampled.
        if key in recipe.defaults and recipe.defaults[key] != 1:
            put_under(shown, key, recipe.defaults[key])
    lines += ["# Defaults that you may want to change:"] if shown else []
    lines += [f"# {one_line(key, value)}" for key, value in shown.items()]
    return "\n".join(lines) + "\n"


def _command(path: Path, nodes: int | None) -> str:
    file = shlex.quote(str(path))
    return (
        f"hybridflow train {file}"
        if nodes is None
        else f"hybridflow launch slurm {file} --nodes {nodes} --time 24:00:00"
    )


def _comments(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a word on the keys of a recipe."""
    module, name = split_name(values.get("reward", ""))
    # A file that is there may ask for something else.
    is_there = name and (Path(*module.split(".")).with_suffix(".py").is_file() or _is_installed(module))
    form = name if is_there else f"{name}(prompt, response, answer)"
    is_chat = isinstance(values["data"], dict) and "prompt_as_message" in values["data"]
    return {
        "model": "a directory" if os.path.exists(values["model"]) else "in Hugging Face's cache",
        "data": "prompts go through the model's chat template" if is_chat else "",
        "reward": f"{form}, larger is better" if name else "",
        "cost": "smaller is better; lagrange.limit is the mean that is allowed",
        "teacher": "its distribution is learned",
    }


def _write(path: Path, text: str) -> None:
    with writing(path, "give another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
