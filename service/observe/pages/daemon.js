// What the page shows of a node's daemon.

import { chart, line, rateTile, timeAxis } from "./charts.js";
import {
  about, bar, breakdown, bytes, card, count, duration, h, memory, none, percent, rate, shares, sum, swatch, table, tile,
} from "./draw.js";
import { memoryOf } from "./memory.js";
import { savedOf } from "./saved.js";
import { captionOf, readTiers, tiers } from "./tiers.js";
import { causesOf, lifetimesOf } from "./why.js";

const READ = "read"; // the counters' word for what comes up from a tier: a dashed line
const MISS = "miss"; // the counters' word for a block that no tier had
// Colours of slots; those of "rest" are empty. What is not here is drawn as what is ready.
const SLOTS = {
  __proto__: null, leased: "leased", filling: "filling", holes: "filling", quarantined: "bad", free: "rest", unused: "rest",
};
const BREAKERS = {
  __proto__: null,
  closed: ["● closed", "good"],
  "half-open": ["◐ half-open", "warn"],
  open: ["▲ open", "bad"],
};
const RECENT = 60; // seconds the share of hits is of
const MAX_CLIENTS = 64;
const FULL = 0.95; // of a disk or a server's memory, from where on it is marked

/** "node daemon 0.2.0, pid 17, up 3.4 h". */
export function aboutOf(status) {
  return `node daemon ${status.version}, pid ${status.pid}, up ${duration(status.uptime_s)}`;
}

/** The badge's text and kind, and what is wrong. */
export function stateOf({ status, degraded, wanting = [] }) {
  if (status === "ok") return { text: "● ok", kind: "good", trouble: "" };
  const each = degraded.map(({ model, tier, direction, breaker }) => {
    return `${tier} of ${model}, ${direction}s (breaker ${breaker})`;
  });
  const away = each.length ? [`Left alone for now, its blocks are misses: ${each.join("; ")}.`] : [];
  const trouble = [...wanting.map(({ why }) => `${why}.`), ...away].join(" ");
  return { text: `▲ ${status}`, kind: "warn", trouble };
}

/** Everything below the header. */
export function panelsOf(status, history) {
  readTiers(status);
  const models = status.models.map((model) => modelOf(model, history, status));
  return [tiles(status, history), models.length ? models : nothingYet(status), clientsOf(status)];
}

// what a status has, over all its models or of one

const over = (f) => (status) => (status.models ?? []).reduce((total, model) => total + f(model), 0);
// What the server remembers has numbers alone: what was empty then is not there.
const lookups = over((model) => sum(model.lookups));
const hits = over((model) => sum(model.lookups) - (model.lookups?.[MISS] ?? 0));
const dropped = over((model) => sum(Object.values(model.dropped ?? {}).map(sum)));
const corrupted = over((model) => sum(model.corrupted));
const moved = (direction) => over((model) => sum(Object.values(model.moved ?? {}).map((each) => each[direction] ?? 0)));
const of = (name, f) => (status) => {
  const model = status.models?.find((each) => each.model === name);
  return model ? (f(model) ?? 0) : 0;
};

// tiles

function tiles(status, history) {
  return h(
    "div",
    { class: "tiles" },
    foundTile(history),
    rateTile("Looked up", lookups, `${about(lookups(status))} blocks in all`, history, "main"),
    rateTile("Read from below", moved("read"), `${bytes(moved("read")(status))} in all`, history, "below", bytes),
    rateTile("Written below", moved("write"), `${bytes(moved("write")(status))} in all`, history, "below", bytes),
    memoryTile(status),
    clientsTile(status),
    rateTile("Not stored", dropped, `${count(dropped(status))} blocks in all`, history, "miss"),
    corruptedTile(corrupted(status)),
  );
}

function foundTile(history) {
  const [asked, found] = [history.grown(lookups, RECENT), history.grown(hits, RECENT)];
  const shares = history.pairs((before, after) => {
    const grown = lookups(after) - lookups(before);
    return grown > 0 ? Math.max(0, hits(after) - hits(before)) / grown : null;
  });
  const picture = line("tile/found", "found", shares, history.span, percent, "main", 1);
  if (!asked?.value || !found) return tile("Found in the cache", "–", "nobody asked in the last minute", picture);
  const note = `of ${about(asked.value)} blocks in the last ${duration(Math.round(asked.seconds))}`;
  return tile("Found in the cache", percent(found.value / asked.value), note, picture);
}

