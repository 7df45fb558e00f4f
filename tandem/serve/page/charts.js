// Charts as SVG: lines over steps, the frontier, histograms. Keyboard: arrow keys move the cursor.

import { add, h, newId, s, show } from "./dom.js";
import { number, short, smooth, ticks, tickText } from "./format.js";

const HEIGHT = 210, LEFT = 52, RIGHT = 12, TOP = 12, BOTTOM = 34;

/** An SVG that is drawn again when its width changes. */
function responsive(draw, height = HEIGHT) {
  const holder = h("div", { class: "plot" });
  let width = 0;
  const observer = new ResizeObserver(([entry]) => {
    const now = Math.round(entry.contentRect.width);
    if (now > 0 && now !== width) {
      width = now;
      show(holder, draw(width, height));
    }
  });
  observer.observe(holder);
  return holder;
}

function frame(width, height, xs, ys, whole, most) {
  const yTicks = ticks(Math.min(...ys), Math.max(...ys), 4, most);
  let low = Math.min(...xs), high = Math.max(...xs);
  if (whole && low <= 0.05 * high) low = 0;
  if (!(high > low)) { low -= whole ? 0 : 0.5; high = low + 1; }
  const edge = { low, high, bottom: yTicks[0], top: yTicks.at(-1) };
  const x = (value) => LEFT + ((value - low) / (high - low)) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - ((value - edge.bottom) / (edge.top - edge.bottom)) * (height - TOP - BOTTOM);
  let xTicks = ticks(low, high, Math.max(2, Math.min(6, Math.floor(width / 90)))).filter((t) => t >= low - 1e-9 && t <= high + 1e-9);
  if (whole) xTicks = [...new Set(xTicks.map(Math.round))];
  return { ...edge, x, y, xTicks, yTicks, width, height };
}

function axes(f, xLabel, yLabel) {
  const parts = [];
  for (const tick of f.yTicks) {
    parts.push(s("line", { class: "grid", x1: LEFT, x2: f.width - RIGHT, y1: f.y(tick), y2: f.y(tick) }));
    parts.push(s("text", { class: "end", x: LEFT - 7, y: f.y(tick) + 3.5 }, tickText(tick, f.yTicks[1] - f.yTicks[0])));
  }
  for (const tick of f.xTicks) {
    parts.push(s("text", { class: "mid", x: f.x(tick), y: f.height - BOTTOM + 15 }, tickText(tick, f.xTicks[1] - f.xTicks[0])));
  }
  parts.push(s("text", { class: "mid", x: (LEFT + f.width - RIGHT) / 2, y: f.height - 4 }, xLabel));
  if (yLabel) parts.push(s("text", { class: "axis", x: 4, y: TOP - 2 }, yLabel));
  return parts;
}

function line(points, f) {
  let path = "", open = false;
  for (const [x, y] of points) {
    if (!Number.isFinite(y)) { open = false; continue; }
    path += `${open ? "L" : "M"}${f.x(x).toFixed(1)} ${f.y(y).toFixed(1)}`;
    open = true;
  }
  return path;
}

/** The points nearest to a step, by bisection. */
function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  if (high < 0) return null;
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

/** The numbers of a chart as a table, for those who do not see it. */
function tableOf(title, heads, rows) {
  const kept = rows.length > 60 ? rows.filter((_, i) => i % Math.ceil(rows.length / 60) === 0 || i === rows.length - 1) : rows;
  const table = () => h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": `${title}, as a table` }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: "num" }, head)))),
    h("tbody", {}, kept.map((row) => h("tr", {}, row.map((cell) => h("td", { class: "num" }, typeof cell === "number" ? short(cell, 4) : cell)))))));
  const details = h("details", { class: "astable" }, h("summary", {}, "Numbers"));
  details.addEventListener("toggle", () => { if (details.open && details.childElementCount === 1) details.append(table()); });
  return details;
}

