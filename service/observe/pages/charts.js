// Charts over time or age. uPlot draws them; here is what ours have in common, and how each stays while the page changes.

import { about, duration, h, rate, tile } from "./draw.js";

const [HEIGHT, SMALL] = [170, 84]; // pixels of a chart, and of one inside a tile
const DAY = 86400;
const AREA = { light: "26", dark: "3a" }; // opacity of what lies under a line, in hex
const STACKED = "99";

const wanted = new Map(); // id → what is to be drawn next
const standing = new Map(); // the element of a plot → {plot, key}, for each plot that is drawn
const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => fit(target)));
const dark = matchMedia("(prefers-color-scheme: dark)");
const colours = new Map(); // class → its colour in this scheme

/** The axis of the last `span` seconds: points are [seconds ago, value]. */
export function timeAxis(span) {
  const now = Date.now() / 1000;
  return {
    at: (age) => now - age,
    read: (at) => clock(at, true),
    marks: (at, step) => clock(at, step < 60),
    scale: { time: true, range: [now - span, now] },
    label: `from ${clock(now - span)} to ${clock(now)}`,
    isTime: true,
  };
}

/** The axis of ages from a second to a day, each ten times as old as far as the next: points are [seconds, value]. */
export function ageAxis() {
  return {
    at: (age) => Math.max(age, 1),
    read: (age) => `after ${duration(age)}`,
    marks: (age) => duration(age).replace(".0", ""),
    splits: [10, 60, 600, 3600, 36000],
    scale: { time: false, distr: 3, range: [1, DAY] },
    label: "by age, from a second to a day",
  };
}

/**
 * A chart of [{name, kind, points, note}]: `points` are [where on the axis, value or null] from left to right, null is
 * a gap, and the same places in all. `shown` writes a value; `stacked` puts them on each other; `top` is the least
 * height; `now`: the legend has the last values; `small`: for a tile, without a legend. `dashed` in a series draws no area.
 */
export function chart(id, series, axis, shown, { stacked = false, top = 0, nothing = "nothing yet", now = true, small = false } = {}) {
  const known = series.some(({ points }) => points.some(([, value]) => value !== null));
  if (!known && !small) return h("p", { class: "quiet" }, nothing);
  const kept = series.map(({ points }) => points.map(([, value]) => value));
  const last = (i) => (kept[i].at(-1) ?? null) === null ? "–" : shown(kept[i].at(-1));
  const data = [series[0].points.map(([place]) => axis.at(place)), ...(stacked ? sums(kept) : kept)];
  wanted.set(id, { series, axis, shown, kept, data, stacked, top, now, small });
  const label = series.map(({ name }, i) => (now ? `${name} ${last(i)}` : name)).join(", ");
  return h(
    "figure",
    { class: `chart ${small ? "small" : ""}`, "data-chart": id, tabindex: 0, role: "group", "aria-label": `${axis.label}: ${label}` },
    h("div", { class: "plot", "data-kept": "" }),
    series.filter(({ note }) => note).map(({ note }) => h("figcaption", {}, note)),
  );
}

/** One series inside a tile. */
export const line = (id, name, points, span, shown, kind, top = 0) =>
  chart(id, [{ name, kind, points }], timeAxis(span), shown, { top, small: true });

/** The tile of what only grows: its rate now, and as a line. */
export function rateTile(title, counter, note, history, kind, shown = about) {
  const rates = history.rates(counter);
  const most = Math.max(0, ...rates.map(([, value]) => value));
  const words = most > 0 ? `${note}, at most ${rate(most, shown)}` : note;
  const picture = line(`tile/${title}`, title, rates, history.span, (value) => rate(value, shown), kind);
  return tile(title, rate(history.rate(counter), shown), words, picture);
}

/** Draw what the page has by now. After each change of it. */
export function drawCharts() {
  for (const element of standing.keys()) if (!element.isConnected) forget(element);
  for (const figure of document.querySelectorAll("[data-chart]")) {
    const element = figure.firstElementChild;
    const spec = wanted.get(figure.dataset.chart) ?? element.spec;
    const key = JSON.stringify([figure.dataset.chart, spec.series.map(({ name, kind, dashed }) => [name, kind, dashed])]);
    if (standing.get(element)?.key !== key) {
      forget(element);
      element.spec = spec;
      standing.set(element, { key, plot: new uPlot({ ...optionsOf(element), ...sizeOf(element) }, spec.data, element) });
      sizes.observe(element);
    } else {
      element.spec = spec;
      standing.get(element).plot.setData(spec.data);
    }
    if (standing.get(element).plot.cursor.idx == null) showLast(element);
  }
  wanted.clear();
}

function forget(element) {
  sizes.unobserve(element);
  standing.get(element)?.plot.destroy();
  standing.delete(element);
}

