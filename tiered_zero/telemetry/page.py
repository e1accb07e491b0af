"""Render the record of a run as one HTML page of figures, tables and charts, without scripts or network access."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from statistics import median

from tiered_zero.sizes import GIB, KIB, MIB, TIERS, format_nbytes
from tiered_zero.telemetry.advice import NAMES, explain_pace, explain_prediction
from tiered_zero.telemetry.charts import NOT_RECORDED, Series, legend, line_chart, stacked_chart
from tiered_zero.telemetry.report import CAUSES, RunReport, StepReport, known_first
from tiered_zero.telemetry.runlog import RunRecord
from tiered_zero.telemetry.spans import is_wait

COLOURS = {
    "forward": ("#2f6fb5", "#6aa5e0"),
    "backward": ("#5b4fa8", "#a095ea"),
    "step": ("#1f8a70", "#4fc0a2"),
    "update": ("#5d8f2a", "#a3cf6a"),
    "wait_param": ("#d9822b", "#f0a35a"),
    "wait_update": ("#c23b4e", "#ee7485"),
    "wait_grad": ("#a88a1a", "#d9c05a"),
    "wait_state": ("#a3447f", "#d884b8"),
    "wait_lease": ("#d06a9a", "#f2a8c8"),
    "wait_ranks": ("#7a5230", "#cda678"),
    "wait_activation": ("#8c6d1f", "#cbb062"),
    "save": ("#8a5a83", "#c79bc0"),
    "other": ("#b4bdc4", "#66727b"),
    "fetch": ("#2b8196", "#6cc0d6"),
    "reduce": ("#6d4c41", "#c79a86"),
    "device": ("#2f6fb5", "#6aa5e0"),
    "host": ("#1f8a70", "#4fc0a2"),
    "nvme": ("#d9822b", "#f0a35a"),
}
"""Name of a cause or tier -> its (light, dark) colours."""

INKS = {
    "ink": ("#1c2126", "#e6eaed"),
    "soft": ("#5b6670", "#9aa7b1"),
    "rule": ("#e1e5e8", "#323b42"),
    "page": ("#f5f6f7", "#14181b"),
    "card": ("#ffffff", "#1d2327"),
    "warn": ("#b3261e", "#ff8a80"),
}
"""Name of a text or surface -> its (light, dark) colours."""


def style_of(name: str) -> str:
    """Return the CSS class of the cause or tier `name`; `other` if COLOURS does not have it."""
    return name if name in COLOURS else "other"


def _variables(theme: int) -> str:
    return " ".join(f"--{name}: {pair[theme]};" for name, pair in {**COLOURS, **INKS}.items())


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_RULES = """
body { margin: 0 auto; max-width: 1500px; padding: 24px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 22px; margin: 0 }
p { margin: 4px 0 16px; color: var(--soft) }
p b { color: var(--ink); font-weight: 500 }
.warn { color: var(--warn) }
.why { color: var(--ink); font-size: 17px; margin: 12px 0 16px } .why b { font-weight: 600 }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 0 0 16px }
dl div, figure { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 16px }
dt { color: var(--soft); font-size: 13px }
dd { margin: 0; font-size: 18px; font-variant-numeric: tabular-nums }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 16px }
figure { margin: 0 0 16px }
.charts figure { margin: 0 }
.charts + figure { margin-top: 16px }
figcaption { font-weight: 600; margin-bottom: 4px }
svg { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif }
.tick { fill: var(--soft); font-variant-numeric: tabular-nums } .label { fill: var(--ink); font-size: 14px }
.middle { text-anchor: middle } .end { text-anchor: end }
.grid { stroke: var(--rule); fill: none } .axis { stroke: var(--soft); fill: none }
rect, circle { fill: var(--it) } .line { stroke: var(--it); stroke-width: 1.8; stroke-linejoin: round; fill: none }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 4px; padding: 0; font-size: 13px;
  list-style: none }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 6px; border-radius: 2px;
  background: var(--it) }
.note, .none { font-size: 13px; margin: 4px 0 0 }
table { border-collapse: collapse; margin-top: 12px; font-size: 14px; font-variant-numeric: tabular-nums }
th, td { padding: 3px 16px 3px 0; text-align: left; font-weight: 400; border-bottom: 1px solid var(--rule);
  overflow-wrap: normal }
tbody th, tbody td { white-space: nowrap } td { text-align: right } thead { color: var(--soft) }
.meanings th, .meanings td { vertical-align: top } .meanings td { text-align: left; white-space: normal }
@media (max-width: 640px) { body { padding: 12px } figure { padding: 10px 12px; overflow-x: auto }
  svg, .label { font-size: 19px } .label[transform] { display: none }
  th, td { padding-right: 10px } table { font-size: 13px } }
@media print { body { max-width: none; padding: 0; print-color-adjust: exact; -webkit-print-color-adjust: exact }
  figure { break-inside: avoid } }
"""

STYLE = (
    f":root {{ {_variables(0)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}\n"
    + "\n".join(f".{name} {{ --it: var(--{name}) }}" for name in COLOURS)
    + _RULES
)


CUT_AT = 4.0
"""A step's bar is cut off at this multiple of the median wall time. Else one long step would flatten the others."""

MAX_PLACES = 6
"""The most saved checkpoints that the page names."""


