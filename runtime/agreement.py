"""All ranks say the same, or everybody raises: plans and collective schedules before the first step, inputs later.

Needs an initialised process group; in a world of one there is nothing to compare. What is sent are numbers: digests
first, the texts only where these differ, so that the message can name the first entry that does.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwright.ir import DiskError, Graph, StalePlanError
from shardwright.ir.ops import is_collective

__all__ = ["gather_numbers", "gather_texts", "raise_everywhere", "require_agreement", "schedule"]


def schedule(rank_graph: Graph) -> tuple[str, ...]:
    """The collectives of a rank graph in order: operator, axis, what is sent, what comes."""
    return tuple(
        f"{node.op}({', '.join(map(str, node.args[1:]))}) {node.name}: "
        f"{', '.join(str(rank_graph.types[name]) for name in node.operands)} -> {rank_graph.types[node.name]}"
        for node in rank_graph.nodes
        if is_collective(node.op)
    )


def require_agreement(what: str, entries: Sequence[str]) -> None:
    """Raises StalePlanError on every rank when a rank has other entries than rank 0. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    text = "\n".join(entries)
    digests = gather_numbers(_digest(text))
    if all(digest == digests[0] for digest in digests):
        return
    texts = gather_texts(text)
    others = [rank for rank, found in enumerate(texts) if found != texts[0]]
    ours, theirs = texts[0].split("\n"), texts[others[0]].split("\n")
    position = next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    ranks = f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(map(str, others))} have"
    raise StalePlanError(
        f"expected the same {what} on every rank, found that {ranks} another than rank 0; first difference at entry "
        f"{position}: {_entry(ours, position)} on rank 0, {_entry(theirs, position)} on rank {others[0]}; give every "
        "rank the same plan, model and versions"
    )


def raise_everywhere(error: DiskError | None) -> None:
    """Raises DiskError on every rank when one has an error, its own where it has one. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        texts = [str(error or "")]
    else:
        texts = gather_texts(str(error or ""))
    if error is not None:
        raise error
    failed = next((rank for rank, text in enumerate(texts) if text), None)
    if failed is not None:
        raise DiskError(f"on rank {failed}: {texts[failed]}")


def _entry(lines: Sequence[str], position: int) -> str:
    return repr(lines[position]) if position < len(lines) else "nothing"


def _digest(text: str) -> list[int]:
    digest = hashlib.sha256(text.encode()).digest()
    return [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in range(0, 32, 8)]


def gather_numbers(numbers: Sequence[int]) -> list[list[int]]:
    """Every rank's numbers, equally many on each, by rank. Collective."""
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=_wire_device())
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return [part.tolist() for part in parts]


def gather_texts(text: str) -> list[str]:
    """Every rank's text, by rank. Collective."""
    data = text.encode()
    sizes = [size for (size,) in gather_numbers([len(data)])]
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    mine = padded.to(_wire_device())
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine)
    return [bytes(part[:size].tolist()).decode() for part, size in zip(parts, sizes, strict=True)]


def _wire_device() -> torch.device:
    """Where tensors must lie for the default group to carry them."""
    if "cpu" in dist.get_backend_config() or "gloo" in dist.get_backend():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