const sizeOf = (element) => ({ width: Math.max(80, element.clientWidth), height: element.spec.small ? SMALL : HEIGHT });
const fit = (element) => standing.get(element)?.plot.setSize(sizeOf(element));

/** Without a pointer over it, a chart's legend has the last values. */
function showLast(element) {
  const { spec } = element;
  if (!spec.small) standing.get(element)?.plot.setLegend({ idx: spec.now ? spec.data[0].length - 1 : null }, false);
}

/** Each series on those before it; null where none of them is known. */
function sums(kept) {
  const below = kept[0].map(() => 0);
  return kept.map((values) => values.map((value, i) => {
    if (kept.every((each) => each[i] === null)) return null;
    return (below[i] += value ?? 0);
  }));
}

/** What uPlot is told once; what changes it reads from `element.spec`. */
function optionsOf(element) {
  const { series, axis, stacked, small } = element.spec;
  const quiet = () => colourOf("ink-axis");
  const font = '11px system-ui, "Noto Sans", "DejaVu Sans", sans-serif';
  const lines = { stroke: quiet, font, ticks: { show: false }, grid: { stroke: () => colourOf("ink-grid"), width: 1 } };
  const isAlone = series.filter(({ dashed }) => !dashed).length === 1; // areas over each other would say nothing
  const drawn = series.map(({ name, kind, dashed }, i) => ({
    label: name,
    width: stacked ? 1 : 1.75,
    dash: dashed ? [5, 4] : undefined,
    stroke: () => colourOf(kind),
    fill: dashed || !(stacked || isAlone) ? undefined : () => areaOf(kind, stacked),
    points: { show: (plot, n, from, to) => to - from < 2 },
    value: (_, __, ___, at) => {
      if (at === null || at === undefined) return "";
      const exact = element.spec.kept[i][at] ?? null; // not what it stands on
      return exact === null ? "–" : element.spec.shown(exact);
    },
  }));
  return {
    series: [{ label: axis.isTime ? "at" : "age", value: (_, at) => (at === null ? "" : element.spec.axis.read(at)) }, ...drawn],
    bands: stacked ? drawn.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : [],
    scales: {
      x: { ...axis.scale, range: () => element.spec.axis.scale.range },
      y: { range: (_, __, most) => [0, heightOf(Math.max(most ?? 0, 0), element.spec.top)] },
    },
    axes: [
      {
        ...lines, size: 22, gap: 4, space: small ? 60 : 70,
        values: (_, places, __, ___, step) => places.map((place) => element.spec.axis.marks(place, step)),
        ...(axis.splits ? { splits: () => axis.splits, filter: (_, places) => places } : {}),
      },
      {
        ...lines, gap: 4, space: small ? 22 : 30,
        size: (_, texts) => 10 + 6.2 * Math.max(2, ...(texts ?? []).map((text) => text.length)),
        values: (_, values) => values.map((value) => element.spec.shown(value)),
      },
    ],
    legend: { show: !small, markers: { width: 0, fill: (_, i) => colourOf(series[i - 1].kind) } },
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 }, ...(axis.isTime ? { sync: { key: "time" } } : {}) },
    hooks: { setCursor: [(plot) => plot.cursor.idx == null && showLast(element)] },
  };
}

const heightOf = (most, top) => (most <= top || most <= 0 ? top || 1 : uPlot.rangeNum(0, most, 0.1, true)[1]);

function colourOf(kind) {
  if (!colours.has(kind)) {
    const probe = document.body.appendChild(h("i", { class: kind, hidden: true }));
    colours.set(kind, getComputedStyle(probe).getPropertyValue("--colour").trim());
    probe.remove();
  }
  return colours.get(kind);
}

const areaOf = (kind, stacked) => colourOf(kind) + (stacked ? STACKED : AREA[dark.matches ? "dark" : "light"]);

const MINUTES = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const SECONDS = new Intl.DateTimeFormat([], { timeStyle: "medium", hourCycle: "h23" });
const clock = (seconds, whole = false) => (whole ? SECONDS : MINUTES).format(1000 * seconds);

// Another colour scheme: everything is drawn anew.
dark.addEventListener("change", () => {
  colours.clear();
  [...standing.keys()].forEach(forget);
  drawCharts();
});

// The arrow keys move through the chart that has the focus, Escape leaves it.
document.addEventListener("keydown", ({ key, target }) => {
  const turn = { ArrowLeft: -1, ArrowRight: 1, Escape: 0 }[key];
  const plot = turn !== undefined && standing.get(target.closest?.("[data-chart]")?.firstElementChild)?.plot;
  if (!plot) return;
  const { width } = plot.over.getBoundingClientRect();
  const at = plot.cursor.idx == null ? width : plot.cursor.left;
  plot.setCursor(turn ? { left: Math.min(width - 1, Math.max(0, at + (turn * width) / 60)), top: 1 } : { left: -10, top: -10 });
});