function memoryTile({ budget: { bytes: size, given }, models }) {
  const used = models.flatMap(hostsOf).reduce((total, host) => total + host.bytes * (1 - host.free / host.slots), 0);
  const parts = [{ name: "in use", value: used, kind: "main" }, { name: "given", value: given - used, kind: "main shared" }];
  const note = `${memory(used)} of ${memory(size)}; ${memory(given)} given to models`;
  return tile("Host memory in use", percent(used / size), note, bar(parts, size, memory));
}

function clientsTile({ clients, events }) {
  const connected = clients.filter((client) => client.connected).length;
  const gone = clients.length - connected;
  const facts = Object.entries(events).map(([name, value]) => `${name.replaceAll("_", " ")} ${count(value)}`);
  if (gone) facts.unshift(`${count(gone)} gone, may still copy`);
  return tile("Clients", count(connected), facts.join(", ") || "none has left yet");
}

function corruptedTile(wrong) {
  if (!wrong) return tile("Corrupted", "0", "✓ every block read was the one stored", null, "good");
  return tile("Corrupted", `▲ ${count(wrong)}`, "blocks failed verification; none was served", null, "bad");
}

function nothingYet({ socket }) {
  return h(
    "section",
    { class: "card empty" },
    h("h2", {}, "No engine has attached yet"),
    h("p", {}, "Start one with this setting; its model appears here as soon as it is there."),
    h("pre", {}, `KVTIER_SERVICE__SOCKET=${socket}`),
  );
}

// a model

function modelOf(model, history, { gpu_hour: price }) {
  const clients = `${count(model.clients)} ${model.clients === 1 ? "client" : "clients"}`;
  const facts = `blocks of ${count(model.block_size)} tokens in ${memory(model.block_bytes)} · ${clients}`;
  return h(
    "section",
    { class: "model", "aria-label": `model ${model.model}` },
    h("h2", {}, "Model ", model.name && `${model.name} `, h("code", { title: model.fingerprint }, model.model), h("small", {}, facts)),
    h(
      "div",
      { class: "charts" },
      card("Found, of the blocks asked for", shareOf(model, history)),
      card("Saved", savedOf(model, (f) => of(model.model, f), history, price)),
      causesOf(model, (f) => of(model.model, f), history),
      card("Looked up, over time", lookedUpOf(model, history)),
    ),
    h(
      "div",
      { class: "cards" },
      card("Tiers", tiersOf(model)),
      card("Lookups, by where found", lookupsOf(model, history)),
      card("Moved", movedOf(model, history)),
      card("Breakers", breakersOf(model)),
      card("Not served, by reason", missedOf(model, history)),
      card("Not stored, by reason", droppedOf(model, history)),
    ),
    h(
      "div",
      { class: "charts" },
      lifetimesOf(model),
      memoryOf(model),
    ),
  );
}

const nameOf = (tier) => (tier === MISS ? "nowhere" : captionOf(tier).shown);
const colourOf = (tier) => captionOf(tier).kind;
const isOn = ({ name, lower }, model) => Object.hasOwn(lower ? model.tiers : model, name);

// Host memory says of itself what no other tier does: a model has it under the tier's own name.
const hostNames = (model) => tiers().filter((tier) => !tier.lower && isOn(tier, model)).map(({ name }) => name);
const hostsOf = (model) => hostNames(model).map((name) => model[name]);

function tiersOf(model) {
  return [
    hostNames(model).map((name) => {
      const { slots, ready, leased, dirty, filling, quarantined, pinned } = model[name];
      const used = { ready: ready - leased, leased, filling, quarantined }; // a leased slot is a ready one
      return meterOf(model, name, used, slots, [["dirty", dirty], ["pinned", pinned]]);
    }),
    Object.entries(model.tiers).flatMap(([name, below]) => [
      meterOf(model, name, below.slots, sum(below.slots), []), ...(below.room ?? []).map((room) => roomOf(name, room)),
    ]),
  ];
}

