"""From a recipe, site settings and a command to a job that can run: what does not fit is said before it is queued."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from hybridflow.config.recipe import Recipe
from hybridflow.errors import ConfigError, HybridflowError, LayoutError
from hybridflow.families.hub_cache import cache_folder, home_folder
from hybridflow.launch.batch import BatchJob, shipped_body
from hybridflow.launch.layout import with_layouts
from hybridflow.launch.site import SITE_FILE, Site, absolute, check_line, load_site, seconds_of, texts
from hybridflow.mapping.memory import job_memory, planned_gpu_bytes, usable_bytes, with_micro_batches
from hybridflow.mapping.memory_check import check_memory
from hybridflow.recipe.dry_run import try_inputs
from hybridflow.recipe.inputs import check_inputs
from hybridflow.recipe.load import load_recipe, recipe_for_ranks
from hybridflow.recipe.meshes import role_meshes
from hybridflow.recipe.run_dir import try_resume
from hybridflow.sections import to_dict
from hybridflow.trainer.plan import placement_warnings
from hybridflow.trainer.warnings import recipe_warnings


def site_of(arguments: argparse.Namespace) -> Site:
    """Return the site settings with the overrides of the command line, as ``add_slurm_options`` takes them.

    Raises:
        ConfigError: A setting cannot be used.
    """
    site = load_site(arguments.site)
    for key in ("time", "partition"):
        value = getattr(arguments, key)
        if value is not None:
            check_line(value, f"--{key}")
            site = replace(site, **{key: value})
    return site


def check_job(arguments: argparse.Namespace, site: Site) -> tuple[Recipe, BatchJob, list[str]]:
    """Return the recipe, its job without a copy of code and recipe, and warnings.

    Raises:
        ConfigError: The time limit is missing or too short; or a rank needs more memory than a GPU has.
        LayoutError: The ranks do not fill the nodes.
    """
    recipe, per_node, (fewest, most) = _on_nodes(arguments, site)
    for key, value in texts(to_dict(recipe)):
        if key in ("name", "run_dir"):
            check_line(value, key)
    time = time_limit(site)
    warnings = [*recipe_warnings(recipe), *_no_site(arguments), *_no_program(site)]
    for count in dict.fromkeys((most, fewest)):
        chosen, ranks, told = _filled(recipe, arguments, count, per_node)
        chosen, _, line = with_layouts(chosen, arguments.recipe, arguments.overrides, ranks)
        warnings += [f"{told}: {line}; the job searches again when it starts"] if line is not None else []
        meshes = role_meshes(chosen)
        warnings += placement_warnings(meshes)
        gpu_bytes = planned_gpu_bytes(chosen, site.gpu_memory_gb)
        chosen = with_micro_batches(chosen, meshes, gpu_bytes)
        if usable_bytes(chosen, gpu_bytes) is not None:
            warnings += check_memory(chosen, job_memory(chosen, meshes, gpu_bytes=gpu_bytes), gpu_bytes)
    try:
        try_resume(recipe)
    except ModuleNotFoundError as error:
        warnings.append(f"latest checkpoint not compared with the recipe: {error}; the job compares when it starts")
    folder = Path.cwd()
    job = BatchJob(
        name=recipe.name,
        folder=folder,
        run_dir=absolute(recipe.run_dir),
        recipe=absolute(arguments.recipe),
        code=None,
        nodes=(fewest, most),
        ranks_per_node=per_node,
        threads_per_rank=recipe.cluster.threads_per_rank,
        time=time,
        site=site,
        body=shipped_body(),
        inputs=inputs_of(recipe),
    )
    return recipe, job, list(dict.fromkeys(warnings))


def planned_recipe(arguments: argparse.Namespace) -> tuple[Recipe, int]:
    """Return the recipe as its Slurm job runs it on the most nodes that it may get, and the ranks there.

    Layouts that are searched are still open, see ``with_layouts``.

    Raises:
        ConfigError: The recipe is wrong, or contradicts the site settings.
        LayoutError: The ranks do not fill the nodes.
    """
    recipe, per_node, (_, most) = _on_nodes(arguments, site_of(arguments))
    return _filled(recipe, arguments, most, per_node)[:2]


def _on_nodes(arguments: argparse.Namespace, site: Site) -> tuple[Recipe, int, tuple[int, int]]:
    """Return the recipe as it is written, with a number of ranks, the ranks of a node, and the range of nodes."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    # Without the actor's layout, which gives their number too.
    if {"cluster.ranks", "actor.update"} <= recipe.defaults.keys():
        recipe = _filling_nodes(recipe, site, arguments)
    per_node = ranks_per_node(recipe, site, arguments.nodes)
    # A search fills the nodes that are asked for.
    needed = recipe.cluster.ranks if recipe.layout is None or arguments.nodes is None else 1
    return recipe, per_node, node_range(arguments.nodes, needed, per_node)


