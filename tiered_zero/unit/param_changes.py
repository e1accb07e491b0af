"""Changes of parameters by user code: written back to their homes, or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import final

import torch
from torch import nn

from tiered_zero.errors import ModelError, RankError
from tiered_zero.hardware.device.outside_modes import runs_outside_modes
from tiered_zero.hardware.ranks.agreement import agree
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.unit.offloaded_params import OffloadedParams
from tiered_zero.unit.unit_state import PagedUnit, UnitState, UnitTable


@final
class ParamChanges:
    """Finds changes on the device that the homes do not have. Driver thread. See [Note: Writes through .data]."""

    def __init__(self, units: UnitTable, offloaded_params: OffloadedParams, runtime: Runtime) -> None:
        self._units = units
        self._accelerator = runtime.accelerator
        self._ranks = runtime.collectives
        self._offloaded_params = offloaded_params
        self._refusal: ModelError | None = None
        self._watched: set[PagedUnit] = set()
        """Units of which user code was given memory."""
        self._allowed: Counter[PagedUnit] = Counter()
        """Units that user code may change, and in how many blocks."""

    @runs_outside_modes
    def watch(self, param: nn.Parameter) -> None:
        """Copy the values of a parameter whose memory user code is about to get. What was watched before it is compared
        now, where no view of it is left."""
        for paged in [other for other in self._watched if not (self._allowed[other] or other.storage.is_viewed)]:
            self.look(paged)
            self._watched.discard(paged)
        paged = self._units.by_param[param]
        if paged.state is UnitState.IN_USE:
            paged.storage.watch.copy_values(paged.params[param])
            self._watched.add(paged)

    def look(self, paged: PagedUnit) -> None:
        """Mark a unit in use as stale where its parameters were changed: the change is lost, and the next `refuse`
        raises for it."""
        if paged.state is not UnitState.IN_USE or self._allowed[paged]:
            return
        if (changed := paged.storage.end_change()) is not None:
            self._refusal = _changed_past_home(*changed)
            paged.mark_stale()

    def refuse(self) -> None:
        """Raise ModelError where parameters were changed past their homes since the last call."""
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    @runs_outside_modes
    def check_converted(self) -> None:
        """Raises ModelError where a parameter that lives on the device was moved or converted."""
        for paged in self._units.by_index.values():
            if paged.is_resident and paged.state is UnitState.IN_USE:
                paged.storage.check_converted()

    # -- gathered --------------------------------------------------------------------------------------------------

    @contextmanager
    def allow(self, paged: PagedUnit) -> Iterator[None]:
        """Refuse no change of the unit until the block has written it to its home, or has failed."""
        self._allowed[paged] += 1
        try:
            yield
        finally:
            self._allowed[paged] -= 1

    @contextmanager
    def changing(self, paged: PagedUnit) -> Iterator[None]:
        """Run user code that changes the unit. If it raises on some ranks and not on all, that ends the run: the
        others would wait in `write_back`, and what was changed before is on each rank something else."""
        try:
            yield
        except Exception as error:
            with suppress(RankError):  # of a run that has ended: the block's own error says more
                self._end_change(paged, f"{type(error).__name__}: {error}")
            raise
        except GeneratorExit:  # the block was dropped, as torch drops those of a load_state_dict() that an error ends
            self._ranks.fail("an error ended gathered() or load_state_dict(); its own output says which")
            raise
        except BaseException as interrupt:
            self._ranks.fail(f"{type(interrupt).__name__} inside of gathered()")
            raise
        self._end_change(paged, "")

    def _end_change(self, paged: PagedUnit, error: str) -> None:
        found = agree(self._ranks, f"the end of gathered() of {paged.unit.name}", lambda: error)
        failed = [rank for rank, text in enumerate(found) if text]
        if failed and len(failed) < len(found):
            message = f"the code inside of gathered() has raised on rank {failed[0]} alone: {found[failed[0]]}"
            self._ranks.fail(message)
            if not error:
                raise RankError(f"Rank {failed[0]} failed, which ends the run on all {len(found)} ranks: {message}")

    @runs_outside_modes
    def write_back(self, paged: PagedUnit, old: torch.Tensor | None, modifier_rank: int = 0) -> None:
        """Write the parameters that user code has changed to their home, and to whatever was derived from them.

        Every rank calls it, and gets the values of `modifier_rank`."""
        paged.renew()
        paged.storage.reattach(keep=True)
        try:
            if self._ranks.world_size > 1:
                flat = self._accelerator.alias(paged.storage.flat)  # gloo's threads let go of it later
                self._ranks.broadcast(flat, modifier_rank, f"changed values of {paged.unit.name}")
                paged.storage.watch.begin()
            self._offloaded_params.change(paged.unit, paged.storage.flat, old)
        except Exception:
            paged.mark_stale()
            raise

    @runs_outside_modes
    def drop(self, paged: PagedUnit) -> str | None:
        """Return the name of a parameter that was changed and not written back. Its unit is read again. Called where a
        `gathered` block ends; inside another one, which looks itself, it returns None."""
        if paged.num_users > 1 + paged.is_resident:
            return None
        if (changed := paged.storage.end_change()) is not None:
            paged.mark_stale()
        return None if changed is None else changed[0]


def _changed_past_home(param: str, replaced_in: str) -> ModelError:
    """`replaced_in`: the class of the module, where the parameter was given other memory."""
    message = (
        f"The values of parameter {param} were changed in forward or between steps, but not at its home on the tiers: "
        "the next update would undo that. Change parameters between steps, inside "
        "`with tiered_zero.gathered(param, modify=True):`."
    )
    if replaced_in:
        message += (
            f" It was given other memory (.data = ...). Where its module, {replaced_in}, does so in its forward, it "
            "cannot be paged: of bitsandbytes, take Linear4bit in place of Linear8bitLt, and after model.eval() call "
            "train() of each Linear4bit, which packs its weight otherwise on a CPU with AVX-512."
        )
    return ModelError(message)
