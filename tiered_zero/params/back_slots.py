"""The second home of a unit's parameters, behind the one that compute reads."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_zero.layout.flat import Unit
from tiered_zero.params.pager import Pager
from tiered_zero.tiers.inventory import Home, Inventory, Owner


class ParamBackSlots:
    """The "param_back" homes of `units`, which a delayed update writes while compute reads the "param" homes.

    `swap_param_buffers` swaps the two; of a unit that lives on the device the back home is copied there. Driver thread.
    """

    def __init__(self, units: Sequence[Unit], inventory: Inventory, pager: Pager) -> None:
        self._units = units
        self._inventory = inventory
        self._pager = pager
        self._swapped: dict[tuple[Owner, str], Home] = {}
        """The homes after the swap."""

    def begin_update(self) -> None:
        homes = self._inventory.home
        offloaded = [unit for unit in self._units if not self._pager.is_device_resident(unit)]
        self._swapped = {(unit, "param"): homes(unit, "param_back") for unit in offloaded}
        self._swapped |= {(unit, "param_back"): homes(unit, "param") for unit in offloaded}

    def swap_param_buffers(self) -> None:
        self._pager.updates.invalidate()
        for unit in self._units:
            if self._pager.is_device_resident(unit):
                back = self._inventory.home(unit, "param_back")
                back.tier.fetch(back.slot, self._pager.storage(unit).flat).wait()
        self._inventory.move(self._swapped)
        self._pager.updates.end_update()
