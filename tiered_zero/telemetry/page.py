"""Render a run as one HTML page: no network, no script; it follows the reader's light or dark setting."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from statistics import median

from tiered_zero.sizes import GIB, KIB, MIB, TIERS, format_nbytes
from tiered_zero.telemetry.advice import MEANINGS, explain_pace, explain_prediction
from tiered_zero.telemetry.charts import (
    NOT_RECORDED,
    Bar,
    Series,
    legend,
    line_chart,
    stacked_chart,
    timeline_chart,
)
from tiered_zero.telemetry.page_style import PAGE, STYLE, style_of
from tiered_zero.telemetry.report import CAUSES, RunReport, StepReport, known_first
from tiered_zero.telemetry.runlog import RowLayout, RunRecord, Timeline, by_start
from tiered_zero.telemetry.spans import DRIVER_LANE, LANES, Span, is_wait

CUT_AT = 4.0
"""Multiple of the median step's time at which longer steps, such as the first, are cut off, to keep the others
readable."""

MAX_BARS = 4000
"""The most bars in a timeline: the longest spans, so that the page stays small."""

MAX_PLACES = 6
"""The most checkpoints that are named."""

MAX_ROWS = 6
"""The most rows of a lane: a disk may have more requests at a time."""


def render_page(run: RunRecord, title: str) -> str:
    """Return the page's text."""
    body = "\n".join(
        (
            f"<h1>{escape(title)}</h1>",
            _about(run),
            _why(run.report),
            _figures(run),
            '<div class="charts">',
            _curve(run.steps, "Loss", "loss"),
            _speed(run.steps),
            _causes(run.steps),
            _memory(run.steps),
            _curve(run.steps, "Learning rate", "lr"),
            _curve(run.steps, "Gradient norm, before clipping", "grad_norm"),
            _curve(run.steps, "Loss scale", "loss_scale") if any(step.loss_scale != 1 for step in run.steps) else "",
            "</div>",
            _links(run.report),
            _timeline(run.timeline),
            _plan(run),
            _config(run),
            _meanings(),
        )
    )
    return PAGE.format(title=escape(title), style=STYLE, body=body)


def _about(run: RunRecord) -> str:
    header = run.header
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(header.started_at))
    facts = {"model": header.model, "parameters": f"{header.num_parameters:,}", "started": started, **header.facts}
    if run.steps and (num_before := run.steps[0].step - 1):
        facts["resumed after step"] = f"{num_before:,}"
    cut = "The record has no end: the run was interrupted, or its disk was full."
    ended = "" if run.footer else f' <strong class="warn">{cut}</strong>'
    words = " · ".join(f"{escape(name)} <b>{escape(str(text))}</b>" for name, text in facts.items())
    return f"<p>{words}{ended}</p>"


def _figures(run: RunRecord) -> str:
    report = run.report
    first, last = ("?" if loss is None else f"{loss:.3f}" for loss in (report.first_loss, report.last_loss))
    entries = {
        "made": report.steps_text,
        "loss": f"{first} → {last}",
        "tokens/s": f"{report.tokens_per_s:,.0f}",
        "typical step": f"{report.step_s:.3f} s",
        "overlap": f"{report.overlap:.0%}",
        "bound by": report.bound_by,
    }
    if report.cpu_share is not None:
        entries["CPU share that the process got"] = f"{report.cpu_share:.0%}"
    if written := report.link_nbytes.get("disk write"):
        lasts = f"{1e12 * report.steps / written:,.0f} steps"
        entries[f"wear: written a step (a TB of a drive's rating lasts {lasts})"] = format_nbytes(
            written // report.steps
        )
    if saves := _saves(run):
        *others, last = map(str, saves)
        places = [*others[: MAX_PLACES - 1], *["..."] * (len(others) >= MAX_PLACES), last]
        entries[f"checkpoints saved or loaded, after step {', '.join(places)}"] = (
            f"{len(saves)} in {sum(saves.values()):.2f} s"
        )
    return f"<dl>{''.join(f'<div><dt>{name}</dt><dd>{escape(text)}</dd></div>' for name, text in entries.items())}</dl>"


