"""One program with its parameters, batch and optimizer: what a training loop needs, in plain torch."""

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from copies import copies_on
from host_pool import HostPool
from torch import Tensor

__all__ = ["Training"]

HERE = Path(__file__).parent


class Training:
    """Makes the tensors from their descriptions; steps."""

    def __init__(self, described: dict, name: str, device: torch.device, seed: int, values: dict[str, Tensor]) -> None:
        program = described["programs"][name]
        self.device = device
        self.copies = copies_on(device, HostPool(described["host_bytes"], pinned=device.type == "cuda"))
        self.copies.pool.reserve(program["host_buffers"])
        self._owner = SimpleNamespace(copies=self.copies)
        self._module = importlib.import_module(name)
        self._program = program
        generator = torch.Generator(device).manual_seed(seed)
        constants = torch.load(HERE / "constants.pt", weights_only=True)
        given = {**constants, **values}
        self.tensors = {what["name"]: _tensor(what, given, device, generator) for what in described["inputs"]}
        self._tangent = torch.ones((), dtype=getattr(torch, program["tangent_dtype"]), device=device)
        self._optimizers = [
            _Stepping([self.tensors[p] for p in names], described["learning_rate"], on_host)
            for names, on_host in ((program["device_state"], False), (program["host_state"], True))
            if names
        ]

    def step(self) -> Tensor:
        """Forward, backward, optimizer; the loss."""
        loss, gradients = self._run()
        for name, gradient in zip(self._program["parameters"], gradients, strict=True):
            self.tensors[name].grad = gradient
        del gradients
        for optimizer in self._optimizers:
            optimizer.step()
        for name in self._program["parameters"]:
            self.tensors[name].grad = None
        return loss

    def gradients(self) -> dict[str, Tensor]:
        """Of one forward and backward, by name of the parameter, and `loss`; on the host."""
        loss, gradients = self._run()
        found = dict(zip(self._program["parameters"], gradients, strict=True))
        return {name: tensor.detach().cpu().clone() for name, tensor in {**found, "loss": loss}.items()}

    def held(self) -> Iterator[Tensor]:
        """What is on the device between steps."""
        yield from self.tensors.values()
        for optimizer in self._optimizers:
            yield from optimizer.device_state()

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is host memory: of the pool, or state that lives there."""
        return self.copies.pool.owns(tensor) or any(optimizer.owns(tensor) for optimizer in self._optimizers)

    def close(self) -> None:
        """Give host memory back."""
        if hasattr(self.copies, "close"):
            self.copies.close()
        self.copies.pool.close()

    @torch.no_grad()
    def _run(self) -> tuple[Tensor, list[Tensor]]:
        program = self._program
        inputs = [self.tensors[name].detach() for name in program["inputs"]]
        found = self._module.forward(self._owner, inputs)
        returned, saved = found[: len(program["returned"])], found[len(program["returned"]) :]
        del found
        values = dict(zip(program["returned"], returned, strict=True))
        del returned
        for buffer, value in program["updates"].items():
            self.tensors[buffer].copy_(values.pop(value))
        loss = values[program["loss"]]
        del values
        boxed = [*saved, self._tangent]
        saved.clear()
        return loss, _separate(self._module.backward(self._owner, boxed))


def _separate(gradients: list[Tensor]) -> list[Tensor]:
    """Each dense and in memory of its own."""
    seen: set[tuple[int, int]] = set()
    result = []
    for gradient in gradients:
        where = (gradient.untyped_storage().data_ptr(), gradient.storage_offset())
        result.append(gradient.clone() if where in seen else gradient.contiguous())
        seen.add(where)
    return result


def _tensor(what: dict, given: dict[str, Tensor], device: torch.device, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, what["dtype"])
    if what["name"] in given:
        made = given[what["name"]].to(device=device, dtype=dtype)
    elif not dtype.is_floating_point:
        made = torch.randint(what["below"], what["shape"], dtype=dtype, device=device, generator=generator)
    elif what["kind"] == "input":
        made = torch.randn(what["shape"], dtype=dtype, device=device, generator=generator)
    elif len(what["shape"]) < 2:
        made = torch.ones(what["shape"], dtype=dtype, device=device)
    else:
        made = torch.randn(what["shape"], dtype=dtype, device=device, generator=generator)
        made.mul_(1 / math.sqrt(math.prod(what["shape"][1:])))
    return made.clone().requires_grad_(what["kind"] == "param" and dtype.is_floating_point)


class _Stepping:
    """AdamW of some parameters, where their state lives."""

    def __init__(self, parameters: list[Tensor], learning_rate: float, on_host: bool) -> None:
        self._on_host = on_host
        self._parameters = parameters
        self._options = {"lr": learning_rate, "fused": True}
        if on_host:
            self._shadows = [torch.empty(0).requires_grad_() for _ in parameters]
            self._inner = [torch.optim.AdamW([shadow], **self._options) for shadow in self._shadows]
        else:
            self._inner = [torch.optim.AdamW(parameters, **self._options)]

    def step(self) -> None:
        if not self._on_host:
            self._inner[0].step()
            return
        for parameter, shadow, inner in zip(self._parameters, self._shadows, self._inner, strict=True):
            shadow.data, shadow.grad = parameter.detach().cpu(), parameter.grad.cpu()
            inner.step()
            if parameter.device.type != "cpu":  # else it was stepped in place
                parameter.detach().copy_(shadow.detach())
            shadow.data, shadow.grad = torch.empty(0), None

    def device_state(self) -> list[Tensor]:
        return [] if self._on_host else self._state()

    def owns(self, tensor: Tensor) -> bool:
        if not self._on_host:
            return False
        address = tensor.untyped_storage().data_ptr()
        return any(state.untyped_storage().data_ptr() == address for state in self._state())

    def _state(self) -> list[Tensor]:
        return [
            value
            for inner in self._inner
            for state in inner.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
