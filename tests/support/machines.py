"""A machine of four ranks on two cores, and a run of the quickstart on it, as files."""

import json

from hybridflow.recipe.load import find_recipe

FIGURES = {
    **{"dtype": "fp32", "ranks_per_node": 4, "crowding": 2.0, "flops": 5e10, "memory_bytes": 8e9},
    **{"memory_bandwidth": 2e10, "node_bandwidth": 2e10, "network_bandwidth": 0, "host_bandwidth": 2e10},
    **{"node_latency": 1e-3, "launch": 1e-3, "pass_launch": 1e-3, "update_launch": 1e-3},
    **{"product_share": 0.9, "half_size": 4, "attention_share": 0.1, "memory_share": 0.9, "cache_share": 0.5},
    **{"elementwise_share": 0.3, "node_share": 0.1},
}


def write_machine(path, **changed):
    """Write its figures; None leaves one out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in {**FIGURES, **changed}.items() if value is not None}
    path.write_text(json.dumps(values), encoding="utf-8")
    return str(path)


def write_run(run_dir):
    """Write the recipe of a run and the metrics of four steps, the first two of which were slower."""
    (run_dir / "logs/0001").mkdir(parents=True)
    text = find_recipe("quickstart").read_text(encoding="utf-8")
    (run_dir / "logs/0001/recipe.yaml").write_text(text, encoding="utf-8")
    times = ({"update": 9.0, "rollout": 9.0}, {"update": 2.0, "rollout": 0.2}, *[{"update": 1.0, "rollout": 0.1}] * 2)
    rows = [
        {"step": step, "time/step_s": sum(each.values()), "response/length_mean": 3.5, "batch/num_tokens": 1024 * 11.5}
        | {f"time/{name}_s": value for name, value in each.items()}
        for step, each in enumerate(times, 1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return run_dir
