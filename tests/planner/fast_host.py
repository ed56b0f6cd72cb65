"""A cluster of CPU ranks whose prices are modelled, with a host that is worth offloading to even in tiny models."""

from dataclasses import replace

from shardwright.ir import Cluster, Link, load_cluster

__all__ = ["fast_host"]


def fast_host(num_ranks: int = 2) -> Cluster:
    """Bytes are counted as torch counts them on CPU, to the byte; links are slow, copies to the host are not."""
    cpu = load_cluster(f"cpu:{num_ranks}")
    link = Link(1e9, 1e-6, 0.7)
    host = replace(cpu.host, copy_bytes_per_second=5e10, copy_latency_seconds=1e-6, smallest_offload_bytes=4096)
    device = replace(cpu.device, measured=False, memory_bytes=2**34)
    return replace(cpu, name="fast-host", device=device, intra=link, inter=link, host=host)