function legend(series, f = (x) => x) {
  return h("ul", { class: "legend" }, series.map((one) => h("li", {},
    h("span", { class: `swatch n${one.color}`, "aria-hidden": "true" }), one.label, one.last === undefined ? "" : h("b", {}, ` ${f(one.last)}`))));
}

/**
 * Lines over steps. series: {label, color, points: [[step, value]], marks: points instead of a line}.
 * alarms: {step, alarm, advice}. One unit for all series: they share the axis.
 */
export function lineChart({ title, unit = "", about = "", series, alarms = [], smoothing = 0, format = short }) {
  const shown = series.filter((one) => one.points.some(([, y]) => Number.isFinite(y)));
  if (!shown.length) return null;
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  let cursor = null;
  const draw = (width, height) => {
    const xs = shown.flatMap((one) => [one.points[0][0], one.points.at(-1)[0]]);
    const ys = [];
    for (const one of shown) for (const [, y] of one.points) if (Number.isFinite(y)) ys.push(y);
    const f = frame(width, height, xs, [Math.min.apply(null, bounds(ys)), Math.max.apply(null, bounds(ys))], true, unit === "%" ? 100 : Infinity);
    const svg = s("svg", {
      class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", tabindex: 0,
      "aria-label": `${title}${unit ? `, ${unit}` : ""}, over steps. The arrow keys read values.`,
    });
    add(svg, axes(f, "step", ""));
    for (const alarm of alarms) {
      if (alarm.step < f.low || alarm.step > f.high) continue;
      const x = f.x(alarm.step);
      svg.append(s("g", { class: "alarm-mark" }, s("line", { x1: x, x2: x, y1: TOP, y2: height - BOTTOM }),
        s("path", { d: `M${x} ${TOP - 9}l5 9h-10z` }), s("title", {}, `step ${alarm.step}: ${alarm.alarm}. ${alarm.advice || ""}`)));
    }
    for (const one of shown) {
      const smoothed = one.marks ? one.points : smooth(one.points, smoothing);
      if (smoothing && !one.marks) svg.append(s("path", { class: `raw c${one.color}`, d: line(one.points, f) }));
      svg.append(s("path", { class: `${one.marks ? "link" : "smooth"} c${one.color}`, d: line(smoothed, f) }));
      if (one.marks || one.points.length === 1) {
        for (const [x, y] of one.points) {
          if (Number.isFinite(y)) svg.append(s("circle", { class: `dot f${one.color}`, cx: f.x(x), cy: f.y(y), r: 3.2 }));
        }
      }
      for (const [x, y] of one.points) {
        if (!Number.isFinite(y)) svg.append(s("path", { class: `cross c${one.color}`, d: `M${f.x(x) - 3} ${TOP}l6 6m0-6l-6 6` }, s("title", {}, `step ${x}: not finite`)));
      }
    }
    const hair = s("line", { class: "hair", y1: TOP, y2: height - BOTTOM, x1: -9, x2: -9 });
    svg.append(hair);
    const move = (step) => {
      cursor = step;
      if (step === null) { hair.setAttribute("x1", -9); hair.setAttribute("x2", -9); readout.textContent = ""; return; }
      const parts = shown.map((one) => [one, nearest(one.points, step)]).filter(([, point]) => point);
      const at = parts[0][1][0];
      hair.setAttribute("x1", f.x(at)); hair.setAttribute("x2", f.x(at));
      const alarmed = alarms.filter((alarm) => alarm.step === at).map((alarm) => `alarm ${alarm.alarm}`);
      readout.textContent = [`step ${at}`, ...parts.map(([one, point]) => `${one.label} ${format(point[1])}${point[0] === at ? "" : ` (step ${point[0]})`}`), ...alarmed].join(" · ");
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const share = (event.clientX - box.left - LEFT) / (width - LEFT - RIGHT);
      move(f.low + Math.min(1, Math.max(0, share)) * (f.high - f.low));
    });
    svg.addEventListener("pointerleave", () => move(null));
    svg.addEventListener("blur", () => move(null));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const points = shown[0].points;
      const at = cursor === null ? -1 : points.indexOf(nearest(points, cursor));
      move(points[Math.min(points.length - 1, Math.max(0, at + step))][0]);
    });
    return svg;
  };
  const steps = [...new Set(shown.flatMap((one) => one.points.map(([x]) => x)))].sort((a, b) => a - b);
  const columns = shown.map((one) => new Map(one.points));
  const id = newId("chart");
  return h("figure", { class: "figure", "aria-labelledby": id },
    h("figcaption", {}, h("div", { class: "head" }, h("h3", { id, title: about }, title), h("span", { class: "unit" }, unit)),
      legend(shown.map((one) => ({ ...one, last: one.points.at(-1)[1] })), format)),
    responsive(draw), readout,
    tableOf(title, ["step", ...shown.map((one) => one.label)], steps.map((step) => [String(step), ...columns.map((of) => (of.has(step) ? number(of.get(step)) : ""))])));
}