/** What a tier lies on: a disk or a server's memory, whoever fills it. And its own file, which grows as it is filled. */
function roomOf(name, { place, used, limit, is_own: isOwn }) {
  if (isOwn) {
    const taken = `${memory(used)} taken, ${memory(limit)} at most`;
    return h("div", { class: "meter room" }, h("p", { title: place }, h("span", {}, "its slab"), h("span", {}, taken)));
  }
  const nearlyFull = limit && used / limit > FULL && "▲ ";
  const full = limit ? `${percent(used / limit)} of ${memory(limit)} in use` : `${memory(used)} in use, no bound is set`;
  return h(
    "div",
    { class: "meter room" },
    h("p", {}, h("span", {}, h("code", {}, place)), h("span", {}, nearlyFull, full)),
    limit && bar([{ name: `used of ${place}`, value: used, kind: `${colourOf(name)} shared` }], limit, memory),
  );
}

function meterOf(model, name, slots, whole, notes) {
  const used = Object.entries(slots).filter(([state, value]) => value && SLOTS[state] !== "rest");
  const parts = used.map(([state, value]) => ({ name: state, value, kind: `${colourOf(name)} ${SLOTS[state] ?? ""}` }));
  const counts = [["stored", model.stored[name]], ["evicted", model.evicted[name]], ...notes];
  const facts = [...used, ...counts].filter(([, value]) => value).map(([what, value]) => `${what} ${count(value)}`);
  const wrong = model.corrupted[name] ?? 0;
  const full = whole > 0 && `${percent(sum(Object.fromEntries(used)) / whole)} of ${count(whole)} slots`;
  return h(
    "div",
    { class: "meter" },
    h("p", {}, h("b", {}, swatch(colourOf(name)), nameOf(name)), h("span", {}, full)),
    whole > 0 && bar(parts, whole),
    h(
      "p",
      { class: "note" },
      facts.join(" · ") || "empty",
      wrong > 0 && h("b", { class: "bad" }, ` ▲ corrupted ${count(wrong)}`),
    ),
  );
}

function shareOf(model, history) {
  const [asked, found] = [(each) => sum(each.lookups), (each) => sum(each.lookups) - (each.lookups?.[MISS] ?? 0)];
  const [allAsked, allFound] = [of(model.model, asked), of(model.model, found)];
  const points = history.pairs((before, after) => {
    const grown = allAsked(after) - allAsked(before);
    return grown > 0 ? Math.max(0, allFound(after) - allFound(before)) / grown : null;
  });
  const now = history.grown(allAsked, RECENT)?.value > 0 ? "" : "nobody asks now";
  const series = [{ name: "found", kind: "main", points, note: now }];
  const best = model.optimum;
  if (best) {
    // The server knows it for parts of the past hour. Of these both lines show the same blocks, so neither is too low.
    const width = best.seconds / best.steps.length;
    const part = (age) => best.steps.find(([middle, asked]) => asked && Math.abs(middle - age) <= width / 2);
    const shares = points.map(([age, live]) => [age, live, part(age)]);
    series[0].points = shares.map(([age, live, step]) => [age, step ? step[2] / step[1] : live]);
    const line = shares.map(([age, , step]) => [age, step ? step[3] / step[1] : null]);
    series.push({ name: "best possible", kind: "tier3", points: line, dashed: true });
  }
  const drawing = chart(`${model.model}/share`, series, timeAxis(history.span), percent, { top: 1, nothing: "Nobody has asked yet." });
  if (!best?.asked) return drawing;
  const words = `Of the ${count(best.asked)} blocks asked for in the last ${duration(best.seconds)}, ${percent(best.found / best.asked)} were found. `
    + `The best possible policy would have found ${percent(best.optimum / best.asked)} with room for ${count(best.capacity)} blocks, had it known all requests in advance.`;
  return [drawing, h("p", { class: "note" }, words)];
}

function lookedUpOf(model, history) {
  const shown = tiers().filter((tier) => model.lookups[tier.name] || isOn(tier, model)).map(({ name }) => name);
  const series = [...shown, MISS].map((tier) => {
    const counter = of(model.model, ({ lookups: each }) => each?.[tier]);
    return { name: nameOf(tier), kind: colourOf(tier), points: history.rates(counter) };
  });
  const id = `${model.model}/looked up`;
  return chart(id, series, timeAxis(history.span), (value) => rate(value), { stacked: true, nothing: "Nobody has asked yet." });
}

