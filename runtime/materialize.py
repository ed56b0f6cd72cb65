"""Modules built on `meta` get their values: one submodule at a time, cut at once, so that no rank holds the whole.

From a state dict of whole tensors (they may be memory-mapped: only this rank's part is read and kept), or from an
`init` function as `Module.apply` takes it. Every rank runs `init` on whole tensors of the submodule on the CPU with
the same seed, so the values equal those of one process that runs `module.apply(init)` under that seed. A tied
parameter stays whole until the last module that has it.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shardwright.ir import PlanError
from shardwright.runtime.parameters import Home, accept_whole_values, as_dtensor, local_part

__all__ = ["init_by_reset", "is_on_meta", "materialize"]

Init = Callable[[nn.Module], None]


def is_on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def init_by_reset(module: nn.Module) -> None:
    """What torch's own layers do in their constructors."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def materialize(
    module: nn.Module,
    home: Home,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    init: Init = init_by_reset,
    seed: int = 0,
) -> None:
    """Put this rank's shards of every parameter on the module, and every buffer whole.

    Raises PlanError naming what stayed without a value.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        _Filling(home, state_dict, init, _canonical_names(module)).visit(module, "")
    if home.devices is not None:
        accept_whole_values(module, home)


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Every parameter name to the first name of the same object."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


class _Filling:
    """The walk over submodules. A tied parameter stays whole until its last owner has had its `init`."""

    def __init__(self, home: Home, state: Mapping[str, Tensor] | None, init: Init, names: Mapping[str, str]) -> None:
        self._home = home
        self._state = state
        self._init = init
        self._names = names
        self._owners_left = Counter(names.values())
        self._wholes: dict[str, nn.Parameter] = {}
        """Canonical name to the whole value, while owners are left."""
        self._owners: dict[str, list[tuple[nn.Module, str]]] = {}

    def visit(self, module: nn.Module, path: str) -> None:
        """Children first, as `Module.apply` goes."""
        for name, child in module.named_children():
            self.visit(child, f"{path}{name}.")
        own = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        for name in own:
            self._open_parameter(module, name, self._names[path + name])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = self._open_buffer(module, name, path, buffer)
        self._run_init(module, path)
        for name in own:
            self._close_parameter(self._names[path + name])
        for name, buffer in list(module.named_buffers(recurse=False)):
            _check_set(path + name, buffer)
            module._buffers[name] = buffer.to(self._home.device)

    def _open_parameter(self, module: nn.Module, name: str, canonical: str) -> None:
        if canonical not in self._wholes:
            like = module.get_parameter(name)
            value = _poisoned(like) if self._state is None else _given(self._state, canonical, like)
            self._wholes[canonical] = nn.Parameter(value, requires_grad=like.requires_grad)
        setattr(module, name, self._wholes[canonical])
        self._owners.setdefault(canonical, []).append((module, name))

    def _open_buffer(self, module: nn.Module, name: str, path: str, buffer: Tensor) -> Tensor:
        if self._state is None or name in module._non_persistent_buffers_set:
            return _poisoned(buffer)
        return _given(self._state, path + name, buffer).clone()

    def _run_init(self, module: nn.Module, path: str) -> None:
        """All values are its business, or with a state dict only the buffers that no state dict holds."""
        if self._state is None:
            self._init(module)
        elif any(_is_unset(buffer) for buffer in module.buffers(recurse=False)):
            given = {n: p.detach().clone() for n, p in module.named_parameters(recurse=False)}
            given |= {n: b.clone() for n, b in module.named_buffers(recurse=False) if not _is_unset(b)}
            self._init(module)
            for name, value in given.items():
                getattr(module, name).copy_(value)

    def _close_parameter(self, canonical: str) -> None:
        self._owners_left[canonical] -= 1
        if self._owners_left[canonical]:
            return
        value = self._wholes.pop(canonical)
        _check_set(canonical, value)
        local = local_part(value, canonical, self._home)
        shown = as_dtensor(local, value.shape, self._home.layout(canonical), self._home)
        shard = nn.Parameter(shown, requires_grad=value.requires_grad)
        for module, name in self._owners.pop(canonical):
            setattr(module, name, shard)


def _given(state: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    value = state.get(name)
    if value is None or value.shape != like.shape:
        found = "none" if value is None else f"{list(value.shape)}"
        raise PlanError(f"expected a value of shape {list(like.shape)} for {name} in the state dict, found {found}")
    return value.to(like.dtype)


def _poisoned(like: Tensor) -> Tensor:
    """Memory on the CPU that shows whether anybody has written to it."""
    fresh = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return fresh.fill_(_poison(fresh.dtype))


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _is_unset(tensor: Tensor) -> bool:
    if tensor.is_meta or tensor.numel() == 0 or tensor.dtype is torch.bool:
        return False
    marked = tensor.isnan() if tensor.is_floating_point() else tensor == _poison(tensor.dtype)
    return bool(marked.all())


def _check_set(name: str, tensor: Tensor) -> None:
    if _is_unset(tensor):
        raise PlanError(
            f"expected `init` to fill {name}, found it untouched; give an `init` function that sets it (for Hugging "
            "Face models: `model._init_weights`), or a state dict that has it"
        )