def _filled(recipe: Recipe, arguments: argparse.Namespace, count: int, per_node: int) -> tuple[Recipe, int, str]:
    """Return the recipe on so many nodes, the ranks there, and both in words."""
    ranks = count * per_node
    told = f"{count} node{'s' if count > 1 else ''} × {per_node} = {ranks} ranks"
    if recipe.layout is None:
        recipe = recipe_for_ranks(recipe, arguments.recipe, arguments.overrides, ranks, told=told)
    return replace(recipe, cluster=replace(recipe.cluster, ranks_per_node=per_node)), ranks, told


def _no_site(arguments: argparse.Namespace) -> list[str]:
    """Return a warning where there are no site settings: then a job asks for no GPU."""
    if arguments.site is not None or SITE_FILE.expanduser().exists():
        return []
    return [
        f"no site settings in {SITE_FILE}: the job asks for no GPUs, account or partition; write gpus_per_node and the "
        "others there (docs/slurm.md)"
    ]


def _no_program(site: Site) -> list[str]:
    """Return a warning where the job would not find the command ``hybridflow``, since PATH of here is all it has."""
    if site.modules or site.setup or site.container.kind != "none" or shutil.which("hybridflow") is not None:
        return []
    return [
        "the command hybridflow is not on PATH, so the job will not find it: activate the environment that has it "
        f"(source {Path(sys.prefix) / 'bin/activate'}) before you launch, or set setup in the site settings"
    ]


def inputs_of(recipe: Recipe) -> tuple[Path, ...]:
    """Return directories here that the job may read: of absolute paths in the recipe, and the Hugging Face cache.

    A pattern such as ``/data/*.jsonl`` counts by its directory.
    """
    home, cache = home_folder(), cache_folder()
    named = [absolute(text) for _, text in texts(to_dict(recipe)) if text.startswith("/")]
    apart = [] if cache.is_relative_to(home) else [cache]
    folders = [home, *apart, *(path if path.is_dir() else path.parent for path in named)]
    return tuple(dict.fromkeys(path for path in folders if path.is_dir() and path != Path("/")))


def _filling_nodes(recipe: Recipe, site: Site, arguments: argparse.Namespace) -> Recipe:
    """Return a recipe that leaves the number of its ranks open, on all ranks that the nodes have room for."""
    here = (recipe.cluster.ranks_per_node, site.ranks_per_node, site.gpus_per_node, recipe.cluster.ranks)
    per_node = next(each for each in here if each)
    _, nodes = node_range("1" if arguments.nodes is None else arguments.nodes, 1, per_node)
    filled = load_recipe(arguments.recipe, arguments.overrides, num_ranks=nodes * per_node)
    # From here on the number is fixed.
    settled = {key: value for key, value in filled.defaults.items() if key != "cluster.ranks"}
    return replace(filled, cluster=replace(filled.cluster, ranks_per_node=per_node), defaults=settled)


def try_job(recipe: Recipe, folder: Path, site: Site) -> tuple[list[str], list[str]]:
    """Try what a job needs beside its nodes, on this machine: container image, files, first rows, rewards.

    Args:
        recipe: The recipe.
        folder: Directory of its file.
        site: The cluster.

    Returns:
        What was found, as of ``try_inputs``, and warnings of what is not here and may be in the job: in its container,
        or after its modules and setup.

    Raises:
        HybridflowError: The job would fail; says why.
    """
    check_image(site)
    try:
        check_inputs(recipe, folder)
        return try_inputs(recipe, is_node=False), []
    except HybridflowError as error:
        if not _may_be_there(error, site):
            raise
        return [], [f"not checked, since the job's environment is another one: {error}"]


def missing_files(recipe: Recipe, folder: Path, site: Site) -> list[str]:
    """Return warnings of files that this machine does not have; the job's nodes may."""
    checks: tuple[Callable[[], None], ...] = (partial(check_image, site), partial(check_inputs, recipe, folder))
    found = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found.append(f"{error}; the job fails unless its nodes have it")
    return found


