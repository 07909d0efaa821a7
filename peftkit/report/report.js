// The values of a chart under the pointer, or where the arrow keys are.
"use strict";
function read(plot) {
  const low = +plot.dataset.low, high = +plot.dataset.high, last = +plot.dataset.last;
  const out = plot.closest("figure").querySelector("output");
  const pointer = plot.querySelector(".pointer");
  const lines = [...plot.querySelectorAll("polyline")];
  let place = 500;
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
  const show = x => {
    place = Math.min(1000, Math.max(0, x));
    pointer.style.display = "block";
    pointer.style.left = place / 10 + "%";
    const said = ["step " + Math.round(place / 1000 * last).toLocaleString("en")];
    for (const line of lines) {
      const point = at(line, place);
      if (point) {
        const value = number(low + (1 - point.y / 300) * (high - low));
        said.push(lines.length > 1 ? line.dataset.label + " " + value : value);
      }
    }
    out.textContent = said.join(" \u00b7 ");
  };
  const hide = () => {
    pointer.style.display = "none";
    out.textContent = "";
  };
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect();
    show(1000 * (event.clientX - box.left) / box.width);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", event => {
    const places = {ArrowLeft: place - 10, ArrowRight: place + 10, Home: 0, End: 1000};
    if (event.key in places) { show(places[event.key]); event.preventDefault(); }
    if (event.key === "Escape") hide();
  });
}
document.querySelectorAll(".plot").forEach(read);
