"""Optimizer steps on the host, one parameter after another on a thread of their own.

A step starts when the parameter's gradient is final and nobody in this step reads the parameter any more. The gradient
is copied out beside everything else; when it is there, the thread copies the value out where it is needed, runs the
optimizer, and copies the value back; a parameter that lies in the pool is stepped where it is. `sent` waits for the
gradient's copy (its device memory may go then), `stepped` for all of it. On CUDA the copies have streams of their own,
and the thread waits for their events, not for the device.

Gradients and values on their way live in buffers of the pool, which the main thread alone takes. State is counted by
the pool as well, from the first step on.
"""

import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from shardwright.ir import PlanError, ShardwrightError
from shardwright.runtime.copies import Copies, Done, HostCopy
from shardwright.runtime.host_pool import HostBuffer, HostPool

__all__ = ["HostSteps", "Job", "Jobs", "StepUnderWay"]


class Job(Protocol):
    """What is done to one parameter on the host."""

    @property
    def reads_value(self) -> bool:
        """Whether it starts from the parameter's value."""
        ...

    @property
    def tensors(self) -> Iterable[Tensor]:
        """What it keeps on the host."""
        ...

    def run(self, value: Tensor, gradient: Tensor) -> None:
        """Writes the new value. Called on the thread."""
        ...


class Jobs(Protocol):
    """Whoever has them: an optimizer made by `shardwright.optimizer`."""

    @property
    def has_begun(self) -> bool:
        """Whether a backward has stepped parameters and the optimizer's own step has not come yet."""
        ...

    def begin_in_backward(self, name: str, parameter: Tensor) -> Job:
        """The job of the parameter of that name in the plan; `parameter` is its local memory. Raises ShardwrightError
        where stepping it now would be wrong."""
        ...


class StepUnderWay:
    """The value of `tier.step`."""

    __slots__ = ("done", "gradient", "job", "parameter", "pool", "sent", "value")

    def __init__(self, job: Job, parameter: Tensor, gradient: HostCopy, pool: HostPool) -> None:
        self.job = job
        self.parameter = parameter
        self.gradient: HostCopy | None = gradient
        self.sent: Done | None = gradient.done
        self.pool = pool
        num_bytes = parameter.numel() * parameter.element_size()
        self.value: HostBuffer | None = None if pool.owns(parameter) else pool.acquire(num_bytes)
        """Where it is staged; nothing for a parameter that lies in the pool."""
        self.done: Future[torch.cuda.Event | None] | None = None

    def __del__(self) -> None:
        value = getattr(self, "value", None)  # unset when the pool refused
        if value is not None:
            self.pool.release(value)


