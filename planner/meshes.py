"""Which mesh shapes are tried: the shape is chosen, not given."""

from shardwright.ir import Cluster, Mesh

__all__ = ["candidate_meshes"]

MOST_MESHES = 4
"""One axis and the most promising pairs; each costs a formulation and a solve."""


def candidate_meshes(cluster: Cluster) -> tuple[Mesh, ...]:
    """One axis over all ranks, and two axes whose inner one stays within a node, the largest inner axis first.

    A single rank has a mesh without axes. An inner axis that leaves its node would put the traffic of every layer on
    the slow link, which the outer axis can do as well.
    """
    ranks = cluster.num_ranks
    if ranks == 1:
        return (Mesh((), ()),)
    inner = [
        n
        for n in range(cluster.ranks_per_node, 1, -1)
        if n < ranks and ranks % n == 0 and cluster.ranks_per_node % n == 0
    ]
    pairs = [Mesh(("dp", "tp"), (ranks // n, n)) for n in inner]
    return (Mesh(("dp",), (ranks,)), *pairs[: MOST_MESHES - 1])
