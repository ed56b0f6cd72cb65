"""Recomputation under a memory budget on public instances, beside what was published for them.

    python benchmarks/remat_instances.py --data DIR [--only RLG2] [--percent 90 80] [--seconds 60]

DIR, or DIR/remat_graphs, holds the graphs of Checkmate (Jain et al., MLSys 2020) and Moccasin (Bartan et al., ICML
2023) as networkx node-link JSON; they are not part of this repository. A budget is a percentage of the peak of the
order as it is; overhead is the duration added, in percent of computing everything once. Every schedule is simulated
by `remat_check`, which gives the overhead and the peak in the table. Two threads; seconds of wall clock.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from remat_check import check
from remat_graph import RematGraph, load
from remat_search import Outcome, search


@dataclass(frozen=True, slots=True)
class Published:
    """Overhead in percent and seconds, as printed; a dash where nothing was found, empty where nothing is published."""

    checkmate: str = ""
    """Its mixed-integer program, by Gurobi."""
    moccasin: str = ""
    """CP-SAT, 16 workers."""
    prototype: str = ""
    """This formulation's first version, two shared cores."""


INSTANCES = {
    "random_layered_n100_": "RLG1",
    "random_layered_n250_": "RLG2",
    "random_layered_n1000_": "RLG4",
    "fcn_8_vgg": "CM1",
    "ResNet50": "CM2",
    "VGG16": "VGG16",
    "MobileNet": "MobileNet",
}
"""Start of a file's name, and what the papers call it."""
PUBLISHED = {
    ("CM1", 90): Published("0.0% 6s", "0.0% 3s", "0.029% 0s"),
    ("CM1", 80): Published("0.1% 6s", "0.1% 3s", "0.136% 0s"),
    ("CM2", 90): Published("0.1% 434s", "0.2% 65s", "0.108% 0s"),
    ("CM2", 80): Published("0.3% 485s", "0.3% 69s", "0.329% 0s"),
    ("RLG1", 90): Published("", "", "0.789% 0s"),
    ("RLG1", 80): Published("", "", "2.297% 0s"),
    ("RLG2", 90): Published("0.9% 685s", "0.9% 55s", "0.904% 2s"),
    ("RLG2", 80): Published("-", "4.9% 640s", "4.597% 20s"),
    ("RLG4", 90): Published("-", "0.7% 3613s", "0.683% 58s"),
    ("RLG4", 80): Published("-", "3.4% 3612s", "3.005% 55s"),
}
CLOSE = 1e-4
"""Of a duration: what the engine's gap leaves open."""
COLUMNS = "{:<24} {:>6}  {:>9} {:<26} {:>6}  {:>14} {:>14}  {:>10} {:>11} {:>10}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=INSTANCES.values(), metavar="NAME", help="RLG2, CM1, ...")
    parser.add_argument(
        "--percent", nargs="+", type=int, default=[90, 80], metavar="N", help="of the peak; default 90 80"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for each; default 60")
    parser.add_argument("--forward", action="store_true", help="also the graphs without backward, *_test_*")
    arguments = parser.parse_args()
    heads = ("instance (nodes, edges)", "budget", "overhead", "known of it", "s", "checked peak", "budget")
    print(COLUMNS.format(*heads, "Checkmate", "Moccasin", "prototype"))
    for name, graph in graphs(arguments.data, arguments.forward):
        for percent in arguments.percent if arguments.only is None or name in arguments.only else ():
            budget = graph.peak * percent // 100
            print(line(name, graph, percent, budget, search(graph, budget, arguments.seconds)), flush=True)


def graphs(folder: Path, forward: bool) -> Iterator[tuple[str, RematGraph]]:
    """By number of nodes."""
    inside = folder / "remat_graphs"
    paths = sorted((inside if inside.is_dir() else folder).glob("*.json"))
    known = [(name, path) for path in paths for start, name in INSTANCES.items() if path.name.startswith(start)]
    if not known:
        raise SystemExit(f"expected graphs such as {next(iter(INSTANCES))}*.json in {folder}, found none")
    chosen = [(name, load(path)) for name, path in known if forward or "_test_" not in path.name]
    return iter(sorted(chosen, key=lambda item: len(item[1].inputs)))


def line(name: str, graph: RematGraph, percent: int, budget: int, outcome: Outcome) -> str:
    label = f"{name} ({len(graph.inputs)}, {graph.edges})"
    overhead, peak = "none", "-"
    if outcome.schedule is not None:
        checked = check(graph, outcome.schedule, budget)
        overhead, peak = f"{percentage(graph, checked.duration):.4f}%", f"{checked.peak:,}"
    published = PUBLISHED.get((name, percent), Published()) if "_test_" not in graph.name else Published()
    return COLUMNS.format(
        label if "_test_" not in graph.name else f"{label} fwd",
        f"{percent}%",
        overhead,
        knowledge(graph, outcome),
        f"{outcome.seconds:.1f}",
        peak,
        f"{budget:,}",
        published.checkmate,
        published.moccasin,
        published.prototype,
    ).rstrip()


def knowledge(graph: RematGraph, outcome: Outcome) -> str:
    if outcome.optimal and outcome.depth == 0:
        return "one node alone needs more"
    if outcome.optimal and outcome.schedule is None:
        return f"nothing at depth {outcome.depth}"
    if outcome.optimal:
        deeper = check(graph, outcome.schedule or [], graph.peak).duration < outcome.bound * (1 - CLOSE)
        return f"{'beyond optimum' if deeper else 'optimal'} at depth {outcome.depth}"
    return f">= {percentage(graph, outcome.bound):.4f}% at depth {outcome.depth}"


def percentage(graph: RematGraph, duration: float) -> float:
    return 100 * (duration / graph.duration - 1)


if __name__ == "__main__":
    main()
