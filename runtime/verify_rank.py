"""One rank of `verify`: the planned step and the plain one, side by side; rank 0 compares."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.ir import Decisions, Gather, Graph, Plan
from shardwright.passes.lower import lower
from shardwright.passes.optimizers import optimizer_spec
from shardwright.passes.pipeline import scheduled
from shardwright.runtime.apply import apply_captured
from shardwright.runtime.capture import capture
from shardwright.runtime.captured import Captured
from shardwright.runtime.compare import differing_gradients, relative, tolerance
from shardwright.runtime.emit import emit
from shardwright.runtime.engines import Room, engines
from shardwright.runtime.faults import Fault
from shardwright.runtime.optimizer import optimizer
from shardwright.runtime.parameters import whole
from shardwright.runtime.plain_masters import PlainMasters
from shardwright.runtime.program import Program
from shardwright.runtime.ranks import group_names
from shardwright.runtime.real_values import real_example
from shardwright.runtime.session import find_session
from shardwright.runtime.target import load_target
from shardwright.runtime.trees import format_path, leaves

__all__ = ["Comparison", "Job", "verify_rank"]

LEARNING_RATE = 1e-3
PARAMETER_TOLERANCE = 1e-6
LATER_LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Job:
    """What the ranks are told."""

    plan: Plan
    graph: Graph
    target: str
    captured: Captured | None = None
    """Of the target, where whoever planned it is at hand; else every rank captures."""


@dataclass(frozen=True)
class Comparison:
    """Largest differences and what did not pass; empty `failures` mean equal."""

    loss_difference: float
    """Relative."""
    largest: tuple[tuple[str, float], ...]
    """Gradients that differ most, relative to their own norm."""
    second_term: tuple[str, ...]
    """Gradients that passed only because they are small beside the model's others."""
    failures: tuple[str, ...]
    rtol: float
    bitwise: bool | None = None
    """Against the program with everything kept; None where the plan keeps everything, or a fault was injected."""

    @property
    def equal(self) -> bool:
        return not self.failures


def verify_rank(job: Job, faults: tuple[Fault, ...]) -> list[Comparison]:
    """The whole comparison, or one short one for each fault. The same on every rank that compares; rank 0 counts."""
    checker = _Checker(job)
    if not faults:
        return [checker.check()]
    return [checker.check_fault(fault) for fault in faults]


