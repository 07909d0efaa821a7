"""How a report looks, and the one script in it: the values under the pointer."""

from __future__ import annotations

import base64
import hashlib

LIGHT = ("#1f66d1", "#d2600a", "#16845a", "#c2334d", "#7a49cc", "#0c8599", "#8a6520", "#c2408f")
DARK = ("#6ea8ff", "#ff9e4f", "#4fc592", "#ff7b8f", "#b995ff", "#4fc3d9", "#d3ab5c", "#f58acb")

_ROOT = """
:root { color-scheme: light dark; --ground: #fff; --card: #f6f7f9; --text: #1b1f26;
  --soft: #5c6675; --rule: #dde1e7; --good: #16845a; --bad: #b3261e; --warn: #8a5300;
  --warn-ground: #fff4df; LIGHT }
"""
_DARK = """--ground: #14171c; --card: #1d2128; --text: #e6e9ee; --soft: #9aa5b4; --rule: #343b46;
  --good: #4fc592; --bad: #ff8a80; --warn: #ffcf7d; --warn-ground: #33290f; DARK"""
_RULES = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 66rem; background: var(--ground);
  color: var(--text); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.25rem 0 .5rem; }
p { margin: .5rem 0; }
.verdict { font-size: 1.15rem; max-width: 52rem; }
.state { display: inline-block; font-size: .8rem; font-weight: 600; padding: .05rem .55rem;
  border: 1px solid currentcolor; border-radius: 1rem; vertical-align: middle; color: var(--soft); }
.state.finished { color: var(--good); } .state.failed, .state.stopped { color: var(--bad); }
.warning { background: var(--warn-ground); color: var(--warn); padding: .5rem .8rem;
  border-radius: .4rem; margin: .4rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem;
  margin: 1.25rem 0; }
