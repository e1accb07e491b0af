"""One line of a plan, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiered_zero.sizes import format_nbytes


@dataclass(frozen=True)
class PlanRow:
    """`kind`: what the ledger counts it as. `what`: in words."""

    tier: str
    kind: str
    nbytes: int
    what: str


def format_table(rows: Sequence[PlanRow], limits: Mapping[str, tuple[int, str]]) -> str:
    lines = []
    for tier in ("device", "host", "nvme"):
        own = [row for row in rows if row.tier == tier]
        if not own:
            continue
        total = format_nbytes(sum(row.nbytes for row in own))
        limit = f" of {format_nbytes(limits[tier][0])} ({limits[tier][1]})" if tier in limits else ""
        lines.append(f"  {tier}: {total}{limit}")
        lines += [f"    {format_nbytes(row.nbytes):>10}  {row.what}" for row in own]
    return "\n".join(lines)
