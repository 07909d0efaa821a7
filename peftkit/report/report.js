// Shows the values of a chart under the pointer.
"use strict";
function shown(value, kind) {
  if (kind === "bytes") {
    const unit = value < 1000 ? 0 : Math.min(3, Math.floor(Math.log10(value) / 3));
    return (value / 1000 ** unit).toFixed(1) + " " + ["B", "kB", "MB", "GB"][unit];
  }
  if (Math.abs(value) >= 10000) return Math.round(value).toLocaleString("en");
  return Math.abs(value) < 0.001 && value !== 0 ? value.toExponential(1) : value.toPrecision(4);
}
for (const plot of document.querySelectorAll(".plot")) {
  const {low, high, last, kind} = plot.dataset;
  const out = plot.closest("figure").querySelector("output");
  const pointer = plot.querySelector(".pointer");
  const lines = [...plot.querySelectorAll("polyline")].map(line => ({
    label: line.dataset.label,
    points: line.getAttribute("points").split(" ").map(point => point.split(",").map(Number)),
  }));
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect();
    const x = Math.min(1000, Math.max(0, 1000 * (event.clientX - box.left) / box.width));
    const values = lines.map(({label, points}) => {
      const [, y] = points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      const value = shown(+low + (1 - y / 300) * (high - low), kind);
      return lines.length > 1 ? label + " " + value : value;
    });
    const step = Math.round(x / 1000 * last).toLocaleString("en");
    out.textContent = ["step " + step, ...values].join(" \u00b7 ");
    pointer.style.display = "block";
    pointer.style.left = x / 10 + "%";
  });
  plot.addEventListener("pointerleave", () => {
    pointer.style.display = "none";
    out.textContent = "";
  });
}