function bounds(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}

/** Where a point's label hides the fewest dots: around it, within the chart, over no other label if there is such a place. */
function tagBox(at, letters, dots, tags, f) {
  const wide = 7 * letters, high = 13, dot = 4, boxes = [];
  for (const top of [at.y - 8 - high, at.y - high / 2, at.y + 8, at.y - 8 - 2 * high, at.y + 8 + high]) {
    for (const left of [at.x + 8, at.x - 8 - wide, at.x - wide / 2]) {
      const box = { left, top, right: left + wide, bottom: top + high };
      const hides = (d) => d.x > left - dot && d.x < box.right + dot && d.y > top - dot && d.y < box.bottom + dot;
      const over = (o) => left < o.right + 4 && o.left < box.right + 4 && top < o.bottom && o.top < box.bottom;
      const outside = left < LEFT || box.right > f.width || top < 0 || box.bottom > f.height - BOTTOM;
      boxes.push({ ...box, cost: 1e6 * (outside || hides(at)) + 1e3 * tags.filter(over).length + dots.filter(hides).length });
    }
  }
  return boxes.reduce((best, box) => (box.cost < best.cost ? box : best));
}

/** Reward against KL. series: {label, color, points: [{step, kl, reward, checkpoint}]}. */
export function frontierChart({ title, series, about }) {
  const shown = series.filter((one) => one.points.length);
  if (!shown.length) return null;
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const told = (one, point) => `${one.label}, step ${point.step}: KL ${short(point.kl)} nats, reward ${short(point.reward)}${point.checkpoint ? ", checkpoint on disk" : ""}`;
  const draw = (width, height) => {
    const all = shown.flatMap((one) => one.points);
    const f = frame(width, height, all.map((p) => p.kl), all.map((p) => p.reward), false);
    const svg = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", tabindex: 0, "aria-label": `${title}. The arrow keys read the points.` });
    add(svg, axes(f, "KL to the reference, nats per answer", ""));
    const dots = [], tags = [], names = [];
    const places = all.map((p) => ({ x: f.x(p.kl), y: f.y(p.reward) }));
    for (const one of shown) {
      svg.append(s("path", { class: `link c${one.color}`, d: line(one.points.map((p) => [p.kl, p.reward]), f) }));
      one.points.forEach((point, index) => {
        const isLast = index === one.points.length - 1;
        const dot = s("circle", {
          class: `dot f${one.color}${point.checkpoint ? " saved" : ""}`, cx: f.x(point.kl), cy: f.y(point.reward),
          r: point.checkpoint ? 6 : isLast ? 5 : 3.4, on: { pointerenter: () => { readout.textContent = told(one, point); } },
        }, s("title", {}, told(one, point)));
        svg.append(dot);
        dots.push([one, point]);
        if (index === 0 || isLast) {
          const at = { x: f.x(point.kl), y: f.y(point.reward) };
          // Of runs that are the same, one label each.
          if (tags.some((tag) => tag.step === point.step && Math.hypot(tag.at.x - at.x, tag.at.y - at.y) < 3)) return;
          const box = tagBox(at, String(point.step).length, places, tags, f);
          tags.push({ ...box, at, step: point.step });
          names.push(s("text", { class: "tag", x: box.left, y: box.bottom - 2 }, point.step));
        }
      });
    }
    add(svg, names);
    let at = -1;
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      at = Math.min(dots.length - 1, Math.max(0, at + step));
      readout.textContent = told(...dots[at]);
    });
    return svg;
  };
  const id = newId("chart");
  return h("figure", { class: "figure wide", "aria-labelledby": id },
    h("figcaption", {}, h("div", { class: "head" }, h("h3", { id }, title), h("span", { class: "unit" }, "reward")),
      h("p", { class: "soft small" }, about), legend(shown)),
    responsive(draw, 270), readout,
    tableOf(title, ["line", "step", "KL, nats", "reward"], shown.flatMap((one) => one.points.map((p) => [one.label, String(p.step), p.kl, p.reward]))));
}