class HostSteps:
    """Of one planned module on one rank."""

    def __init__(self, copies: Copies, device: torch.device) -> None:
        self._jobs: Callable[[], Jobs | None] = _nobody
        self._copies = copies
        self._thread = _CudaThread(device) if device.type == "cuda" else _Thread()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardwright-steps")

    @property
    def pool(self) -> HostPool:
        return self._copies.pool

    def attach(self, jobs: Jobs) -> None:
        """From now on asked for what to do when the program steps in backward. Not kept alive by this."""
        self._jobs = weakref.ref(jobs)

    def require_none_begun(self) -> None:
        """Raises ShardwrightError where a forward would see a step half done."""
        jobs = self._jobs()
        if jobs is not None and jobs.has_begun:
            raise ShardwrightError(
                "expected optimizer.step() between backward and the next forward, found none: backward has stepped "
                "parameters, as the plan declares (clip none); to accumulate or skip steps plan without --clip none"
            )

    def step(self, gradient: Tensor, parameter: Tensor, name: str) -> StepUnderWay:
        """`tier.step`: starts the step of the plan's parameter `name`, in backward."""
        jobs = self._jobs()
        if jobs is None:
            raise PlanError(
                "expected an optimizer made by shardwright.optimizer(model, ...) before backward, found none: the plan"
                f" declares clip none and steps {name} while backward goes on; make it, or plan without --clip none"
            )
        return self.start(jobs.begin_in_backward(name, parameter), parameter, gradient)

    def start(self, job: Job, parameter: Tensor, gradient: Tensor) -> StepUnderWay:
        """Starts one step; `parameter` and `gradient` are local device memory."""
        under_way = StepUnderWay(job, parameter, self._copies.offload(gradient), self.pool)
        ready = self._thread.ready()
        under_way.done = self._worker.submit(self._thread.run, [under_way], ready)
        return under_way

    def sent(self, under_way: StepUnderWay, gradient: Tensor) -> StepUnderWay:
        """`tier.sent`: the gradient's copy has ended. `gradient` is named so that it lives until here."""
        if under_way.gradient is not None:
            self._copies.wait(under_way.gradient, gradient)
        return under_way

    def stepped(self, parameter: Tensor, under_way: StepUnderWay) -> Tensor:
        """`tier.stepped`: the parameter has its new value; what was staged on the host is given back."""
        if under_way.done is not None:
            event = under_way.done.result()
            if event is not None and under_way.value is not None:
                torch.cuda.current_stream(parameter.device).wait_event(event)
                under_way.value.last_use = event
        under_way.done = under_way.gradient = None
        for tensor in under_way.job.tensors:
            self.pool.adopt(tensor)
        return parameter

    def close(self) -> None:
        """Ends the thread when its steps are done."""
        self._worker.shutdown(wait=True)


def _nobody() -> None:
    return None


class _Thread:
    """What the worker does where the device is the CPU. The box is empty at once: nothing outlives its step here."""

    def ready(self) -> torch.cuda.Event | None:
        return None

    def run(self, box: list[StepUnderWay], ready: torch.cuda.Event | None) -> torch.cuda.Event | None:
        under_way = box.pop()
        if isinstance(under_way.sent, Future):
            under_way.sent.result()
        with torch.no_grad():
            if under_way.value is None:
                under_way.job.run(under_way.parameter, _gradient(under_way))
                return None
            value = _tensor(under_way.value, under_way.parameter)
            if under_way.job.reads_value:
                value.copy_(under_way.parameter)
            under_way.job.run(value, _gradient(under_way))
            under_way.parameter.copy_(value)
        return None


class _CudaThread(_Thread):
    """On CUDA: value and new value are copied on a stream that nobody else waits for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def ready(self) -> torch.cuda.Event | None:
        """Behind all that reads or writes the parameter up to now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def run(self, box: list[StepUnderWay], ready: torch.cuda.Event | None) -> torch.cuda.Event | None:
        under_way = box.pop()
        if isinstance(under_way.sent, torch.cuda.Event):
            under_way.sent.synchronize()
        if under_way.value is None:
            return super().run([under_way], ready)
        if under_way.value.last_use is not None:
            under_way.value.last_use.synchronize()
        value = _tensor(under_way.value, under_way.parameter)
        if ready is not None:
            self._stream.wait_event(ready)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            if under_way.job.reads_value:
                value.copy_(under_way.parameter, non_blocking=True)
                self._stream.synchronize()
            under_way.job.run(value, _gradient(under_way))
            under_way.parameter.copy_(value, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return done


def _tensor(buffer: HostBuffer, like: Tensor) -> Tensor:
    """The buffer as a dense tensor of that dtype and shape."""
    return buffer.data.view(like.dtype).view(like.shape)


def _gradient(under_way: StepUnderWay) -> Tensor:
    """The gradient's host copy, dense: torch's fused steps walk value, gradient and state side by side."""
    copied = under_way.gradient
    if copied is None:
        raise RuntimeError("a step that is under way has its gradient")
    flat = copied.buffer.data.view(copied.dtype)
    return flat.as_strided(copied.shape, copied.strides).contiguous()
