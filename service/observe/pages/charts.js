// Charts over time or age, with axes and with the numbers under the pointer. The series of a chart have the same places.

import { duration, h, svg, swatch } from "./draw.js";

const [WIDTH, HEIGHT] = [600, 100]; // of a plot, in units of its own
const PLOT = 7.5; // rem: its height, as dashboard.css has it
const STEPS = [5, 10, 30, 60, 300, 600, 900, 1800]; // seconds between two marks of the time
const MOST_MARKS = 5;
const EDGE = 0.05; // of the width: marks that near to an end would be cut off
const NICE = [1, 2, 2.5, 5, 10];

const charts = new Map(); // id → what the pointer reads

/** The axis of the last `span` seconds: points are [seconds ago, value]. */
export function timeAxis(span) {
  const now = Date.now();
  const at = (place) => now - span * 1000 * (1 - place);
  return {
    place: (age) => 1 - age / span,
    marks: timeMarks(span, now),
    read: (place) => clock(at(place), true),
    label: `from ${clock(at(0))} to ${clock(now)}`,
  };
}

/** The axis of ages from a second to a day, each ten times as old as far as the next: points are [seconds, value]. */
export function ageAxis() {
  const [least, most] = [0, Math.log10(86400)];
  const place = (age) => Math.min(1, Math.max(0, (Math.log10(Math.max(age, 1)) - least) / (most - least)));
  const marks = [[10, "10 s"], [60, "1 min"], [600, "10 min"], [3600, "1 h"], [36000, "10 h"]];
  return {
    place,
    marks: marks.map(([age, text]) => [place(age), text]),
    read: (at) => `after ${duration(10 ** (least + at * (most - least)))}`,
    label: "by age, from a second to a day",
  };
}

/**
 * A chart of [{name, kind, points, note}]: `points` are [where on the axis, value or null] from left to right, null is
 * a gap, and the same places in all. `shown` writes a value; `stacked` puts them on each other; `top` is the least
 * height; `now`: the legend has the last values. `dashed` in a series draws no area.
 */
export function chart(id, series, axis, shown, { stacked = false, top = 0, nothing = "nothing yet", now = true } = {}) {
  const layers = stacked ? stack(series) : series.map((each) => ({ ...each, drawn: each.points, floor: null }));
  const known = layers.flatMap(({ drawn }) => drawn).filter(([, value]) => value !== null);
  if (!known.length) return h("p", { class: "quiet" }, nothing);
  const most = ceiling(Math.max(top, ...known.map(([, value]) => value)), top);
  charts.set(id, { series, axis, shown });
  const label = series.map(({ name, points }) => (now ? `${name} ${last(points, shown)}` : name)).join(", ");
  const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" };
  return h(
    "figure",
    { class: "chart", "data-chart": id, tabindex: 0 },
    h(
      "div",
      { class: "plot" },
      svg(
        "svg",
        { role: "img", "aria-label": `${axis.label}: ${label}`, ...box },
        [0, 0.5, 1].map((share) => svg("path", { class: "base", d: `M0 ${y(share, 1)}H${WIDTH}` })),
        layers.map((layer) => drawn(layer, axis, most)).reverse(),
      ),
      axes(axis, most, shown),
    ),
    h("figcaption", {}, series.map(({ name, kind, points, note }) => {
      return [" ", h("span", { class: "key" }, swatch(kind), `${name} `, now && h("b", {}, last(points, shown)), note && ` ${note}`)];
    })),
  );
}

const y = (value, most) => (HEIGHT - 1 - ((HEIGHT - 2) * value) / most).toFixed(1);

function last(points, shown) {
  const value = points.at(-1)?.[1] ?? null;
  return value === null ? "–" : shown(value);
}

/** Each series on those before it; a gap where none of them is known. */
function stack(series) {
  const sums = series[0]?.points.map(() => 0) ?? [];
  return series.map((each) => {
    const floor = [...sums];
    const drawnPoints = each.points.map(([age, value], i) => {
      if (series.every(({ points }) => points[i][1] === null)) return [age, null];
      sums[i] += value ?? 0;
      return [age, sums[i]];
    });
    return { ...each, drawn: drawnPoints, floor };
  });
}

