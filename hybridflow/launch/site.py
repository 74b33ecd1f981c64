"""What is particular to a cluster: account, partition, modules, container. One YAML file, read once by each launch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from hybridflow.errors import ConfigError
from hybridflow.sections import Bounds, CountOrZero, ListedCount, Positive, read_section, read_yaml, to_dict

SITE_FILE = Path("~/.config/hybridflow/site.yaml")


@dataclass(frozen=True, kw_only=True)
class Container:
    """The container that every rank runs in.

    Attributes:
        kind: ``apptainer`` runs the command by ``apptainer exec``; ``pyxis`` gives ``srun`` the options of NVIDIA's
            plugin, which uses Enroot.
        image: A file, or another image name that the container runtime accepts.
        mounts: Each ``HOST:CONTAINER`` or ``HOST``; the working directory, the run directory, the directories of
            absolute paths in the recipe and the cache of Hugging Face are always mounted.
    """

    kind: Literal["none", "apptainer", "pyxis"] = "none"
    image: str | None = None
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Site:
    """Options that ``hybridflow launch slurm`` asks the cluster for. Slurm decides on those left out.

    Attributes:
        account: Account that is charged.
        partition: Partition of the job; ``--partition`` overrides it.
        qos: Quality of service.
        constraint: Features that nodes must have.
        time: Time limit in Slurm's form, quoted (``"24:00:00"``); ``--time`` overrides it.
        ranks_per_node: Ranks on each node; null: ``cluster.ranks_per_node`` of the recipe, else one per GPU, else
            the recipe's ranks dealt to ``--nodes``, of a range to the most, else all on one node.
        gpus_per_node: GPUs of a node; 0: the job asks for none.
        gpu_type: Type of GPU, as in ``gpu:TYPE:8``; for clusters with several types.
        gpu_option: Option of sbatch that asks for GPUs; ``none``: whole nodes come with their GPUs.
        gpu_memory_gb: Memory of a GPU in GB; ``launch`` refuses a job that needs more.
        cpus_per_task: CPU cores of each rank; null: ``cluster.threads_per_rank`` of the recipe.
        memory: Host memory of a node in Slurm's form (``"0"``: all of it); null: the cluster's default.
        exclusive: Whether the job has its nodes to itself.
        mpi: Type of ``srun --mpi`` for ranks that meet through MPI.
        modules: Arguments of ``module load``, loaded in this order.
        setup: Shell lines that run before the job, on its first node; a line that fails ends the job.
        container: Container of the ranks.
        options: More options of sbatch, each ``--name`` or ``--name=value``; these override all others.
        signal_lead_s: Seconds before the time limit at which Slurm tells the job to save and stop.
    """

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    ranks_per_node: ListedCount | None = None
    gpus_per_node: CountOrZero = 0
    gpu_type: str | None = None
    gpu_option: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    gpu_memory_gb: Positive | None = None
    cpus_per_task: ListedCount | None = None
    memory: str | None = None
    exclusive: bool = False
    mpi: Literal["none", "pmi2", "pmix"] = "none"
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    container: Container = Container()
    options: tuple[str, ...] = ()
    signal_lead_s: Annotated[int, Bounds(low=1, high=65535)] = 120


def load_site(file: Path | None) -> Site:
    """Return the settings of a file, of ``SITE_FILE`` by default; without either, the defaults.

    Raises:
        ConfigError: The file cannot be read, or a setting is unknown, ill-typed or at odds with another.
    """
    path = SITE_FILE.expanduser() if file is None else file
    if file is None and not path.exists():
        return Site()
    values = read_yaml(path)
    if isinstance(values, dict) and type(values.get("time")) is int:
        raise ConfigError(
            f"{path}: time: YAML reads what stands there as the number {values['time']}; put it in quotes, as in "
            'time: "24:00:00"'
        )
    # An empty file has no values.
    site = read_section(Site, {} if values is None else values, source=str(path))
    check_site(site, str(path))
    return site


def check_site(site: Site, source: str) -> None:
    """Refuse what cannot stand in a line of a batch file, and settings that contradict each other.

    Raises:
        ConfigError: There is such a setting.
    """
    for key, value in texts(to_dict(site)):
        check_line(value, f"{source}: {key}")
        if value.strip() == "":
            raise ConfigError(f"{source}: {key}: is empty; leave the key out")
    container = site.container
    if (container.kind == "none") != (container.image is None):
        raise ConfigError(
            f"{source}: container.kind={container.kind} with container.image={container.image!r}; give both, or neither"
        )
    for mount in container.mounts:
        check_mount(mount, f"{source}: container.mounts")
    for option in site.options:
        if re.match(r"--[a-z][a-z0-9-]*(=|$)", option) is None:
            raise ConfigError(f"{source}: options: {option!r}: expected --name or --name=value")
    if site.gpus_per_node and site.ranks_per_node is not None and site.ranks_per_node > site.gpus_per_node:
        raise ConfigError(
            f"{source}: ranks_per_node={site.ranks_per_node} is more than gpus_per_node={site.gpus_per_node}; each "
            "rank has a GPU of its own, lower the first"
        )


def check_line(value: str, what: str) -> None:
    """Refuse text that would not stay within its line of a batch file.

    Raises:
        ConfigError: It has a line break or another control character.
    """
    strange = next((character for character in value if not character.isprintable()), None)
    if strange is not None:
        raise ConfigError(f"{what}: {value!r} has the character {strange!r}, which no batch file can hold; remove it")


def check_mount(mount: str, what: str) -> None:
    """Refuse a mount that a container's command would read as two.

    Raises:
        ConfigError: It has a comma, or more colons than mounts have.
    """
    if "," in mount or mount.count(":") > 2:
        raise ConfigError(f"{what}: {mount!r}: a path with a comma or a colon cannot be mounted; use another path")


def texts(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in nested dicts and lists, with its dotted key."""
    items = values.items() if isinstance(values, dict) else ()
    for key, value in items:
        if isinstance(value, str):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from texts(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if isinstance(item, str):
                    yield f"{prefix}{key}[{index}]", item
                else:
                    yield from texts(item, f"{prefix}{key}[{index}].")


def seconds_of(limit: str, what: str) -> int:
    """Return the seconds of a time limit in Slurm's words.

    Raises:
        ConfigError: It is none of minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
            days-hours:minutes:seconds; or it is 0.
    """
    match = re.fullmatch(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?", limit)
    if match is None:
        raise ConfigError(
            f"{what}: {limit!r} is no time limit; expected for instance 24:00:00 (hours), 1-12 (a day and 12 hours) or "
            "90 (minutes)"
        )
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    # Without days, the first number is minutes unless there are three.
    units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1)
    total = int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))
    if total == 0:
        raise ConfigError(f"{what}: {limit!r} is no time at all; for no limit Slurm has its partitions' own")
    return total


def absolute(path: str | Path) -> Path:
    """Return a path that means the same in the job; links stay as they are."""
    return Path(os.path.abspath(path))