def check_image(site: Site) -> None:
    """Refuse a container image that is a file and not there. Raises ConfigError."""
    image, kind = site.container.image, site.container.kind
    if image is None or "://" in image:
        return
    # Other names are those of a registry for pyxis.
    is_file = kind == "apptainer" or image.startswith(("/", ".", "~")) or image.endswith(".sqsh")
    if is_file and not Path(image).exists():
        where = "" if Path(image).is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(
            f"container.image={image!r} in the site settings: no such file{where}; name the image that you have built, "
            "or remove the container"
        )


def _may_be_there(error: HybridflowError, site: Site) -> bool:
    """Return whether what is missing here may be in the job."""
    renamed = any(":" in mount and len(set(mount.split(":")[:2])) == 2 for mount in site.container.mounts)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ImportError):
        cause = cause.__cause__
    has_own_packages = site.container.kind != "none" or bool(site.modules) or bool(site.setup)
    return (cause is not None and has_own_packages) or (cause is None and renamed)


def ranks_per_node(recipe: Recipe, site: Site, nodes: str | None) -> int:
    """Return the number of ranks on each node.

    Args:
        recipe: The recipe.
        site: The cluster.
        nodes: ``--nodes``. Where nothing else says it, the ranks are dealt to so many nodes, of a range to the most.

    Raises:
        ConfigError: Recipe and site contradict each other, or a node has fewer GPUs.
    """
    said, here = recipe.cluster.ranks_per_node, site.ranks_per_node
    if said is not None and here is not None and said != here:
        raise ConfigError(
            f"cluster.ranks_per_node={said} in the recipe, ranks_per_node={here} in the site settings; give "
            f"cluster.ranks_per_node={here}, or remove one of the two"
        )
    chosen = said if said is not None else here
    if chosen is None:
        chosen = min(recipe.cluster.ranks, site.gpus_per_node) if site.gpus_per_node else _dealt(recipe, nodes)
    if site.gpus_per_node and chosen > site.gpus_per_node:
        raise ConfigError(
            f"cluster.ranks_per_node={chosen} with gpus_per_node={site.gpus_per_node} in the site settings: each rank "
            f"has a GPU of its own; set cluster.ranks_per_node={site.gpus_per_node}"
        )
    return chosen


def _dealt(recipe: Recipe, nodes: str | None) -> int:
    """Return the ranks of each of so many nodes, of a range the most, if the recipe's fill them; else all."""
    last = "" if nodes is None else nodes.rpartition("-")[2]
    number = int(last) if last.isdecimal() else 0
    is_even = number > 0 and recipe.layout is None and recipe.cluster.ranks % number == 0
    return recipe.cluster.ranks // number if is_even else recipe.cluster.ranks


def node_range(nodes: str | None, num_ranks: int, per_node: int) -> tuple[int, int]:
    """Return the fewest and the most nodes.

    Raises:
        ConfigError: The text is no such range.
        LayoutError: The ranks do not fill whole nodes.
    """
    if nodes is None:
        if num_ranks % per_node:
            raise LayoutError(
                f"cluster.ranks={num_ranks} do not fill nodes of {per_node} ranks; set cluster.ranks to a multiple of "
                f"{per_node}, or cluster.ranks_per_node to a divisor of {num_ranks}"
            )
        return num_ranks // per_node, num_ranks // per_node
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", nodes)
    fewest, most = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if not 1 <= fewest <= most:
        raise ConfigError(f"--nodes {nodes}: expected a number of nodes such as 4, or a range such as 3-4")
    if most * per_node < num_ranks:
        raise LayoutError(
            f"--nodes {nodes}: {most} nodes of {per_node} ranks are {most * per_node} ranks, and the recipe has "
            f"cluster.ranks={num_ranks}; give --nodes {-(-num_ranks // per_node)}, or set cluster.ranks and layouts"
        )
    return fewest, most


def time_limit(site: Site) -> str:
    """Return the time limit of a job.

    Raises:
        ConfigError: There is none, or the job would be told to stop as soon as it starts.
    """
    if site.time is None:
        raise ConfigError("no time limit: give --time, such as --time 24:00:00, or time in the site settings")
    limit_s = seconds_of(site.time, "time limit")
    # Slurm looks at the time every 30 s, and so tells a job to stop up to that much earlier.
    if limit_s <= site.signal_lead_s + 60:
        raise ConfigError(
            f"time limit {site.time} is {limit_s} s, and the job is told to stop {site.signal_lead_s} s before its "
            "end; give more time, or lower signal_lead_s in the site settings"
        )
    return site.time
