"""Public names, each imported on first use: `import shardwright.ir` must load neither torch nor a solver.

The sub-packages beside this file are links to the folders at the top of the repository.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.ir import StoredPlan as Plan
    from shardwright.planner.api import apply as apply
    from shardwright.planner.api import plan as plan
    from shardwright.planner.decorator import parallelize as parallelize
    from shardwright.runtime.optimizer import optimizer as optimizer
    from shardwright.runtime.shard_loader import shard_loader as shard_loader
else:
    from importlib import import_module

    _HOME = {
        "Plan": "shardwright.ir",
        "apply": "shardwright.planner.api",
        "optimizer": "shardwright.runtime.optimizer",
        "parallelize": "shardwright.planner.decorator",
        "plan": "shardwright.planner.api",
        "shard_loader": "shardwright.runtime.shard_loader",
    }

    _NAMES = {"Plan": "StoredPlan"}

    def __getattr__(name):
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), _NAMES.get(name, name))


__all__ = ["Plan", "apply", "optimizer", "parallelize", "plan", "shard_loader"]
