"""Define the frame and style of the report page; every colour has a light and a dark form."""

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
    "pack": ("#3d7f8c", "#86c3cf"),
    "unpack": ("#7f5f9e", "#bfa2dc"),
    "activations": ("#3f8f6f", "#7fcfaf"),
    "save": ("#8a5a83", "#c79bc0"),
    "other": ("#b4bdc4", "#66727b"),
    "compute": ("#2f6fb5", "#6aa5e0"),
    "fetch": ("#2b8196", "#6cc0d6"),
    "reduce": ("#6d4c41", "#c79a86"),
    "disk read": ("#4a8638", "#88c476"),
    "disk write": ("#a8651f", "#e0a860"),
    "all_gather": ("#4d6fae", "#93b0e6"),
    "reduce_scatter": ("#7a5c99", "#bda0dd"),
    "device": ("#2f6fb5", "#6aa5e0"),
    "host": ("#1f8a70", "#4fc0a2"),
    "nvme": ("#d9822b", "#f0a35a"),
}
"""(light, dark) colours of causes, lanes and tiers. A cause and a lane of one name share a colour."""

INKS = {
    "ink": ("#1c2126", "#e6eaed"),
    "soft": ("#5b6670", "#9aa7b1"),
    "rule": ("#e1e5e8", "#323b42"),
    "page": ("#f5f6f7", "#14181b"),
    "card": ("#ffffff", "#1d2327"),
    "inside": ("#ffffff", "#101416"),
    "warn": ("#b3261e", "#ff8a80"),
}
"""(light, dark) colours of text and surfaces; `inside` is text on a coloured bar."""


def style_of(name: str) -> str:
    """Return the CSS class with the colour of a cause, lane or tier; the class of `other` if it has none."""
    return (name if name in COLOURS else "other").replace(" ", "-")


def _variables(theme: int) -> str:
    return " ".join(f"--{name.replace(' ', '-')}: {pair[theme]};" for name, pair in {**COLOURS, **INKS}.items())


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
.wide { overflow-x: auto } .wide svg { min-width: 900px }
.tick { fill: var(--soft); font-variant-numeric: tabular-nums } .label { fill: var(--ink); font-size: 14px }
.inside { fill: var(--inside); pointer-events: none } .middle { text-anchor: middle } .end { text-anchor: end }
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
  svg, .label { font-size: 19px } .label[transform] { display: none } .wide svg { font-size: 13px }
  th, td { padding-right: 10px } table { font-size: 13px } }
@media print { body { max-width: none; padding: 0; print-color-adjust: exact; -webkit-print-color-adjust: exact }
  .wide { overflow: visible } .wide svg { min-width: 0 } figure { break-inside: avoid } }
"""

STYLE = (
    f":root {{ {_variables(0)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}\n"
    + "\n".join(f".{style_of(name)} {{ --it: var(--{style_of(name)}) }}" for name in COLOURS)
    + _RULES
)