def render_page(run: RunRecord, title: str) -> str:
    """Return the HTML of the page about `run`."""
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
            _plan(run),
            _words("Config: keys that do not have their defaults", run.header.config),
            _words("What the names mean", {name: meaning for name, (meaning, _) in NAMES.items()}),
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
    ended = "" if run.end_save_s is not None else f' <strong class="warn">{cut}</strong>'
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
        a_step = format_nbytes(written // report.steps)
        entries["written to disk per step (a drive is rated for a number of TB written)"] = (
            f"{a_step}; 1 TB in {1e12 * report.steps / written:,.0f} steps"
        )
    if saves := _saves(run):
        *others, last = map(str, saves)
        places = [*others[: MAX_PLACES - 1], *["..."] * (len(others) >= MAX_PLACES), last]
        entries[f"checkpoints saved, after step {', '.join(places)}"] = f"{len(saves)} in {sum(saves.values()):.2f} s"
    return f"<dl>{''.join(f'<div><dt>{name}</dt><dd>{escape(text)}</dd></div>' for name, text in entries.items())}</dl>"


def _saves(run: RunRecord) -> dict[int, float]:
    """Return step -> seconds of saving checkpoints after that step."""
    calls = {step.step - 1: seconds for step in run.steps if (seconds := step.seconds.get("save"))}
    if run.end_save_s:
        calls[run.steps[-1].step if run.steps else 0] = run.end_save_s
    return calls


def _curve(steps: Sequence[StepReport], title: str, name: str) -> str:
    """Draw the field `name` of StepReport by step. Leave out the steps in which it is None."""
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
    words = [(style_of(name), f"{_explained(name)} {mean[name]:.3g}") for name in names]
    note = f"Legend: mean {unit} per step."
    walls = [step.wall_s * scale for step in steps]
    most = CUT_AT * median(walls) if walls else 0.0
    if num_cut := sum(wall > most for wall in walls):
        are = "is" if num_cut == 1 else "are"
        note += f" {num_cut} of {len(steps)} steps {are} cut off; the longest took {max(walls):.3g} {unit}."
    chart = stacked_chart("Step time by cause", "step", unit, layers, most)
    return _figure("Step time by cause", chart, legend(words), note)


def _memory(steps: Sequence[StepReport]) -> str:
    tiers = known_first(TIERS, (tier for step in steps for tier in step.tier_nbytes))
    totals = {tier: [(step.step, step.tier_nbytes.get(tier, 0)) for step in steps] for tier in tiers}
    largest = max((nbytes for points in totals.values() for _, nbytes in points), default=0)
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    scale, unit = next((each for each in units if largest >= each[0]), (1, "B"))
    series = [
        Series(name=tier, style=style_of(tier), points=[(step, nbytes / scale) for step, nbytes in totals[tier]])
        for tier in tiers
    ]
    chart = line_chart("Bytes by tier: peak in each step", "step", unit, series, from_zero=True)
    return _figure(
        "Bytes by tier", chart, legend([(style_of(tier), tier) for tier in tiers]), f"Peak in each step, {unit}."
    )


def _explained(name: str) -> str:
    """Return `name`, a cause. For a wait add its meaning, because the name alone says too little."""
    return f"{name} ({NAMES[name][0]})" if is_wait(name) and name in NAMES else name


def _why(report: RunReport) -> str:
    sentence = " ".join(filter(None, (explain_pace(report), explain_prediction(report))))
    return f'<p class="why"><b>What sets the pace.</b> {escape(sentence)}</p>' if sentence else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], num_names: int = 1, style: str = "") -> str:
    """Render an HTML table; the first `num_names` cells of each row are header cells."""

    def cells(row: Sequence[str]) -> str:
        tags = ["th"] * num_names + ["td"] * (len(row) - num_names)
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for tag, cell in zip(tags, row, strict=True))}</tr>"

    if not rows:
        return NOT_RECORDED
    heading = f"<thead>{cells(head)}</thead>" if head else ""
    return f"<table{style}>{heading}<tbody>{''.join(map(cells, rows))}</tbody></table>"


def _links(report: RunReport) -> str:
    """Render a table with bytes and rate of each lane."""
    return _figure("Links", _table(("link", "bytes, whole run", "rate while busy", "busy"), [*report.link_rows()]))


def _plan(run: RunRecord) -> str:
    """Render a table of planned and peak bytes: for each tier, a row for each kind and then one for the tier."""
    planned, peak = run.header.planned_nbytes, run.steps[-1].kind_nbytes if run.steps else {}
    sums = run.header.planned_by_tier, run.report.peak_nbytes
    rows = []
    for tier in known_first(TIERS, (*planned, *peak, *sums[1])):
        of_kind = planned.get(tier, {}), peak.get(tier, {})
        cells = [
            (kind, [source.get(kind) for source in of_kind]) for kind in known_first((), (*of_kind[0], *of_kind[1]))
        ]
        # a tier's peak may be below the sum of its kinds, whose peaks lie at different times
        for kind, pair in [*cells, ("in all", [source.get(tier) for source in sums])]:
            words = run.header.meanings.get(tier, {}).get(kind, kind)
            rows.append((tier, words, *("-" if nbytes is None else format_nbytes(nbytes) for nbytes in pair)))
    return _figure("Planned and measured", _table(("tier", "kind", "planned", "peak"), rows, num_names=2))


def _words(title: str, texts: Mapping[str, str]) -> str:
    """Render a table with one row for each name and its text."""
    return _figure(title, _table((), [*texts.items()], style=' class="meanings"'))


def _seconds_unit(largest_s: float) -> tuple[float, str]:
    return (1.0, "seconds") if largest_s >= 1 else (1e3, "ms")


def _figure(title: str, chart: str, words: str = "", note: str = "") -> str:
    caption = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{words}{chart}{caption}</figure>"
