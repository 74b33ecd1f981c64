"""``hybridflow plan reshard``: what moves when the weights of a model change their layout. No torch."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.families.cut import check_cut
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh, format_ranks
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.sizes import named_model
from hybridflow.models.shapes import known_models, model_spec
from hybridflow.observe.console import format_bytes
from hybridflow.recipe.load import find_recipe, load_recipe
from hybridflow.reshard.fsdp import weight_holdings
from hybridflow.reshard.overlap import max_overlap
from hybridflow.reshard.plan import participants
from hybridflow.reshard.report import Bandwidth, as_text, report
from hybridflow.reshard.spec import ModelSpec

_EXAMPLES = """examples:
  hybridflow plan reshard --from tp4.pp2.dp2 --to tp2.pp1.dp8
  hybridflow plan reshard --from tp8.pp8.dp8 --to tp8.dp64 --model llama3-70b --nodes 64 --json
  hybridflow plan reshard --from tp4 --to tp2.dp2 --first-rank 4 --model grpo --bandwidth node=200,network=25
"""


def add_reshard(plans: Any) -> None:
    """Add it to the sub-commands of ``plan``."""
    parser = plans.add_parser(
        "reshard",
        help="show what moves when weights change their layout",
        description="Print what each rank holds, receives and sends, the least possible traffic, and an estimate of "
        "the time. The command starts no process and imports no torch.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--from",
        required=True,
        dest="source",
        metavar="LAYOUT",
        help="layout before, such as tp4.pp2.dp2, on ranks from 0",
    )
    parser.add_argument(
        "--to", required=True, dest="target", metavar="LAYOUT", help="layout after, such as tp2.dp8 or pp2.layers3-5"
    )
    parser.add_argument(
        "--first-rank", type=int, default=0, metavar="N", help="first rank of the layout after (default: 0)"
    )
    parser.add_argument(
        "--model",
        default="llama3-8b",
        metavar="NAME",
        help="well-known model, directory of a model, or recipe (default: llama3-8b)",
    )
    nodes = parser.add_mutually_exclusive_group()
    nodes.add_argument("--nodes", type=int, metavar="N", help="number of nodes; the ranks must fill them evenly")
    nodes.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="ranks on each node (default: 8)")
    parser.add_argument(
        "--order",
        choices=("max-overlap", "given"),
        default="max-overlap",
        help="order of the ranks after: each keeps as much as it can, or by number (default: max-overlap)",
    )
    parser.add_argument(
        "--bandwidth",
        default="",
        metavar="node=GB/s,network=GB/s",
        help="bandwidth of a rank in each direction, inside its node and to other nodes (default: node=450,network=50, "
        "an H100 with NVLink and 400 Gbit/s InfiniBand)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    parser.add_argument("--draw", metavar="FILE.png", help="draw what each rank holds, and what moves")
    parser.set_defaults(run=_plan_reshard)


def _plan_reshard(arguments: argparse.Namespace) -> int:
    bandwidth, sizes = _bandwidth(arguments.bandwidth), _model(arguments.model)
    source, target = _reshard_meshes(arguments, sizes)
    if arguments.draw is not None and source.layout.fsdp > 1 and target.layout.tp > 1:
        raise ConfigError(
            f"--draw with --from {source.layout} --to {target.layout}: fsdp cuts every matrix by rows and tp some by "
            "columns, which one picture cannot show; leave --draw out"
        )
    model = model_spec(sizes)
    held, needed = weight_holdings(model, source), weight_holdings(model, target)
    found = report(model, held, needed, bandwidth)
    if arguments.json:
        meshes = {
            name: {"layout": str(mesh.layout), "ranks": mesh.ranks} for name, mesh in (("from", source), ("to", target))
        }
        job = {"model": arguments.model, "ranks_per_node": source.ranks_per_node, **meshes}
        print(json.dumps({**job, "bandwidth_gb_per_s": asdict(bandwidth), **found.to_dict()}, indent=2))
    else:
        print(_reshard_header(arguments.model, model, source, target))
        print(as_text(found, bandwidth))
    if arguments.draw is not None:
        # It imports matplotlib.
        from hybridflow.reshard.diagram import draw_reshard

        title = f"{arguments.model}: {source.layout} to {target.layout}"
        try:
            draw_reshard(Path(arguments.draw), title, model, held, needed)
        except OSError as error:
            raise ConfigError(f"--draw {arguments.draw}: cannot be written: {error.strerror}") from None
    return 0


def _reshard_meshes(arguments: argparse.Namespace, model: ModelConfig) -> tuple[DeviceMesh, DeviceMesh]:
    layouts = ParallelLayout.parse(arguments.source), ParallelLayout.parse(arguments.target)
    if layouts[1].is_sharded:
        layouts[1].check_generates("--to")
    for name, layout in zip(("--from", "--to"), layouts, strict=True):
        layout.check_trainable(name)
        check_cut(model, layout, name)
    firsts = 0, arguments.first_rank
    ranks = [tuple(range(first, first + layout.world_size)) for layout, first in zip(layouts, firsts, strict=True)]
    per_node = arguments.ranks_per_node
    if arguments.nodes is not None:
        number = max(ranks[0][-1], ranks[1][-1]) + 1
        if arguments.nodes < 1 or number % arguments.nodes:
            raise ConfigError(f"--nodes {arguments.nodes} does not divide the {number} ranks; choose a divisor")
        per_node = number // arguments.nodes
    source, target = (
        DeviceMesh(name=name, layout=layout.on_nodes(per_node), ranks=each, ranks_per_node=per_node)
        for name, layout, each in zip(("--from", "--to"), layouts, ranks, strict=True)
    )
    if arguments.order == "max-overlap":
        target = max_overlap(source, target.layout, target.ranks, num_layers=model.num_layers, name=target.name)
    return source, target


def _bandwidth(text: str) -> Bandwidth:
    given: dict[str, float] = {}
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(node|network)=([0-9]+(?:\.[0-9]+)?)", part)
        if match is None or float(match[2]) == 0:
            raise ConfigError(f"--bandwidth {text!r}: expected GB/s above 0, for instance node=450,network=50")
        given[match[1]] = float(match[2])
    return Bandwidth(**given)


def _model(name: str) -> ModelConfig:
    """Return a well-known model, the one in a directory, or a recipe's actor."""
    if name in known_models() or Path(name).is_dir():
        return named_model(name)
    try:
        path = find_recipe(name)
    except ConfigError as error:
        raise ConfigError(
            f"--model {name}: not one of {', '.join(known_models())}, no directory; and as a {error}"
        ) from None
    return load_recipe(path).sized_model_of("actor")


def _reshard_header(name: str, model: ModelSpec, source: DeviceMesh, target: DeviceMesh) -> str:
    ranks = participants(source, target)
    nodes = len({source.node(rank) for rank in ranks})
    order = ""
    if target.ranks != tuple(sorted(target.ranks)):
        shown = " ".join(map(str, target.ranks[:16])) + (" …" if len(target.ranks) > 16 else "")
        order = f", for the largest overlap in the order {shown}"
    size = format_bytes(sum(tensor.num_bytes for tensor in model.tensors))
    where = f"{len(ranks)} ranks on {nodes} node{'s' if nodes > 1 else ''} of {source.ranks_per_node}"
    return (
        f"{name}, {size}, {where}\n"
        f"from {source.layout} on ranks {format_ranks(sorted(source.ranks))}\n"
        f"to   {target.layout} on ranks {format_ranks(sorted(target.ranks))}{order}\n"
    )
