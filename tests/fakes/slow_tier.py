"""A tier in memory whose transfers take a number of events, not of seconds; it logs when each begins and ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from tests.support.inspection.insides import Slot, Tier, UnitUpdate, as_bytes
from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import TransferError

Entry = tuple[str, str]
"""(what, slot or name): "read", "read done", "write", "write done", "fetch", "fetch done", and what others log."""


class SlowTransfer(Transfer):
    """Moves its bytes when it is waited for, or when it is asked for `latency` log entries after its start."""

    def __init__(
        self, tier: SlowTier, kind: str, slot: Slot, move: Callable[[], object], after: Transfer | None
    ) -> None:
        self._tier = tier
        self._kind = kind
        self._slot = slot
        self._move: Callable[[], object] | None = move
        self._after = after
        self._start = len(tier.log)
        self._error: Exception | None = None
        self._lock = threading.Lock()
        tier.log.append((kind, slot.name))

    def done(self) -> bool:
        if len(self._tier.log) - self._start > self._tier.latency and (self._after is None or self._after.done()):
            self._finish()
        return self._move is None

    def wait(self) -> None:
        self._finish()
        if self._error is not None:
            raise self._error

    def _finish(self) -> None:
        with self._lock:
            if self._move is None:
                return
            try:
                if self._after is not None:
                    self._after.wait()
                if (self._kind, self._slot.name) in self._tier.failing:
                    raise TransferError(f"{self._kind} of {self._slot.name} failed")
                self._move()
            except Exception as error:
                self._error = error.with_traceback(None)  # whose frames hold the tensors
            self._move = None  # finished: the tensors are let go
            self._tier.log.append((f"{self._kind} done", self._slot.name))


@dataclass
class SlowTier(Tier):
    """`latency`: log entries after which a transfer is done by itself. `failing`: (kind, slot name) that fail.
    `refusing`: likewise, but the call itself raises."""

    name: str = "nvme"
    latency: int = 0
    log: list[Entry] = field(default_factory=list)
    failing: set[Entry] = field(default_factory=set)
    refusing: set[Entry] = field(default_factory=set)
    contents: dict[str, torch.Tensor] = field(default_factory=dict)

    def reserve(self, name: str, nbytes: int, kind: str, *, committed: bool = False) -> Slot:
        self.contents[name] = torch.zeros(nbytes, dtype=torch.uint8)
        return Slot(name=name, nbytes=nbytes, kind=kind)

    def read(self, slot: Slot, out: torch.Tensor, offset: int = 0) -> Transfer:
        return self._start("read", slot, out, self.contents[slot.name][offset : offset + out.numel()])

    def write(self, slot: Slot, data: torch.Tensor, offset: int = 0, after: Transfer | None = None) -> Transfer:
        return self._start("write", slot, self.contents[slot.name][offset : offset + data.numel()], data)

    def fetch(self, slot: Slot, out: torch.Tensor, after: UnitUpdate | None = None) -> Transfer:
        target = as_bytes(out).data  # a version counter of its own, as an accelerator's copies have
        return self._start("fetch", slot, target, self.contents[slot.name][: target.numel()], after and after.written)

    def close(self) -> None:
        self.contents.clear()

    def _start(
        self, kind: str, slot: Slot, target: torch.Tensor, source: torch.Tensor, after: Transfer | None = None
    ) -> Transfer:
        if (kind, slot.name) in self.refusing:
            raise TransferError(f"{kind} of {slot.name} refused")
        return SlowTransfer(self, kind, slot, partial(target.copy_, source), after)