function drawn({ drawn: points, floor, kind, dashed }, { place }, most) {
  const x = (at) => (WIDTH * place(at)).toFixed(1);
  const runs = [[]];
  points.forEach(([age, value], i) => {
    if (value === null) runs.push([]);
    else runs.at(-1).push([x(age), y(value, most), y(floor ? floor[i] : 0, most)]);
  });
  return runs.filter((run) => run.length).map((run) => {
    const path = `M${run.map(([at, value]) => `${at} ${value}`).join("L")}${run.length > 1 ? "" : "h-3"}`;
    const below = [...run].reverse().map(([at, , value]) => `${at} ${value}`).join("L");
    return svg(
      "g",
      { class: `${kind} ${floor ? "stacked" : ""} ${dashed ? "dashed" : ""}` },
      !dashed && svg("path", { class: "area", d: `${path}L${below}Z` }),
      svg("path", { class: "stroke", d: path }),
    );
  });
}

/** The next nice number, so that the middle is one, too; what has a `top` of its own keeps it. */
function ceiling(most, top) {
  if (most <= top || most <= 0) return top || 1;
  const scale = 10 ** Math.floor(Math.log10(most));
  return scale * NICE.find((each) => each * scale >= most * 0.9999);
}

function timeMarks(span, now) {
  const step = STEPS.find((each) => span / each <= MOST_MARKS) ?? STEPS.at(-1);
  const first = Math.ceil((now / 1000 - span) / step) * step; // marks stand at whole minutes of the clock
  const marks = [];
  for (let at = first; at <= now / 1000; at += step) marks.push([1 - (now / 1000 - at) / span, clock(at * 1000, step < 60)]);
  return marks;
}

function axes({ marks, label }, most, shown) {
  const placed = marks.filter(([place]) => place > EDGE && place < 1 - EDGE);
  return svg(
    "svg",
    { class: "axes", role: "img", "aria-label": `${label}, up to ${shown(most)}` },
    [[0, most], [PLOT / 2, most / 2]].map(([at, value]) => svg("text", { x: 2, y: `${at + 0.8}rem` }, shown(value))),
    placed.map(([place, text]) => {
      return svg("text", { x: `${(100 * place).toFixed(2)}%`, y: `${PLOT + 0.95}rem`, "text-anchor": "middle" }, text);
    }),
  );
}

const clock = (ms, seconds = false) =>
  new Date(ms).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: seconds ? "2-digit" : undefined, hourCycle: "h23" });

// the numbers under the pointer, or at a place chosen by the arrow keys

let tip = null;
let cursor = null;

/** Show the numbers of whatever chart the pointer is over. Once for the page. */
export function watchPointer() {
  tip = document.body.appendChild(h("div", { id: "tip", role: "status", hidden: true }));
  cursor = document.body.appendChild(h("div", { id: "cursor", hidden: true }));
  document.addEventListener("pointermove", ({ target, clientX }) => {
    const figure = target.closest?.("[data-chart]");
    if (figure) point(figure, clientX);
    else leave();
  });
  document.addEventListener("pointerleave", leave);
  document.addEventListener("scroll", leave, { passive: true });
  document.addEventListener("focusout", leave);
  document.addEventListener("keydown", ({ key, target }) => {
    const turn = { ArrowLeft: -1, ArrowRight: 1 }[key];
    const figure = target.closest?.("[data-chart]");
    if (!turn || !figure) return;
    const { left, width } = figure.querySelector(".plot").getBoundingClientRect();
    const at = cursor.hidden ? left + width : Number(cursor.dataset.at);
    point(figure, Math.min(left + width, Math.max(left, at + (turn * width) / 60)));
  });
}

function leave() {
  tip.hidden = cursor.hidden = true;
}

function point(figure, clientX) {
  const chosen = charts.get(figure.dataset.chart);
  const { left, top, width, height } = figure.querySelector(".plot").getBoundingClientRect();
  if (!chosen || clientX < left || clientX > left + width) return leave();
  const place = (clientX - left) / width;
  const far = ([at]) => Math.abs(chosen.axis.place(at) - place);
  const rows = chosen.series.map(({ name, kind, points }) => {
    const nearest = points.reduce((best, each) => (far(each) < far(best) ? each : best), points[0]);
    const value = nearest?.[1] ?? null;
    return h("p", {}, swatch(kind), `${name} `, h("b", {}, value === null ? "–" : chosen.shown(value)));
  });
  tip.replaceChildren(h("p", { class: "quiet" }, chosen.axis.read(place)), ...rows);
  tip.hidden = cursor.hidden = false;
  cursor.dataset.at = String(clientX);
  Object.assign(cursor.style, { left: `${clientX}px`, top: `${top}px`, height: `${height}px` });
  const isRight = clientX > left + width / 2;
  Object.assign(tip.style, { top: `${top}px`, left: isRight ? "auto" : `${clientX + 12}px` });
  tip.style.right = isRight ? `${document.documentElement.clientWidth - clientX + 12}px` : "auto";
  return undefined;
}
