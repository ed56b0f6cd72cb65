"""What forward returns: the model's own structure with the loss as a plain global mean.

Outputs that the plan dropped are objects that say so when touched. Outputs follow the inputs: for a rank's own part of
the batch, its own part of every output that the plan splits; for the global batch the whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from shardwright.ir import Decisions, Graph, InputKind, Layout, Placement, Replicate, Shard, ShardwrightError, Strided
from shardwright.runtime.captured import Captured
from shardwright.runtime.parameters import Home
from shardwright.runtime.shards import shard

__all__ = ["Dropped", "Outputs"]


class Dropped:
    """Stands where an output was that the plan does not make."""

    def __init__(self, path: str) -> None:
        object.__setattr__(self, "_path", path)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        path = object.__getattribute__(self, "_path")
        raise ShardwrightError(
            f"expected to return output {path}, found that the plan drops it because nobody read it in training; plan "
            "again with this output kept, or read it from a forward under eval() and no_grad()"
        )

    def __repr__(self) -> str:
        return f"<output {object.__getattribute__(self, '_path')}, dropped by the plan>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy, pickle and numpy ask for protocols: the honest answer is that it has none
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> NoReturn:
        found = next((arg for arg in args if isinstance(arg, Dropped)), cls("of the model"))
        found._refuse()


def _batch_split(layout: Layout, inputs: Sequence[Layout]) -> Layout:
    """The splits of an output on axes that split an input: an axis that cuts the model alone makes no own part."""
    return tuple(
        placement if isinstance(placement, Shard | Strided) and any(_cuts(i[axis]) for i in inputs) else Replicate()
        for axis, placement in enumerate(layout)
    )


def _cuts(placement: Placement) -> bool:
    return isinstance(placement, Shard | Strided)


_OPERATIONS = (
    "len iter getitem setitem contains bool float int index call add radd sub rsub mul rmul truediv rtruediv matmul "
    "rmatmul pow neg abs lt le gt ge array"
)
for _operation in _OPERATIONS.split():
    setattr(Dropped, f"__{_operation}__", Dropped._refuse)


@dataclass(frozen=True, eq=False)
class Outputs:
    """From returned values to the structure that forward gives."""

    rebuild: Callable[[Mapping[str, object]], object]
    paths: tuple[str, ...]
    """Of every tensor in the structure."""
    made: Mapping[str, str]
    """Path to returned value, for those that are made; the loss among them."""
    layouts: Mapping[str, Layout]
    """Path to the layout in which the plan makes it."""
    home: Home

    @classmethod
    def of(cls, captured: Captured, rank_graph: Graph, decisions: Decisions, home: Home) -> "Outputs":
        made = {**rank_graph.outputs, captured.loss: rank_graph.loss}
        batch = [decisions.layouts[name] for name in captured.graph.inputs_of(InputKind.INPUT)]
        layouts = {
            path: _batch_split(decisions.layouts[value], batch) for path, value in captured.graph.outputs.items()
        }
        if captured.loss not in captured.output_paths:  # loss_fn made it: forward gives the loss alone
            return cls(lambda values: values[captured.loss], (captured.loss,), made, layouts, home)
        return cls(captured.rebuild, captured.output_paths, made, layouts, home)  # type: ignore[arg-type]

    def build(self, values: Mapping[str, Tensor], is_local: bool) -> object:
        """`values` by name of the rank graph's returned values."""
        return self.rebuild({path: self._output(path, values, is_local) for path in self.paths})

    def _output(self, path: str, values: Mapping[str, Tensor], is_local: bool) -> object:
        if path not in self.made:
            return Dropped(path)
        value = values[self.made[path]]
        layout = self.layouts.get(path)
        if not is_local or layout is None or value.requires_grad:
            return value
        return shard(value, layout, self.home.mesh, self.home.rank)
