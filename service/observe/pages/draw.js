// What all panels are made of: elements, changes in place, numbers as people read them, bars, tables. Charts: charts.js.
// Whatever comes from the server becomes text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element; `attributes` that are null or false are left out. Children are nodes, texts, numbers, or nothing. */
export function h(name, attributes, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** The same in SVG. */
export function svg(name, attributes, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value);
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/**
 * Make `old` what `fresh` is, keeping every node that can stay: focus, selection and scrolling survive. What is in an
 * element with `data-kept` is not ours.
 */
export function morph(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return undefined;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (old.hasAttribute("data-kept")) return undefined;
  const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
  after.forEach((child, i) => (i < before.length ? morph(before[i], child) : old.append(child)));
  before.slice(after.length).forEach((child) => child.remove());
  return undefined;
}

// numbers

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const TENTH = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const SHORT = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

const scaled = (value, units, last) => {
  for (const [unit, scale] of units) if (value >= scale) return `${SHORT.format(value / scale)} ${unit}`;
  return `${SHORT.format(value)}${last}`;
};

/** "12,345". */
export const count = (value) => WHOLE.format(value);
/** "12,345", "12.3", from a million on "1.23 M". */
export const about = (value) => {
  if (value >= 1e6) return scaled(value, [["G", 1e9], ["M", 1e6]], "");
  return (value >= 100 ? WHOLE : TENTH).format(value);
};
/** What moved, in decimal units: "1.25 GB". */
export const bytes = (value) => scaled(value, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]], " B");
/** What is kept, in binary units: "34.4 MiB". */
export const memory = (value) =>
  scaled(value, [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]], " B");
/** "87.3 %". */
export const percent = (share) => `${(100 * share).toFixed(share === 0 || share === 1 ? 0 : 1)} %`;
/** "3.4 h". */
export const duration = (seconds) => {
  for (const [unit, scale] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (seconds >= scale) return `${(seconds / scale).toFixed(1)} ${unit}`;
  return `${Math.floor(seconds)} s`;
};
/** How long somebody waits: "12.3 ms", "1.25 s". */
export const wait = (seconds) => (seconds < 1 ? `${SHORT.format(1000 * seconds)} ms` : `${SHORT.format(seconds)} s`);
/** A rate that may not be known yet. */
export const rate = (value, shown = about) => (value === null ? "–" : `${shown(value)}/s`);

/** What all of {name: number} come to. */
export const sum = (counts) => Object.values(counts ?? {}).reduce((total, value) => total + value, 0);

// pictures

/** One bar of parts, [{name, value, kind}], out of `whole`; `kind` is a colour's class. Its label says it in words. */
export function bar(parts, whole, shown = count) {
  const label = parts.map(({ name, value }) => `${name} ${shown(value)}`).join(", ");
  let x = 0;
  const rects = parts.filter(({ value }) => value > 0).map(({ value, kind }) => {
    const width = whole > 0 ? Math.min(100 - x, (100 * value) / whole) : 0;
    const rect = svg("rect", { class: `fill ${kind}`, x: `${x}%`, width: `${width}%`, height: "100%" });
    x += width;
    return rect;
  });
  const track = svg("rect", { class: "track", width: "100%", height: "100%" });
  return svg("svg", { class: "bar", role: "img", "aria-label": label || "nothing" }, track, rects);
}

/** The dot that stands for a colour's class beside its name. */
export const swatch = (kind) => h("i", { class: `swatch ${kind}`, "aria-hidden": "true" });

// panels

/** A number to be read from afar, what it is of, and a picture or nothing. */
export function tile(title, value, note, picture, kind = "") {
  const words = [h("h2", {}, title), h("p", { class: "value" }, value), h("p", { class: "note" }, note)];
  return h("section", { class: `card tile ${kind}` }, words, picture);
}

export const card = (title, ...content) => h("section", { class: "card" }, h("h3", {}, title), content);

/** `heads` are [text, class of the column]; the first cell of each row names it. One that is too wide scrolls. */
export function table(heads, rows) {
  const cell = (content, i) => (i ? h("td", { class: heads[i][1] }, content) : h("th", { scope: "row" }, content));
  const head = h("tr", {}, heads.map(([text, kind]) => h("th", { scope: "col", class: kind }, text)));
  const body = h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map(cell))));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), body));
}

/** Counts by tier, [{name, kind, value, now}], and each one's share of all. */
export function shares(unit, rows) {
  const total = sum(rows.map(({ value }) => value));
  return table(
    [["tier"], ["", "wide"], ["share", "number"], [unit, "number"], ["now", "number"]],
    rows.map(({ name, kind, value, now }) => {
      const picture = bar([{ name, value, kind }], total);
      return [[swatch(kind), name], picture, percent(value / total), count(value), rate(now)];
    }),
  );
}

/** Said where there is nothing to show. */
export const none = (text) => h("p", { class: "quiet" }, text);

/** Counts by reason, [{name, value, now}], the most frequent first. */
export function breakdown(unit, rows, nothing) {
  if (!rows.length) return none(nothing);
  const most = Math.max(...rows.map(({ value }) => value));
  const sorted = [...rows].sort((one, other) => other.value - one.value);
  return table(
    [["reason"], ["", "wide"], [unit, "number"], ["now", "number"]],
    sorted.map(({ name, value, now }) => {
      const picture = bar([{ name, value, kind: "miss" }], most);
      return [name.replaceAll("_", " "), picture, count(value), rate(now)];
    }),
  );
}