def _saves(run: RunRecord) -> dict[int, float]:
    """Return the steps after which checkpoints were saved or loaded -> the seconds of those calls."""
    calls = {step.step - 1: seconds for step in run.steps if (seconds := step.seconds.get("save"))}
    if run.footer is not None and run.footer.end_save_s:
        calls[run.steps[-1].step if run.steps else 0] = run.footer.end_save_s
    return calls


def _curve(steps: Sequence[StepReport], title: str, name: str) -> str:
    """Draw a value of the steps that have it."""
    points = [(step.step, value) for step in steps if (value := getattr(step, name)) is not None]
    return _figure(
        title, line_chart(f"{title} by step", "step", name, [Series(name=name, style="step", points=points)])
    )


def _speed(steps: Sequence[StepReport]) -> str:
    counted = any(step.tokens for step in steps)
    name = "Tokens/s" if counted else "Steps/s"
    points = [(step.step, (step.tokens if counted else 1) / step.wall_s) for step in steps if step.wall_s > 0]
    return _figure(
        name,
        line_chart(
            f"{name} by step", "step", name.lower(), [Series(name=name, style="step", points=points)], from_zero=True
        ),
    )


def _causes(steps: Sequence[StepReport]) -> str:
    names = known_first(CAUSES, (name for step in steps for name in step.seconds))
    scale, unit = _seconds_unit(max((step.wall_s for step in steps), default=0.0))
    layers = [
        Series(
            name=name, style=style_of(name), points=[(step.step, step.seconds.get(name, 0.0) * scale) for step in steps]
        )
        for name in names
    ]
    mean = {name: sum(step.seconds.get(name, 0.0) for step in steps) / len(steps) * scale for name in names}
    words = [(style_of(name), f"{name} {mean[name]:.3g}") for name in names]
    note = f"Legend: mean {unit} per step."
    walls = [step.wall_s * scale for step in steps]
    most = CUT_AT * median(walls) if walls else 0.0
    if num_cut := sum(wall > most for wall in walls):
        note += f" {num_cut} of {len(steps)} steps are cut off; the longest took {max(walls):.3g} {unit}."
    chart = stacked_chart("Step time by cause", "step", unit, layers, most)
    return _figure("Step time by cause", chart, legend(words), note)


def _memory(steps: Sequence[StepReport]) -> str:
    tiers = known_first(TIERS, (tier for step in steps for tier in step.tier_nbytes))
    totals = {tier: [(step.step, step.tier_nbytes.get(tier, 0)) for step in steps] for tier in tiers}
    scale, unit = _bytes_unit(max((nbytes for points in totals.values() for _, nbytes in points), default=0))
    series = [
        Series(name=tier, style=style_of(tier), points=[(step, nbytes / scale) for step, nbytes in totals[tier]])
        for tier in tiers
    ]
    chart = line_chart("Bytes by tier: peak in each step", "step", unit, series, from_zero=True)
    return _figure(
        "Bytes by tier", chart, legend([(style_of(tier), tier) for tier in tiers]), f"Peak in each step, {unit}."
    )


def _timeline(timeline: Timeline | None) -> str:
    if timeline is None or not timeline.spans:
        return _figure("A step's timeline", NOT_RECORDED)
    left_out = max(0, len(timeline.spans) - MAX_BARS)
    note = (
        f"The {left_out:,} shortest spans are left out."
        if left_out
        else "Names are drawn where they fit; others on hovering."
    )
    note += (
        f" At most {MAX_ROWS} spans of a lane are drawn at a time. Step {timeline.step} is recorded because the order "
        "in which units are used is known by then; transfers that began in the step before are drawn from its start. "
        "param/3 are the parameters of unit 3, state/5 master weights and optimizer state of sub-group 5."
    )
    kinds = known_first([*dict.fromkeys((*CAUSES, *LANES))], (_style_name(span) for span in timeline.spans))
    words = legend([(style_of(kind), kind) for kind in kinds])
    chart = f'<div class="wide">{draw_timeline(timeline)}</div>'
    return _figure(f"Timeline of step {timeline.step}", chart, words, note)


