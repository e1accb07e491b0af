"""What a test looks at inside an engine, in one file: no other test knows how an engine is put together."""

from __future__ import annotations

from typing import Any

import torch

import tiered_zero
from tiered_zero.activations.mover import ActivationMover
from tiered_zero.checkpoint.driver import DriverState
from tiered_zero.data import TrainingLoader
from tiered_zero.hardware.device.accelerator import Lane
from tiered_zero.layout.flat import Unit
from tiered_zero.record.store import SwapStore
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.telemetry.spans import Ledger, Recorder
from tiered_zero.tiers.nvme import NvmeTier
from tiered_zero.tiers.tier import DeviceTier, Home, HostTier, Inventory, Slot, read_slot
from tiered_zero.unit.pager import Pager
from tiered_zero.update.pipeline import UpdatePipeline
from tiered_zero.update.policy import UpdatePolicy
from tiered_zero.update.state_view import StateView


def pager(engine: tiered_zero.Engine) -> Pager:
    return engine._inspect().pager


def activations(engine: tiered_zero.Engine) -> ActivationMover:
    mover = engine._inspect()._activations
    assert mover is not None
    return mover


def gradient_traffic(engine: tiered_zero.Engine) -> dict[str, int]:
    """Bytes of gradients that were read from NVMe (unverified: without a checksum) and written there, by all that have
    arrived."""
    gradients = engine._inspect().gradients
    gradients.wait_transfers()
    flats = [each.paged for each in gradients._units.values() if each.paged is not None]
    tier = flats[0].home.tier
    assert isinstance(tier, NvmeTier)
    return {kind: sum(tier.store.nbytes(kind).values()) for kind in ("read", "unverified", "write")}


def policy(engine: tiered_zero.Engine) -> UpdatePolicy:
    return engine._inspect().policy


def driver_state(engine: tiered_zero.Engine, loader: TrainingLoader | None = None) -> DriverState:
    """What a checkpoint of this engine holds besides arrays."""
    step = engine._inspect()
    return DriverState(
        counts=step.counts,
        overflow=step.overflow,
        policy=step.policy,
        optimizer=engine.optimizer,
        lr_scheduler=engine.lr_scheduler,
        loader=loader,
        module=engine.module,
    )


def pipeline(engine: tiered_zero.Engine) -> UpdatePipeline:
    return policy(engine)._pipeline


def state_view(engine: tiered_zero.Engine) -> StateView:
    return policy(engine).view


def inventory(engine: tiered_zero.Engine) -> Inventory:
    return pager(engine)._inventory


def ledger(engine: tiered_zero.Engine) -> Ledger:
    return engine._inspect().runtime.ledger


def held_nbytes(ledger: Ledger, tier: str) -> int:
    """The bytes that are charged on a tier now, as its limit counts them."""
    ledger.take_recent_peaks()
    return ledger.take_recent_peaks().get(tier, 0)


def lane(engine: tiered_zero.Engine, name: str) -> Lane:
    return engine._inspect().runtime.accelerator.lane(name)


def free_nbytes(store: SwapStore) -> int:
    """Bytes that no record has reserved."""
    return store._table.extents.free_nbytes


def layouts(engine: tiered_zero.Engine) -> list[StateLayout]:
    """Of every sub-group, in the order of their indices."""
    return list(state_view(engine).layouts)


def units(engine: tiered_zero.Engine) -> list[Unit]:
    return [paged.unit for paged in pager(engine).units]


def units_on_device(engine: tiered_zero.Engine) -> list[Unit]:
    """Those whose home is the device."""
    return [unit for unit in units(engine) if pager(engine).is_resident(unit)]


def units_in_use(engine: tiered_zero.Engine) -> list[Unit]:
    return [paged.unit for paged in pager(engine).units if paged.num_users]


def fetched_nbytes(engine: tiered_zero.Engine) -> int:
    """Device memory of units whose home is another tier."""
    found = [paged for paged in pager(engine).units if paged.storage.is_full]
    return sum(r.unit.nbytes for r in found if not pager(engine).is_resident(r.unit))


def units_with_gradients(engine: tiered_zero.Engine) -> list[Unit]:
    return [each.unit for each in engine._inspect().gradients._units.values()]


def is_idle(engine: tiered_zero.Engine) -> bool:
    """Whether the pager is inside no module and no phase."""
    return not pager(engine).frames and engine._inspect().phase.pass_name == "idle"


def evict_all(engine: tiered_zero.Engine) -> None:
    """Every unit that nothing uses leaves the device."""
    pager(engine).invalidate()


def prefetched(engine: tiered_zero.Engine) -> dict[int, Any]:
    """Sub-group -> its state that is read ahead of the update."""
    return dict(pipeline(engine)._prefetcher._works)


