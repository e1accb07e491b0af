"""What one rank has copied when a save was asked for, and how it writes that into a tag."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from tiered_zero.checkpoint.driver import join_states, own_state
from tiered_zero.checkpoint.encode import encode
from tiered_zero.checkpoint.file_writer import FileWriter, Piece
from tiered_zero.checkpoint.portable import RunState, StateSnapshot, buffer_key
from tiered_zero.checkpoint.saving import Ranges, StateSaver
from tiered_zero.checkpoint.shares import Share, join_scalars
from tiered_zero.checkpoint.tag_manifest import TensorEntry, WrittenBy
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.checkpoint.tensors import describe
from tiered_zero.config.schema import Config
from tiered_zero.optim.rule import UpdateRule
from tiered_zero.sizes import MIB
from tiered_zero.transfer import Transfer
from tiered_zero.version import __version__

_MOST_COPIED_NBYTES = 64 * MIB
"""Of units with parameters that no update writes and that rest on the device, where a script can change them at any
time, are copied at the call; a save of more returns when it is written."""


def written_by(rule: UpdateRule, config: Config, world_size: int) -> dict[str, Any]:
    """List what WrittenBy says of a run, but for the time."""
    return {
        "tiered_zero": __version__,
        "torch": str(torch.__version__),
        "kernel": rule.kernel.level if rule.kernel is not None else "torch",
        "rule": rule.name,
        "state_format": config.tiered_zero.state_format,
        "world_size": world_size,
    }


@final
@dataclass(frozen=True, kw_only=True)
class Capture:
    """What a script may change while a save is written, copied. Taken by the driver; written on any thread.

    `params`: unit index -> a copy of a unit on the device. `may_return`: whether all are copied that a script may
    change. `specs`: of buffers and of parameters without a master. `fields`: of the manifest; `needed_nbytes`: of the
    data.
    """

    fields: Mapping[str, Any]
    needed_nbytes: int
    buffers: Mapping[str, torch.Tensor]
    params: Mapping[int, torch.Tensor]
    may_return: bool
    specs: Mapping[str, TensorEntry]
    with_frozen: bool
    save_latest: bool

    @classmethod
    def take(
        cls, state: RunState, fields: Mapping[str, Any], *, has_files: bool, with_frozen: bool, save_latest: bool
    ) -> Capture:
        """`fields`: step, driver and written_by, without the time. `has_files`: off, all that the save needs is in the
        stores that it commits."""
        named = list(state.named_buffers()) if has_files and state.runtime.collectives.rank == 0 else []
        buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in named}
        on_device = state.unmastered_on_device(with_frozen) if has_files else []
        may_copy = sum(unit.nbytes for unit in on_device) <= _MOST_COPIED_NBYTES
        of_buffers = {buffer_key(name): describe(own.dtype, own.shape) for name, own in buffers.items() if own.numel()}
        buffers_nbytes = sum(spec.nbytes for spec in of_buffers.values())
        return cls(
            fields={**fields, "written_by": WrittenBy(**fields["written_by"], created_s=time.time())},
            needed_nbytes=state.most_state_nbytes() + state.param_nbytes(with_frozen) + buffers_nbytes,
            buffers=buffers,
            params={unit.index: state.param_flat(unit).to("cpu", copy=True) for unit in on_device if may_copy},
            may_return=may_copy,
            specs={**state.param_specs(with_frozen), **of_buffers},
            with_frozen=with_frozen,
            save_latest=save_latest,
        )

    def write(
        self,
        state: RunState,
        tag: TagWriter,
        ready: Transfer,
        snapshot: StateSnapshot,
        free: Callable[[int], None] = lambda subgroup: None,
    ) -> Share:
        """Write what this rank saves, and begin to make it durable. `ready`: what compute writes of device memory.
        `free`: called with each sub-group that has been read."""
        ready.wait()
        for key, spec in {**state.state_specs(snapshot.is_stepped), **self.specs}.items():
            tag.writer.declare(key, spec)
        with torch.no_grad():
            saver = StateSaver(state, snapshot, partial(_append, tag.writer), free)
            saver.save(self.buffers, self.params, self.with_frozen)
        return Share(
            written=tag.writer.finish_files(),
            scalars={name: encode(own, f"state of {name}") for name, own in snapshot.scalars.items()},
            driver=own_state(self.fields["driver"]),
        )

    def publish(self, tag: TagWriter, shares: Sequence[Share]) -> None:
        """Give the tag its name: all that `shares` have is durable, but for what this rank has just written."""
        driver = join_states(self.fields["driver"], [share.driver for share in shares])
        fields = {**self.fields, "driver": driver, "scalars": join_scalars(shares)}
        tag.publish(fields, save_latest=self.save_latest, written=[share.written for share in shares])


def _append(writer: FileWriter, memory: memoryview, ranges: Ranges) -> Transfer:
    return writer.append(memory, [Piece(own.key, own.start, own.stop, offset) for own, offset in ranges]).transfer