.tiles div { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.tiles span { display: block; color: var(--soft); font-size: .8rem; }
.tiles b { font-size: 1.1rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1.5rem 2rem; }
.charts figure:first-child { grid-column: 1 / -1; }
.charts figure:first-child .frame { height: 18rem; }
figure { margin: 0; break-inside: avoid; min-width: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: .1rem .9rem; align-items: baseline;
  font-size: .9rem; min-height: 1.5rem; }
figcaption output { margin-left: auto; color: var(--soft); font-variant-numeric: tabular-nums;
  font-size: .8rem; }
.key { color: var(--soft); font-size: .8rem; overflow-wrap: anywhere; }
.key::before { content: ""; display: inline-block; width: 1.1em; height: 3px; margin-right: .35em;
  vertical-align: middle; background: var(--c); }
.key.raw::before { opacity: .4; }
.frame { display: flex; height: 10.5rem; }
.y { position: relative; width: 4rem; flex: none; }
.y span { position: absolute; right: .45rem; transform: translateY(50%); font-size: .72rem;
  color: var(--soft); white-space: nowrap; font-variant-numeric: tabular-nums; }
.x { position: relative; height: 1.2rem; margin-left: 4rem; }
.x span { position: absolute; transform: translateX(-50%); font-size: .72rem; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.x .end { transform: translateX(-100%); }
.plot { position: relative; flex: 1; min-width: 0; border-left: 1px solid var(--rule);
  border-bottom: 1px solid var(--rule); touch-action: pan-y; }
svg { display: block; width: 100%; height: 100%; overflow: visible; }
svg * { vector-effect: non-scaling-stroke; fill: none; }
polyline { stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
polyline.raw { stroke-width: 1; opacity: .35; }
polyline.points { stroke-dasharray: 5 3; stroke-width: 1.4; }
.rule { stroke: var(--rule); stroke-width: 1; }
.seam { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
.dot { position: absolute; width: 7px; height: 7px; margin: 0 0 -3.5px -3.5px; border-radius: 50%;
  background: var(--c); }
.pointer { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft);
  display: none; }
.bars { display: flex; align-items: flex-end; height: 9rem; gap: 2px; padding-bottom: 1.2rem;
  margin: .5rem 0; }
.bars div { flex: 1; height: 100%; display: flex; align-items: flex-end; position: relative; }
.bars i { display: block; width: 100%; background: var(--c0); border-radius: 2px 2px 0 0;
  min-height: 1px; }
.bars span { position: absolute; top: 100%; left: 0; font-size: .7rem; color: var(--soft);
  white-space: nowrap; }
.bars div:not(:nth-child(4n + 1)) span { display: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; margin: .25rem 0 1rem; }
th, td { text-align: left; padding: .3rem 1.1rem .3rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; white-space: pre-wrap;
  min-width: 5rem; }
td:first-child { overflow-wrap: break-word; }
.numbers td, .numbers th { white-space: nowrap; overflow-wrap: normal; }
a { color: var(--c0); }
.numbers td:not(:first-child), .numbers th:not(:first-child) { text-align: right; }
pre { background: var(--card); border-radius: .5rem; padding: .75rem .9rem; overflow-x: auto;
  font: .82rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: .25rem 0 1rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: color-mix(in srgb, var(--c2) 25%, transparent); color: inherit;
  border-radius: .15rem; }
details { margin: .75rem 0; } summary { cursor: pointer; font-weight: 600; }
blockquote td:first-child { white-space: nowrap; overflow-wrap: normal; }
blockquote { margin: .3rem 0 1.25rem; padding-left: .8rem; border-left: 3px solid var(--rule); }
.soft { color: var(--soft); font-size: .88rem; }
@media (max-width: 40rem) { body { padding: 1rem .8rem 3rem; } .y, .x { font-size: .9em; }
  .y { width: 3.3rem; } .x { margin-left: 3.3rem; }
  .charts figure:first-child .frame { height: 13rem; } }
@media print { :root { color-scheme: light; } body { max-width: none; font-size: 11pt; padding: 0; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  h2, h3, figcaption { break-after: avoid; } h2 { margin-top: 1.5rem; }
  table, tr, .bars { break-inside: avoid; } pre, .tiles div { border: 1px solid var(--rule); }
  .charts { grid-template-columns: 1fr 1fr; gap: 1rem 1.5rem; } .frame { height: 8.5rem; }
  .charts figure:first-child .frame { height: 14rem; } .scroll { overflow: visible; }
  details::details-content { content-visibility: visible; }
  .pointer, output { display: none !important; } }
@page { margin: 14mm; }
"""

SCRIPT = """
"use strict";
for (const plot of document.querySelectorAll(".plot")) {
  const low = +plot.dataset.low, high = +plot.dataset.high, last = +plot.dataset.last;
  const out = plot.closest("figure").querySelector("output");
  const pointer = plot.querySelector(".pointer");
  const lines = [...plot.querySelectorAll("polyline")];
  const number = value => {
    if (plot.dataset.kind === "bytes") {
      let n = 0;
      while (value >= 1024 && n < 3) { value /= 1024; n += 1; }
      return value.toFixed(1) + " " + ["B", "KiB", "MiB", "GiB"][n];
    }
    if (Math.abs(value) >= 10000) return Math.round(value).toLocaleString("en");
    return Math.abs(value) < 0.001 && value !== 0 ? value.toExponential(1) : value.toPrecision(4);
  };
  const at = (line, x) => {
    const points = line.points;
    let first = 0, end = points.numberOfItems - 1;
    if (end < 0) return null;
    while (end - first > 1) {
      const middle = (first + end) >> 1;
      if (points.getItem(middle).x < x) first = middle; else end = middle;
    }
    const one = points.getItem(first), two = points.getItem(end);
    return x - one.x < two.x - x ? one : two;
  };
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect();
    const x = 1000 * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    pointer.style.display = "block";
    pointer.style.left = x / 10 + "%";
    const said = ["step " + Math.round(x / 1000 * last).toLocaleString("en")];
    for (const line of lines) {
      const point = at(line, x);
      if (point) {
        const value = number(low + (1 - point.y / 300) * (high - low));
        said.push(lines.length > 1 ? line.dataset.label + " " + value : value);
      }
    }
    out.textContent = said.join(" \\u00b7 ");
  });
  plot.addEventListener("pointerleave", () => {
    pointer.style.display = "none";
    out.textContent = "";
  });
}
"""


def _colors(values: tuple[str, ...]) -> str:
    return " ".join(f"--c{number}: {value};" for number, value in enumerate(values))


STYLE = "".join(
    [
        _ROOT.replace("LIGHT", _colors(LIGHT)),
        "@media screen and (prefers-color-scheme: dark) { :root { ",
        _DARK.replace("DARK", _colors(DARK)),
        " } }",
        *(f".c{number} {{ --c: var(--c{number}); }}" for number in range(len(LIGHT))),
        _RULES,
    ]
)
_SCRIPT_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{_SCRIPT_HASH}'"
)
"""What a browser may do with a report: no request, and no script but ours."""
