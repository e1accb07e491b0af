"""One rank's copy at the call of a save, and its way into a tag."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from tiered_zero.checkpoint.driver import join_states, own_state
from tiered_zero.checkpoint.index import Share, WrittenBy
from tiered_zero.checkpoint.run_state import RunState, copied_places, list_tensors
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.checkpoint.values import encode
from tiered_zero.checkpoint.write import StateSaver, needed_nbytes
from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.config.schema import Config
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.rules.rule import UpdateRule
from tiered_zero.sizes import MIB
from tiered_zero.update.state_view import Scalars
from tiered_zero.version import __version__

_MOST_COPIED_NBYTES = 64 * MIB
"""Of units on the device that no update writes, and a script can change: a save of more returns when it is written."""


def written_by(rule: UpdateRule, config: Config, runtime: Runtime) -> dict[str, Any]:
    """List what WrittenBy says of a run, but for the time."""
    return {
        "tiered_zero": __version__,
        "torch": str(torch.__version__),
        "kernel": rule.kernel.level if rule.kernel is not None else "torch",
        "rule": rule.name,
        "state_format": config.tiered_zero.state_format,
        "world_size": runtime.collectives.world_size,
        "num_threads": torch.get_num_threads() if runtime.accelerator.shares_cores else 0,
    }


@final
@dataclass(frozen=True, kw_only=True)
class Capture:
    """Copies of what a script may change while a save is written. Taken by the driver; written on any thread.

    `params`: unit index -> a copy of a unit on the device. `may_return`: whether all that a script may change is
    copied. `fields`: of the manifest; `needed_nbytes`: of the data.
    """

    fields: Mapping[str, Any]
    needed_nbytes: int
    buffers: Mapping[str, torch.Tensor]
    params: Mapping[int, torch.Tensor]
    may_return: bool
    with_frozen: bool
    save_latest: bool

    @classmethod
    def take(
        cls, state: RunState, fields: Mapping[str, Any], *, has_files: bool, with_frozen: bool, save_latest: bool
    ) -> Capture:
        """`fields`: of the manifest, without the time. `has_files`: False where the save commits stores and writes no
        data."""
        named = list(state.named_buffers()) if has_files and state.runtime.collectives.rank == 0 else []
        buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in named}
        units = state.saved_units(with_frozen) if has_files else []
        on_device = [unit for unit in units if state.inventory.find(unit, "param") is None]
        may_copy = sum(unit.nbytes for unit in on_device) <= _MOST_COPIED_NBYTES
        return cls(
            fields={**fields, "written_by": WrittenBy(**fields["written_by"], created_s=time.time())},
            needed_nbytes=needed_nbytes(state, buffers.values(), with_frozen) if has_files else 0,
            buffers=buffers,
            params={unit.index: state.param_flat(unit).to("cpu", copy=True) for unit in on_device if may_copy},
            may_return=may_copy,
            with_frozen=with_frozen,
            save_latest=save_latest,
        )

    def write(
        self,
        state: RunState,
        tag: TagWriter,
        ready: Transfer,
        scalars: Scalars,
        free: Callable[[int], None] = lambda subgroup: None,
    ) -> Share:
        """Write what this rank saves, and begin to make it durable. `ready`: what compute writes of device memory.
        `free`: called with each sub-group that has been read."""
        ready.wait()
        tensors, records = list_tensors(
            state, copied_places(scalars), scalars, self.buffers.items(), with_frozen=self.with_frozen
        )
        with torch.no_grad():
            StateSaver(state, scalars, tag.writer, free).save(self.buffers, self.params, self.with_frozen)
        return Share(
            tensors=tensors,
            records=records,
            scalars={name: encode(own, f"state of {name}") for name, own in scalars.by_name().items()},
            driver=own_state(self.fields["driver"]),
            stores=[tag.writer.finish()],
        )

    def publish(self, tag: TagWriter, shares: Sequence[Share]) -> None:
        """Give the tag its name: all that `shares` have is durable, but for what this rank has just written."""
        driver = join_states(self.fields["driver"], [share.driver for share in shares])
        tag.publish({**self.fields, "driver": driver}, shares, save_latest=self.save_latest)