def draw_timeline(timeline: Timeline) -> str:
    """Draw the step's longest spans as SVG: a row for each lane, more if its spans overlap. A span that began before
    the driver's step is drawn from the step's start."""
    longest = sorted(timeline.spans, key=lambda span: span.start_s - span.end_s)[:MAX_BARS]
    driver = [span for span in longest if span.lane == DRIVER_LANE]
    began_s = min(span.start_s for span in driver or longest)
    within = [span for span in longest if span.end_s > began_s]
    layout = RowLayout()
    scale, unit = _seconds_unit(max(span.end_s for span in longest) - began_s)
    placed = [(layout.place(span), span) for span in by_start(within)]
    placed = [(place, span) for place, span in placed if place[1] < MAX_ROWS]
    rows = sorted({place for place, _ in placed}, key=lambda place: (layout.order(place[0]), place[1]))
    bars = []
    for place, span in placed:
        start, end = (max(span.start_s, began_s) - began_s) * scale, (span.end_s - began_s) * scale
        moved = f", {format_nbytes(span.nbytes)}" if span.nbytes else ""
        style = style_of(_style_name(span))
        tip = f"{span.lane}: {span.name} ({span.kind}), {end - start:.3g} {unit}{moved}"
        bars.append(Bar(row=rows.index(place), start=start, end=end, style=style, label=span.name, tip=tip))
    names = [name if index == 0 else f"{name} ({index + 1})" for name, index in rows]
    return timeline_chart("Timeline", unit, names, bars)


def _style_name(span: Span) -> str:
    """Return the cause or lane that gives a span its colour: its kind on the driver's lane and for waits, else its
    lane."""
    return span.kind if is_wait(span.kind) or span.lane == DRIVER_LANE else span.lane


def _why(report: RunReport) -> str:
    sentence = " ".join(filter(None, (explain_pace(report), explain_prediction(report))))
    return f'<p class="why"><b>What sets the pace.</b> {escape(sentence)}</p>' if sentence else ""


def _links(report: RunReport) -> str:
    """Render bytes and rate of each lane, as in the command line's table."""
    rows = [
        f"<tr><th>{escape(lane)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for lane, *cells in report.link_rows()
    ]
    head = "<tr><th>link</th><td>bytes, whole run</td><td>rate while busy</td><td>busy</td></tr>"
    table = f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
    return _figure("Links", table if rows else NOT_RECORDED)


def _meanings() -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in MEANINGS.items())
    return _figure("What the names mean", f'<table class="meanings"><tbody>{rows}</tbody></table>')


def _plan(run: RunRecord) -> str:
    """Render a row for each kind on each tier, then the tier's sum, whose peak may be less than the sum of its
    kinds'."""
    planned, peak = run.header.planned_nbytes, run.steps[-1].kind_nbytes if run.steps else {}
    sums = run.header.planned_by_tier, run.report.peak_nbytes
    rows = []
    for tier in known_first(TIERS, (*planned, *peak, *sums[1])):
        of_kind = planned.get(tier, {}), peak.get(tier, {})
        cells = [
            (kind, [source.get(kind) for source in of_kind]) for kind in known_first((), (*of_kind[0], *of_kind[1]))
        ]
        for kind, pair in [*cells, ("in all", [source.get(tier) for source in sums])]:
            numbers = "".join(f"<td>{'-' if nbytes is None else format_nbytes(nbytes)}</td>" for nbytes in pair)
            rows.append(f"<tr><th>{escape(tier)}</th><th>{escape(kind)}</th>{numbers}</tr>")
    head = "<tr><th>tier</th><th>kind</th><td>planned</td><td>peak</td></tr>"
    table = f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
    return _figure("Planned and measured", table if rows else NOT_RECORDED)


def _config(run: RunRecord) -> str:
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in run.header.config.items())
    table = f'<table class="meanings"><tbody>{rows}</tbody></table>' if rows else NOT_RECORDED
    return _figure("Config: keys that do not have their defaults", table)


def _seconds_unit(largest_s: float) -> tuple[float, str]:
    return (1.0, "seconds") if largest_s >= 1 else (1e3, "ms")


def _bytes_unit(largest: float) -> tuple[int, str]:
    return next(
        ((size, name) for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if largest >= size), (1, "B")
    )


def _figure(title: str, chart: str, words: str = "", note: str = "") -> str:
    caption = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{words}{chart}{caption}</figure>"