class _Checker:
    def __init__(self, job: Job) -> None:
        plan = job.plan
        dtype: torch.dtype = getattr(torch, plan.identity.dtype)
        batch, seq = plan.identity.inputs[0].type.shape[:2] if job.target.startswith("hf:") else (None, None)
        torch.manual_seed(plan.identity.seed)
        target = load_target(job.target, batch, seq, dtype)
        self.plan, self.tolerance = plan, tolerance(dtype)
        self.module, self.args, self.kwargs = real_example(target, plan.identity.seed)
        self.plain = copy.deepcopy(self.module)
        self.exact = copy.deepcopy(self.module).double() if self.tolerance.against_exact else None
        captured = job.captured or capture(self.module, self.args, self.kwargs, loss=plan.identity.loss)
        self.captured = captured.keeping(job.graph.outputs)
        apply_captured(self.module, plan, job.graph, self.captured)
        session = find_session(self.module)
        if session is None:
            raise RuntimeError("a module that was planned a moment ago has no session")
        self.session = session
        self.training = session.installed
        """What trains; gradients are compared under a program that does not step parameters itself."""
        if self.training.program.stepped:
            graph = self._leaving_gradients(plan.decisions)
            session.installed = replace(self.training, program=self._program(graph), rank_graph=graph)
        self._expected: tuple[Tensor, dict[str, Tensor]] | None = None
        """Of the plain step that every fault is compared with."""

    def check(self) -> Comparison:
        loss, gradients = self._planned()
        local, buffers = self._local_gradients(), _buffers(self.module)
        expected_loss, expected = self._plain(self.plain)
        comparison = self._compare(loss, gradients, expected_loss, expected)
        failures = [*comparison.failures, *self._differing_buffers(buffers)]
        bitwise = self._bitwise(local)
        if bitwise is False:
            failures.append("gradients differ bitwise from the program with everything kept")
        failures.extend(self._later_steps(gradients))
        return replace(comparison, failures=tuple(failures), bitwise=bitwise)

    def check_fault(self, fault: Fault) -> Comparison:
        self.session.installed = replace(self.session.installed, program=self._program(fault=fault))
        before = _buffers(self.module)
        loss, gradients = self._planned()
        buffers = _buffers(self.module)
        _restore(self.module, before)
        if self._expected is None:
            self._expected = self._plain(self.plain)
        comparison = self._compare(loss, gradients, *self._expected)
        return replace(comparison, failures=(*comparison.failures, *self._differing_buffers(buffers)))

    def _planned(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and whole gradients of a planned step. Collective."""
        self.module.zero_grad()
        loss = _loss(self.module(*self.args, **self.kwargs), self.captured.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        found = {name: p.grad for name, p in self.module.named_parameters()}
        return loss.detach(), {name: whole(grad).detach() for name, grad in found.items() if grad is not None}

    def _local_gradients(self) -> dict[str, Tensor]:
        installed = self.session.installed
        grads = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        held = {name: grad for name, grad in grads.items() if name in installed.trainable}
        return {name: getattr(grad, "_local_tensor", grad).clone() for name, grad in held.items()}

    def _plain(self, model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        buffers = _buffers(model)
        args, kwargs = (self.args, self.kwargs) if model is not self.exact else _doubled(self.args, self.kwargs)
        loss = _loss(model(*args, **kwargs), self.captured.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self._plain_buffers = _buffers(model)
        _restore(model, buffers)
        return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def _compare(
        self, loss: Tensor, gradients: Mapping[str, Tensor], expected_loss: Tensor, expected: Mapping[str, Tensor]
    ) -> Comparison:
        if self.exact is not None:
            return self._compare_exact(loss, gradients, expected_loss, expected)
        rtol = self.tolerance.rtol
        failures = []
        difference = relative(loss, expected_loss)
        if not difference <= rtol:
            failures.append(f"loss: {loss.item():.9g}, plain {expected_loss.item():.9g}, relative {difference:.2e}")
        failures.extend(_missing(gradients, expected))
        found = differing_gradients(gradients, expected, rtol)
        failures.extend(f"gradient of {g.name}: relative difference {g.relative:.2e}" for g in found if not g.passes)
        by_size = sorted(found, key=lambda g: -g.relative)
        return Comparison(
            loss_difference=difference,
            largest=tuple((g.name, g.relative) for g in by_size[:5]),
            second_term=tuple(g.name for g in found if g.passes and not g.passes_alone),
            failures=tuple(failures),
            rtol=rtol,
        )

    def _compare_exact(
        self, loss: Tensor, gradients: Mapping[str, Tensor], plain_loss: Tensor, plain: Mapping[str, Tensor]
    ) -> Comparison:
        """In low precision: no further from float64 than twice what plain PyTorch is."""
        assert self.exact is not None
        exact_loss, exact = self._plain(self.exact)
        failures = list(_missing(gradients, plain))
        ours, theirs = relative(loss, exact_loss), relative(plain_loss, exact_loss)
        if not ours <= 2 * theirs + self.tolerance.rtol:
            failures.append(f"loss: {ours:.2e} from float64, plain {theirs:.2e}")
        worst = []
        scale = torch.cat([g.double().flatten() for g in exact.values()]).square().mean().sqrt()
        for name in sorted(exact.keys() & gradients.keys()):
            slack = self.tolerance.rtol * (exact[name].norm() + exact[name].numel() ** 0.5 * scale)
            distance = (gradients[name].double() - exact[name]).norm()
            if not distance <= 2 * (plain[name].double() - exact[name]).norm() + slack:
                failures.append(f"gradient of {name}: {relative(gradients[name], exact[name]):.2e} from float64")
            worst.append((name, relative(gradients[name], exact[name])))
        worst.sort(key=lambda item: -item[1])
        return Comparison(ours, tuple(worst[:5]), (), tuple(failures), self.tolerance.rtol)

    def _bitwise(self, local: Mapping[str, Tensor]) -> bool | None:
        decisions = self.plan.decisions
        if not (decisions.fates or decisions.parameters or Gather.KEEP in decisions.gathers.values()):
            return None
        planned = self.session.installed
        graph = self._leaving_gradients(replace(decisions, fates={}, gathers={}, parameters={}))
        self.session.installed = replace(planned, program=self._program(graph), rank_graph=graph)
        self._planned()
        other = self._local_gradients()
        self.session.installed = planned
        return all(torch.equal(local[name], other[name]) for name in local)

    def _leaving_gradients(self, decisions: Decisions) -> Graph:
        """The program without steps in backward."""
        return scheduled(lower(self.captured.graph, decisions), decisions.schedule)

    def _differing_buffers(self, found: Mapping[str, Tensor]) -> list[str]:
        """Running statistics, as one step leaves them."""
        rtol = max(PARAMETER_TOLERANCE, self.tolerance.rtol)
        failures = []
        for name, buffer in self._plain_buffers.items():
            tells = buffer.isfinite()
            ours, plain = found[name][tells].double(), buffer[tells].double()
            if not (ours - plain).norm() <= rtol * (plain.norm() + plain.numel() ** 0.5):
                failures.append(f"buffer {name}: relative difference {relative(ours, plain):.2e}")
        return failures

    def _program(self, graph: Graph | None = None, fault: Fault | None = None) -> Program:
        installed = self.session.installed
        home = installed.home
        groups = group_names(home.devices) if home.devices is not None else {}
        program, budget = graph or installed.rank_graph, self.plan.budget
        room = Room(budget.host_bytes, budget.disk_bytes, self.plan.cluster)
        copies, disk = engines(program, home.device, room)
        return emit(program, home.mesh, home.rank, groups, home.device, copies=copies, disk=disk, fault=fault)

    def _later_steps(self, gradients: dict[str, Tensor]) -> list[str]:
        """The optimizer on the same gradients gives the same parameters; then the losses of two more steps agree."""
        spec = optimizer_spec(self.plan.identity.optimizer)
        kind = getattr(torch.optim, spec.torch_name)
        options: dict[str, Any] = {**dict(spec.options), "lr": LEARNING_RATE}
        ours = optimizer(self.module, kind, None, **options)
        parameters = self.plain.parameters()
        theirs = PlainMasters(parameters, kind, options) if spec.has_master else kind(parameters, **options)
        failures: list[str] = []
        for step in (2, 3):
            self.module.zero_grad()
            failures.extend(self._step(ours, theirs, gradients))
            loss, gradients = self._planned()
            expected, _ = self._plain(self.plain)
            difference = relative(loss, expected)
            if not difference <= max(LATER_LOSS_TOLERANCE, self.tolerance.rtol):
                failures.append(f"loss of step {step}: {loss.item():.9g}, plain {expected.item():.9g}")
        return failures

    def _step(
        self,
        ours: torch.optim.Optimizer,
        theirs: torch.optim.Optimizer | PlainMasters,
        gradients: Mapping[str, Tensor],
    ) -> list[str]:
        comparing, self.session.installed = self.session.installed, self.training
        loss = _loss(self.module(*self.args, **self.kwargs), self.captured.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        ours.step()
        self.session.installed = comparing
        for name, parameter in self.plain.named_parameters():
            parameter.grad = gradients[name].to(parameter.dtype) if name in gradients else None
        theirs.step()
        failures = []
        plain = dict(self.plain.named_parameters())
        for name, parameter in self.module.named_parameters():
            difference = relative(whole(parameter).detach(), plain[name].detach())
            if not difference <= max(PARAMETER_TOLERANCE, self.tolerance.parameters):
                failures.append(f"{name} after the optimizer: relative difference {difference:.2e}")
        return failures


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def _restore(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Several comparisons start from the same statistics."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


def _missing(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    return [f"gradient of {name}: missing" for name in expected if name not in gradients]


def _loss(output: object, path: str) -> Tensor:
    """The loss inside what a model returns, by the path that capture found it at."""
    found = {format_path(where): leaf for where, leaf in leaves(output)}.get(path)
    if not isinstance(found, Tensor):
        raise TypeError(f"expected a loss at {path!r} of a {type(output).__name__}")
    return found


def _doubled(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
    def double(value: object) -> object:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(double, args)), {name: double(value) for name, value in kwargs.items()}
