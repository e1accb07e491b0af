"""When the update runs: inside step(), beside the next forward, or one step late.

[Note: Update policies]
`barrier`: step() returns when every weight is updated, as DeepSpeed does.
`overlapped`: step() returns once the verdict is known. The update runs on its own lane in the order in which the next
forward needs the units; using a unit waits for that unit's publication and for nothing else. Update windows are
nested (last gradient out, first forward in), so this order is optimal and exact.
`delayed`: ZeRO-Offload's one-step delayed parameter update (Ren et al. 2021, section 5.2). After `delay_start_step`
exact steps the update of step i runs while forward and backward of step i+1 compute with the parameters from before
it: theta(i+1) = update(theta(i), gradient at theta(i-1)). New 16-bit parameters are written behind the scenes and
gradients are double-buffered, so neither side sees the other's half-done work; the next step() publishes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tiered_zero.hardware.accelerator import Event
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.optim.stepper import GradientSource, StreamingStepper, UpdateJob
from tiered_zero.tiers.inventory import Inventory, Publication


class UpdatePolicy(ABC):
    """Runs updates. Called from the driver thread between backward and forward.

    `failure`: why an update broke off, from the moment when it did; state is rewritten in place, so it stays.
    """

    def __init__(self, stepper: StreamingStepper, groups: Sequence[Mapping[str, Any]]) -> None:
        """`groups`: the live param groups."""
        self._stepper = stepper
        self._groups = groups
        self.failure: BaseException | None = None

    @abstractmethod
    def apply(self, gradients: GradientSource, grad_scale: float) -> None:
        """The step is taken: run its update now, or see to it that nobody reads weights that wait for it."""

    @abstractmethod
    def flush(self) -> None:
        """Return when every update so far is made and visible; raise what made one fail."""

    def prepare_evaluation(self) -> None:
        """A forward begins that shall see every update. Exact policies wait for what is used, as in training."""
        return

    def skip(self) -> None:
        """The step is skipped: it has no update of its own, but an earlier one becomes visible."""
        self.flush()

    def _step(self, job: UpdateJob) -> None:
        try:
            self._stepper.step(job)
        except BaseException as error:
            self.failure = error
            raise


class BarrierPolicy(UpdatePolicy):
    """`forget`: drops what the device holds of trainable units."""

    def __init__(
        self, stepper: StreamingStepper, groups: Sequence[Mapping[str, Any]], forget: Callable[[], None]
    ) -> None:
        super().__init__(stepper, groups)
        self._forget = forget

    def apply(self, gradients: GradientSource, grad_scale: float) -> None:
        self._forget()
        self._step(UpdateJob(gradients, grad_scale, freeze_groups(self._groups), {}))

    def flush(self) -> None:
        """Nothing is ever under way between steps."""


class OverlappedPolicy(UpdatePolicy):
    """`withhold`: takes units from compute until their publication, which `inventory` hands to whoever asks."""

    def __init__(
        self,
        stepper: StreamingStepper,
        groups: Sequence[Mapping[str, Any]],
        inventory: Inventory,
        units: Sequence[Unit],
        runtime: Runtime,
        withhold: Callable[[], None],
    ) -> None:
        super().__init__(stepper, groups)
        self._inventory = inventory
        self._units = units
        self._runtime = runtime
        self._withhold = withhold
        self._running: Event | None = None

    def apply(self, gradients: GradientSource, grad_scale: float) -> None:
        self.flush()
        publications = {unit.index: Publication() for unit in self._units}
        for unit in self._units:
            self._inventory.publish(unit, publications[unit.index])
        self._withhold()
        job = UpdateJob(gradients, grad_scale, freeze_groups(self._groups), publications)
        accelerator = self._runtime.accelerator
        after = [accelerator.record_compute()]
        self._running = accelerator.lane("optimizer").submit(partial(self._step, job), after=after)

    def flush(self) -> None:
        if self._running is not None:
            with self._runtime.recorder.span("compute", "wait_update"):
                self._running.wait()
            self._running = None


class DelayedPolicy(UpdatePolicy):
    """`exact`: the policy of the first `start_step` steps. `reveal`: makes what was written behind the scenes what
    compute reads.
    """

    def __init__(
        self,
        exact: UpdatePolicy,
        start_step: int,
        stepper: StreamingStepper,
        groups: Sequence[Mapping[str, Any]],
        runtime: Runtime,
        reveal: Callable[[], None],
    ) -> None:
        super().__init__(stepper, groups)
        self._exact = exact
        self._start_step = start_step
        self._runtime = runtime
        self._reveal = reveal
        self._num_applied = 0
        self._running: Event | None = None

    def apply(self, gradients: GradientSource, grad_scale: float) -> None:
        self._num_applied += 1
        if self._num_applied <= self._start_step:
            self._exact.apply(gradients, grad_scale)
            return
        self.flush()
        groups = freeze_groups(self._groups)
        job = UpdateJob(gradients, grad_scale, groups, {}, param_kind="param_back", every_subgroup=True)
        self._running = self._runtime.accelerator.lane("optimizer").submit(partial(self._step, job))

    def prepare_evaluation(self) -> None:
        self.flush()

    def flush(self) -> None:
        self._exact.flush()
        if self._running is not None:
            with self._runtime.recorder.span("compute", "wait_update"):
                self._running.wait()
            self._running = None
            self._reveal()


def freeze_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups' values as they are now: schedulers change them while an update runs."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in groups
    ]
