"""What torch's partitioner decides under `activation_memory_budget`, as fates of ours.

Needs a `JointProgram` of a graph. Gives the two graphs that torch would run, and KEEP for every storage of which
torch's forward hands a value or a view to backward, RECOMPUTE for those that its backward makes again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch._functorch.config as functorch_config
from fx_joint import JointProgram
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from shardwright.ir import Fate, Graph, Phase
from shardwright.passes.lifetimes import storage_roots

__all__ = ["Partition", "fates_of", "partition"]


@dataclass(frozen=True)
class Partition:
    """Torch's forward and backward."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_forward_outputs: int
    saved: frozenset[str]
    """Values that forward hands to backward."""
    again: frozenset[str]
    """Values that backward computes although forward could have saved them."""


def partition(program: JointProgram, graph: Graph, budget: float) -> Partition:
    """Ask torch with its defaults, but for `budget`: 1 is its fastest, 0 saves the inputs alone."""
    with functorch_config.patch(activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(
            program.copy(), None, num_fwd_outputs=program.num_forward_outputs
        )
    outputs = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    saved = {program.values[node.name] for node in outputs[program.num_forward_outputs :]}
    made = {result for node in graph.nodes if node.phase is Phase.FORWARD for result in node.results}
    computed = {
        program.values[node.name]
        for node in backward.graph.nodes
        if node.op == "call_function" and node.name in program.values
    }
    return Partition(forward, backward, program.num_forward_outputs, frozenset(saved), frozenset(computed & made))


def fates_of(found: Partition, graph: Graph) -> Mapping[str, Fate]:
    """By storage. What backward does not need at all has no fate."""
    roots = storage_roots(graph)
    kept = {roots[value] for value in found.saved}
    again = {roots[value] for value in found.again} & graph.producers.keys()
    return {name: Fate.RECOMPUTE for name in roots if name in again - kept}
