"""Tables of results for a terminal. Pure: records in, rich tables out."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from tiered_zero.plan.planner import Plan
from tiered_zero.sizes import TIERS, format_nbytes
from tiered_zero.telemetry.advice import explain_pace
from tiered_zero.telemetry.report import RunReport, known_first


def run_tables(report: RunReport, num_parameters: int) -> RenderableType:
    """Bytes by tier, seconds per step by cause, links, and the bottleneck."""
    return Group(_tier_table(report), _cause_table(report), _link_table(report), *_summary(report, num_parameters))


def plan_table(plan: Plan) -> Table:
    """A tier's kinds, then its sum and its limit."""
    table = make_table("Planned bytes", "tier", "what", ">bytes")
    for tier in known_first(TIERS, (row.tier for row in plan.rows)):
        for row in plan.rows:
            if row.tier == tier:
                table.add_row(tier, row.what, format_nbytes(row.nbytes))
        limit, source = plan.limits.get(tier, (None, ""))
        words = "in all" if limit is None else f"in all, of {format_nbytes(limit)} ({source})"
        table.add_row(tier, words, format_nbytes(plan.nbytes(tier)), style="bold", end_section=True)
    return table


def _tier_table(report: RunReport) -> Table:
    table = make_table("Bytes by tier", "tier", ">planned", ">peak")
    for tier in known_first(TIERS, (*report.planned_nbytes, *report.peak_nbytes)):
        planned, peak = report.planned_nbytes.get(tier), report.peak_nbytes.get(tier)
        table.add_row(tier, *("-" if nbytes is None else format_nbytes(nbytes) for nbytes in (planned, peak)))
    return table


def _cause_table(report: RunReport) -> Table:
    table = make_table("A typical step", "spent in", ">seconds", ">share")
    for cause, seconds in report.seconds.items():
        table.add_row(cause, f"{seconds:.3f}", f"{seconds / report.step_s:.0%}" if report.step_s else "-")
    table.add_section()
    table.add_row("wall time", f"{report.step_s:.3f}", "", style="bold")
    return table


def _link_table(report: RunReport) -> Table:
    table = make_table("Links", "link", ">bytes, whole run", ">rate while busy", ">busy")
    for row in report.link_rows():
        table.add_row(*row)
    return table


def _summary(report: RunReport, num_parameters: int) -> list[str]:
    first, last = ("?" if loss is None else f"{loss:.3f}" for loss in (report.first_loss, report.last_loss))
    start = [f"start: {report.start_s:.1f} s, values of {num_parameters:,} parameters"] if report.start_s else []
    return [
        *start,
        f"{report.steps_text} in {report.total_s:.1f} s, {report.tokens_per_s:,.0f} tokens/s, loss {first} -> {last}",
        f"bound by: {report.bound_by}; overlap {report.overlap:.0%}",
        explain_pace(report),
    ]


def make_table(title: str, *columns: str) -> Table:
    """Columns that begin with > are aligned right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left")
    return table
