"""The frame and the style of the report page. Colours are variables, given once for light and once for dark.

c0 to c9: causes (forward, backward, step, the six waits, other). l1 to l5: lanes. t0 to t2: tiers.
"""

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

STYLE = """
:root {
  --ink: #1c2126; --soft: #5b6670; --rule: #e1e5e8; --page: #f5f6f7; --card: #fff; --inside: #fff; --warn: #b3261e;
  --c0: #2f6fb5; --c1: #5b4fa8; --c2: #1f8a70; --c3: #d9822b; --c4: #c23b4e; --c5: #a88a1a; --c6: #a3447f;
  --c7: #8a5a3c; --c8: #d06a9a; --c9: #b4bdc4; --l1: #2b8196; --l2: #7a5fb0; --l4: #4a8638; --l5: #a8651f;
  --plain: #b4bdc4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6eaed; --soft: #9aa7b1; --rule: #323b42; --page: #14181b; --card: #1d2327; --inside: #101416;
    --warn: #ff8a80;
    --c0: #6aa5e0; --c1: #a095ea; --c2: #4fc0a2; --c3: #f0a35a; --c4: #ee7485; --c5: #d9c05a; --c6: #d884b8;
    --c7: #c39270; --c8: #f2a8c8; --c9: #66727b; --l1: #6cc0d6; --l2: #b9a2ee; --l4: #88c476; --l5: #e0a860;
  --plain: #66727b;
  }
}
.c0 { --it: var(--c0) } .c1 { --it: var(--c1) } .c2 { --it: var(--c2) } .c3 { --it: var(--c3) } .c4 { --it: var(--c4) }
.c5 { --it: var(--c5) } .c6 { --it: var(--c6) } .c7 { --it: var(--c7) } .c8 { --it: var(--c8) } .c9 { --it: var(--c9) }
.l0 { --it: var(--c0) } .l1 { --it: var(--l1) } .l2 { --it: var(--l2) } .l3 { --it: var(--c2) } .l4 { --it: var(--l4) }
.l5 { --it: var(--l5) }
.t0 { --it: var(--c0) } .t1 { --it: var(--c2) } .t2 { --it: var(--c3) }
.planned { --it: var(--plain) }
body { margin: 0 auto; max-width: 1500px; padding: 24px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 22px; margin: 0 }
p { margin: 4px 0 16px; color: var(--soft) }
p b { color: var(--ink); font-weight: 500 }
.warn { color: var(--warn) }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 0 0 16px }
dl div, figure { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 16px }
dt { color: var(--soft); font-size: 13px }
dd { margin: 0; font-size: 18px; font-variant-numeric: tabular-nums }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 16px }
figure { margin: 0 0 16px }
.charts figure { margin: 0 }
.charts + figure { margin-top: 16px }
figcaption { font-weight: 600; margin-bottom: 4px }
svg { display: block; width: 100%; height: auto; font: 11px system-ui, sans-serif }
.wide { overflow-x: auto } .wide svg { min-width: 900px }
.tick { fill: var(--soft); font-variant-numeric: tabular-nums } .label { fill: var(--ink); font-size: 12px }
.inside { fill: var(--inside); pointer-events: none } .middle { text-anchor: middle } .end { text-anchor: end }
.grid { stroke: var(--rule); fill: none } .axis { stroke: var(--soft); fill: none }
rect, circle { fill: var(--it) } .line { stroke: var(--it); stroke-width: 1.8; stroke-linejoin: round; fill: none }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 4px; padding: 0; font-size: 13px;
  list-style: none }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 6px; border-radius: 2px;
  background: var(--it) }
.note, .none { font-size: 13px; margin: 4px 0 0 }
table { border-collapse: collapse; margin-top: 12px; font-size: 14px; font-variant-numeric: tabular-nums }
th, td { padding: 3px 16px 3px 0; text-align: left; font-weight: 400; border-bottom: 1px solid var(--rule) }
td { text-align: right } thead { color: var(--soft) }
"""