function lookupsOf(model, history) {
  if (!sum(model.lookups)) return none("Nobody has asked yet.");
  const shown = tiers().filter((tier) => model.lookups[tier.name] || isOn(tier, model)).map(({ name }) => name);
  const rows = [...shown, MISS].map((tier) => {
    const now = history.rate(of(model.model, ({ lookups: each }) => each?.[tier]));
    return { name: nameOf(tier), kind: colourOf(tier), value: model.lookups[tier] ?? 0, now };
  });
  return shares("blocks", rows);
}

/** [tier, name, value] of counts by tier and something else. */
const flat = (counts) =>
  Object.entries(counts).flatMap(([tier, each]) => Object.entries(each).map(([name, value]) => [tier, name, value]));

function movedOf(model, history) {
  const ways = flat(model.moved);
  if (!ways.length) return none("Nothing has moved between tiers yet.");
  const shown = (value) => rate(value, bytes);
  const counterOf = (tier, direction) => of(model.model, (each) => each.moved?.[tier]?.[direction]);
  const series = ways.map(([tier, direction]) => ({
    name: `${nameOf(tier)} ${direction}`, kind: colourOf(tier), dashed: direction === READ,
    points: history.rates(counterOf(tier, direction)),
  }));
  const rows = ways.map(([tier, direction, value]) => {
    const now = shown(history.rate(counterOf(tier, direction)));
    return [[swatch(colourOf(tier)), `${nameOf(tier)} ${direction}`], bytes(value), now];
  });
  return [
    chart(`${model.model}/moved`, series, timeAxis(history.span), shown),
    table([["way"], ["bytes", "number"], ["now", "number"]], rows),
  ];
}

function missedOf(model, history) {
  const rows = Object.entries(model.missed).map(([reason, value]) => {
    return { name: reason, value, now: history.rate(of(model.model, ({ missed }) => missed?.[reason])) };
  });
  return breakdown("blocks", rows, "Every block found was served.");
}

function droppedOf(model, history) {
  const rows = flat(model.dropped).map(([tier, reason, value]) => {
    const now = history.rate(of(model.model, (each) => each.dropped?.[tier]?.[reason]));
    return { name: `${nameOf(tier)}: ${reason}`, value, now };
  });
  return breakdown("blocks", rows, "Every block offered was stored.");
}

function breakersOf(model) {
  const below = Object.entries(model.tiers);
  if (!below.length) {
    const sections = tiers().filter(({ lower }) => lower).map(({ name }) => `[${name}]`).join(", ");
    return none(`No tier below host memory is configured: see ${sections}.`);
  }
  const directions = [...new Set(below.flatMap(([, { breakers }]) => Object.keys(breakers)))];
  return table(
    [["tier"], ...directions.map((direction) => [direction])],
    below.map(([name, { breakers }]) => {
      return [[swatch(colourOf(name)), nameOf(name)], ...directions.map((direction) => breaker(breakers[direction]))];
    }),
  );
}

function breaker(state) {
  if (state === undefined) return "–";
  const [text, kind] = BREAKERS[state] ?? [state, "warn"];
  return h("span", { class: `badge ${kind}` }, text);
}

// clients

function clientsOf({ clients, models }) {
  const names = Object.fromEntries(models.map(({ model, name }) => [model, name]));
  if (!clients.length) return null;
  const rows = clients.slice(0, MAX_CLIENTS).map((client) => [
    [client.pids.join(", ") || "–", !client.connected && " (gone)"],
    client.model ? [names[client.model] && `${names[client.model]} `, h("code", {}, client.model)] : "–",
    duration(client.seconds),
    count(client.claims),
    count(client.leases),
    count(client.reservations),
  ]);
  const numbers = ["for", "claims", "leases", "filling"].map((head) => [head, "number"]);
  const more = clients.length - rows.length;
  return card("Clients", table([["pids"], ["model"], ...numbers], rows), more > 0 && none(`and ${count(more)} more`));
}