/** Bars of counts. histogram: {low, high, counts, mean?, std?}. */
export function histogramChart({ title, unit, histogram, color = 1 }) {
  const counts = histogram.counts, width0 = (histogram.high - histogram.low) / counts.length;
  const total = counts.reduce((a, b) => a + b, 0);
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const edge = (i) => short(histogram.low + i * width0);
  const draw = (width, height) => {
    const f = frame(width, height, [histogram.low, histogram.high], [0, Math.max(...counts)], false);
    const svg = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${title}: ${total} values from ${short(histogram.low)} to ${short(histogram.high)}` });
    add(svg, axes(f, unit, ""));
    counts.forEach((count, i) => {
      if (!count) return;
      const left = f.x(histogram.low + i * width0), right = f.x(histogram.low + (i + 1) * width0);
      const told = `${edge(i)} to ${edge(i + 1)}: ${count} of ${total}`;
      svg.append(s("rect", { class: `f${color}`, x: left + 0.5, width: Math.max(1, right - left - 1), y: f.y(count), height: f.y(0) - f.y(count), rx: 2, on: { pointerenter: () => { readout.textContent = told; } } }, s("title", {}, told)));
    });
    if (Number.isFinite(histogram.mean)) {
      const x = f.x(histogram.mean);
      svg.append(s("line", { class: "hair", x1: x, x2: x, y1: TOP, y2: height - BOTTOM }));
    }
    return svg;
  };
  const id = newId("chart");
  const facts = Number.isFinite(histogram.mean) ? `mean ${short(histogram.mean)}, standard deviation ${short(histogram.std)}` : `${short(histogram.low)} to ${short(histogram.high)}`;
  return h("figure", { class: "figure", "aria-labelledby": id },
    h("figcaption", {}, h("div", { class: "head" }, h("h3", { id }, title), h("span", { class: "unit" }, `${total}`)), h("p", { class: "soft small" }, facts)),
    responsive(draw, 170), readout,
    tableOf(title, ["from", "to", "count"], counts.map((count, i) => [edge(i), edge(i + 1), String(count)])));
}

/** A share with its interval, as a bar. */
export function intervalBar({ rate, low, high }) {
  const at = (value) => 4 + 192 * value;
  return s("svg", { class: "interval", viewBox: "0 0 200 16", width: 200, height: 16, role: "img", "aria-label": `${Math.round(100 * rate)} %, from ${Math.round(100 * low)} to ${Math.round(100 * high)} %` },
    s("line", { class: "grid", x1: at(0), x2: at(1), y1: 8, y2: 8 }), s("line", { class: "half", x1: at(0.5), x2: at(0.5), y1: 1, y2: 15 }),
    s("line", { class: "range", x1: at(low), x2: at(high), y1: 8, y2: 8 }), s("circle", { class: "f1", cx: at(rate), cy: 8, r: 5 }));
}
