"""What replay says of a peer: the baseline's lowering, with collectives merged and moved as the peer's own code does.

Needs the search that made the plan: its baselines, graph and prices. A plan's baselines are our programs for the same
placements; DDP and FSDP2 run them differently, and are predicted by what they do:

- DDP copies every gradient into a bucket of about 25 MiB (the first 1 MiB) and reduces buckets while backward goes on;
- FSDP2 gathers a block in one collective and reduces its gradients in one, each copied in and out. Without streams, as
  on a CPU, both block: `fully_shard` calls them with `async_op=False`.
"""

from typing import Final

from peer_sides import DDP, FSDP, FSDP_AC, TP

from shardwright.ir import Graph, Node
from shardwright.passes.base import Pass
from shardwright.passes.bucket import Bucket
from shardwright.passes.bucket_gathers import BucketGathers
from shardwright.passes.early_starts import EarlyStarts
from shardwright.passes.inplace import InPlace
from shardwright.passes.late_waits import LateWaits
from shardwright.passes.lifetimes import storage_roots
from shardwright.passes.lower import lower
from shardwright.passes.prefetch import block_gather_bytes
from shardwright.passes.replay import replay
from shardwright.planner.candidates import Candidate
from shardwright.planner.search import Found, Request

__all__ = ["predict_peers"]

BASELINE_OF: Final = {DDP: "ddp", FSDP: "fsdp", FSDP_AC: "fsdp+recompute", TP: "tp+sp"}
"""Which baseline splits and keeps as which peer does."""
ALL: Final = 2**62
DDP_BUCKET: Final = 25 * 2**20
PACKED: Final = frozenset({"mesh.pack", "aten.cat.default"})


def predict_peers(found: Found, request: Request) -> dict[str, tuple[float, int]]:
    """Seconds of a step and bytes of a rank by peer, where there is a baseline like it."""
    baselines = {candidate.name: candidate for candidate in found.baselines}
    return {
        peer: (_peer_seconds(peer, baselines[name], request), baselines[name].replay.peak_bytes)
        for peer, name in BASELINE_OF.items()
        if name in baselines
    }


def _peer_seconds(peer: str, baseline: Candidate, request: Request) -> float:
    if peer == TP:
        return baseline.replay.step_seconds
    program = lower(request.graph, baseline.decisions)
    for step in _passes(peer, program):
        program = step.run(program)
    machine, decisions = request.machine, baseline.decisions
    judged = replay(program, decisions.mesh, machine.prices, machine.cluster, machine.optimizer, decisions.tiers)
    return judged.step_seconds + _copy_seconds(program, request)


def _passes(peer: str, lowered: Graph) -> tuple[Pass, ...]:
    if peer == DDP:
        return EarlyStarts(), Bucket(DDP_BUCKET), InPlace(), LateWaits(ALL)
    block = block_gather_bytes(lowered)
    return EarlyStarts(), BucketGathers(ALL, block), Bucket(block), InPlace()


def _copy_seconds(program: Graph, request: Request) -> float:
    """Of tensors that travel alone: our program sends them as they are, a peer copies them into a bucket of one."""
    total, roots = 0.0, storage_roots(program)
    for start in program.nodes:
        if start.op not in ("mesh.all_reduce_", "mesh.all_reduce", "mesh.reduce_scatter", "mesh.all_gather"):
            continue
        maker = program.producers.get(roots[start.operands[0]])
        if maker is not None and maker.op in PACKED:
            continue
        kind = max((program.types[name] for name in (start.operands[0], start.name)), key=lambda t: t.num_bytes)
        copied = Node("aten.clone.default", (start.args[0],), (), ("copied",))
        total += request.machine.prices.op_seconds(copied, (kind,), (kind,))
    return total
