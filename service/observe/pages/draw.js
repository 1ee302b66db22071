// Drawing without a library: elements, changes in place, numbers as people read them, bars and lines as SVG.
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

/** Make `old` what `fresh` is, keeping every node that can stay: focus, selection and scrolling survive. */
export function morph(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return undefined;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
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

const [WIDTH, HEIGHT] = [240, 44];

/** A line of [[seconds ago, value or null], …], oldest first, over the last `span` seconds; null is a gap. */
export function line(points, span, shown, kind, least = 0) {
  const known = points.filter(([, value]) => value !== null);
  const most = Math.max(least, ...known.map(([, value]) => value));
  const x = (age) => (WIDTH * (1 - age / span)).toFixed(1);
  const y = (value) => (most > 0 ? HEIGHT - 2 - ((HEIGHT - 4) * value) / most : HEIGHT - 2).toFixed(1);
  const runs = [[]];
  for (const [age, value] of points) {
    if (value === null) runs.push([]);
    else runs.at(-1).push([x(age), y(value)]);
  }
  const drawn = runs.filter((run) => run.length > 0);
  const path = (run) => `M${run.map((point) => point.join(" ")).join("L")}${run.length > 1 ? "" : "h-2"}`;
  const area = (run) => `${path(run)}L${run.at(-1)[0]} ${HEIGHT}L${run[0][0]} ${HEIGHT}Z`;
  const last = known.length ? shown(known.at(-1)[1]) : "nothing yet";
  const label = `last ${duration(span)}: now ${last}, at most ${shown(most)}`;
  const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" };
  return svg(
    "svg",
    { class: `line ${kind}`, role: "img", "aria-label": label, ...box },
    svg("title", {}, label),
    svg("path", { class: "base", d: `M0 ${HEIGHT - 1}H${WIDTH}` }),
    drawn.map((run) => svg("path", { class: "area", d: area(run) })),
    drawn.map((run) => svg("path", { class: "stroke", d: path(run) })),
  );
}

/** The dot that stands for a colour's class beside its name. */
export const swatch = (kind) => h("i", { class: `swatch ${kind}`, "aria-hidden": "true" });

// panels

/** A number to be read from afar, what it is of, and a picture or nothing. */
export function tile(title, value, note, picture, kind = "") {
  const words = [h("h2", {}, title), h("p", { class: "value" }, value), h("p", { class: "note" }, note)];
  return h("section", { class: `card tile ${kind}` }, words, picture);
}

/** The tile of what only grows: its rate now, and as a line. */
export function rateTile(title, counter, note, history, kind, shown = about) {
  const rates = history.rates(counter);
  const most = Math.max(0, ...rates.map(([, value]) => value));
  const words = most > 0 ? `${note}, at most ${rate(most, shown)}` : note;
  const picture = line(rates, history.span, (value) => rate(value, shown), kind);
  return tile(title, rate(history.rate(counter), shown), words, picture);
}

export const card = (title, ...content) => h("section", { class: "card" }, h("h3", {}, title), content);

/** `heads` are [text, class of the column]; the first cell of each row names it. */
export function table(heads, rows) {
  const cell = (content, i) => (i ? h("td", { class: heads[i][1] }, content) : h("th", { scope: "row" }, content));
  const head = h("tr", {}, heads.map(([text, kind]) => h("th", { scope: "col", class: kind }, text)));
  return h("table", {}, h("thead", {}, head), h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map(cell)))));
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