def prefetched_nbytes(engine: tiered_zero.Engine) -> int:
    """State that is read ahead of the next step, once the reads have ended."""
    works = prefetched(engine).values()
    for work in works:
        for event in work.reads:
            event.wait()
    return sum(work.raw.numel() for work in works)


def delay_from_now_on(engine: tiered_zero.Engine) -> None:
    """End the warm-up of exact steps of a delayed update."""
    policy(engine)._start_step = 0  # type: ignore[attr-defined]


def param_home(engine: tiered_zero.Engine, unit: Unit) -> Home | None:
    return inventory(engine).find(unit, "param")


def weights_at_home(engine: tiered_zero.Engine) -> dict[str, torch.Tensor]:
    """Name -> the value that lies in host memory, whatever the engine says of it."""
    found = {}
    for name, param in engine.module.named_parameters():
        paged = pager(engine).units.by_param.get(param)
        assert paged is not None
        entry = paged.unit.entries[paged.params[param]]
        home = inventory(engine).home(paged.unit, "param")
        raw = home.slot.tensor
        assert raw is not None
        flat = raw[: paged.unit.nbytes].view(paged.unit.dtype)
        found[name] = flat[entry.start : entry.stop].view(entry.param.shape).clone()
    return found


def store_of(engine: tiered_zero.Engine) -> SwapStore:
    """The first swap store of a run."""
    return next(home.tier.store for home in inventory(engine)._homes.values() if isinstance(home.tier, NvmeTier))


def everything(engine: tiered_zero.Engine) -> dict[str, Any]:
    """Weights, learning rates, and of the update: masters and state bit by bit, step counts."""
    found: dict[str, Any] = dict(engine.module.state_dict())  # first: it waits for an update that is still running
    found["lr"] = engine.get_lr()
    found["scheduler"] = engine.lr_scheduler.last_epoch if engine.lr_scheduler else None
    view = state_view(engine)
    for layout in view.layouts:
        index = layout.subgroup.index
        for piece, scalars in view.scalars.of(layout).items():
            found[f"scalars {index}.{piece}"] = {name: float(value) for name, value in scalars.items()}
        nbytes = layout.nbytes if view.scalars.has_state(layout) else layout.master_nbytes
        found[f"state {index}"] = read_slot(view.inventory.home(layout.subgroup, "state"), 0, nbytes, view.staging)
    return found


def masters(engine: tiered_zero.Engine) -> dict[str, torch.Tensor]:
    """Unit -> its fp32 masters, in whatever format they rest."""
    engine.flush()
    values: dict[str, torch.Tensor] = {}
    for unit in units(engine):
        if unit.trainable:
            is_here = pager(engine).is_resident(unit)
            params = pager(engine).storage(unit).flat if is_here else pager(engine).offloaded_params.read(unit)
            values[f"{unit.index} {unit.name}"] = state_view(engine).read_masters(unit, params)
    return values


def unverified_nbytes(engine: tiered_zero.Engine, category: str) -> int:
    """Bytes read from swap files that no checksum covered, of "param" or "state"."""
    tiers = {home.tier for home in inventory(engine)._homes.values() if isinstance(home.tier, NvmeTier)}
    return sum(tier.store.nbytes("unverified").get(category, 0) for tier in tiers)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is not the same to the bit."""
    assert before.keys() == after.keys()
    return [name for name in before if not _same(before[name], after[name])]


def _same(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(left == right)


def param_slots(engine: tiered_zero.Engine) -> dict[str, Unit]:
    """Slot name -> unit, of the units whose parameters rest off the device."""
    found = [(param_home(engine, unit), unit) for unit in units(engine)]
    return {home.slot.name: unit for home, unit in found if home is not None}


class Traffic:
    """Counts what goes through the tiers while it is installed (`monkeypatch` takes it off): slot name -> times."""

    def __init__(self, monkeypatch: Any) -> None:
        self.fetched: dict[str, int] = {}
        self.written: dict[str, int] = {}
        for tier in (DeviceTier, HostTier, NvmeTier):
            monkeypatch.setattr(tier, "fetch", self._counting(tier.fetch, self.fetched))
            monkeypatch.setattr(tier, "write", self._counting(tier.write, self.written))

    def _counting(self, method: Any, counts: dict[str, int]) -> Any:
        def counted(tier: Any, slot: Slot, data: torch.Tensor, *args: Any) -> Any:
            counts[slot.name] = counts.get(slot.name, 0) + 1
            return method(tier, slot, data, *args)

        return counted

    def clear(self) -> None:
        self.fetched.clear()
        self.written.clear()


def recorder(engine: tiered_zero.Engine) -> Recorder:
    return engine._inspect().runtime.recorder
