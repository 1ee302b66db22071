// What the page shows of a node's daemon.

import { about, bar, breakdown, bytes, card, count, duration, h, line, memory, none, percent, rate, rateTile, sum, swatch, table, tile } from "./draw.js";

const TIERS = ["l1", "l2", "file", "redis", "miss"];
const NAMES = { __proto__: null, l1: "L1 device", l2: "host memory", file: "file", redis: "Redis", miss: "nowhere" };
const SLOTS = { __proto__: null, ready: "ready", leased: "leased", dirty: "dirty", filling: "filling", quarantined: "bad", free: "rest", unused: "rest", holes: "filling" };
const BREAKERS = { __proto__: null, closed: ["● closed", "good"], "half-open": ["◐ half-open", "warn"], open: ["▲ open", "bad"] };
const RECENT = 60; // seconds the share of hits is of
const MAX_CLIENTS = 64;

/** "node daemon 0.1.0, pid 17, up 3.4 h". */
export function aboutOf(status) {
  return `node daemon ${status.version}, pid ${status.pid}, up ${duration(status.uptime_s)}`;
}

/** The badge's text and kind, and what is wrong. */
export function stateOf(status) {
  if (status.status === "ok") return { text: "● ok", kind: "good", trouble: "" };
  const each = status.degraded.map(({ model, tier, direction, breaker }) => `${tier} of ${model}, ${direction}s (breaker ${breaker})`);
  return { text: `▲ ${status.status}`, kind: "warn", trouble: `Left alone for now, its blocks are misses: ${each.join("; ")}.` };
}

/** Everything below the header. */
export function panelsOf(status, history) {
  const models = status.models.map((model) => modelOf(model, history));
  return [daemonTiles(status, history), models.length ? models : nothingYet(status), clientsOf(status.clients)];
}

// sums over what a status has

const over = (f) => (status) => status.models.reduce((total, model) => total + f(model), 0);
const lookups = over((model) => sum(model.lookups));
const hits = over((model) => sum(model.lookups) - (model.lookups.miss ?? 0));
const dropped = over((model) => sum(Object.values(model.dropped).map(sum)));
const corrupted = over((model) => sum(model.corrupted));
const moved = (direction) => over((model) => sum(Object.values(model.moved).map((each) => each[direction] ?? 0)));
const of = (name, f) => (status) => {
  const model = status.models.find((each) => each.model === name);
  return model ? f(model) : 0;
};

// tiles

function daemonTiles(status, history) {
  const [asked, found] = [history.grown(lookups, RECENT), history.grown(hits, RECENT)];
  const shares = history.pairs((before, after) => {
    const grown = lookups(after) - lookups(before);
    return grown > 0 ? Math.max(0, hits(after) - hits(before)) / grown : null;
  });
  const share = asked && found && asked.value > 0 ? percent(found.value / asked.value) : "–";
  const ofWhat = asked?.value ? `of ${about(asked.value)} blocks in the last ${duration(Math.round(asked.seconds))}` : "nobody asked in the last minute";
  const { bytes: size, given } = status.budget;
  const connected = status.clients.filter((client) => client.connected).length;
  const gone = status.clients.length - connected;
  const wrong = corrupted(status);
  const events = Object.entries(status.events).map(([name, value]) => `${name.replaceAll("_", " ")} ${count(value)}`);
  return h(
    "div",
    { class: "tiles" },
    tile("Found in the cache", share, ofWhat, line(shares, history.span, percent, "l2", 1)),
    rateTile("Looked up", lookups, `${about(lookups(status))} blocks in all`, history, "l2"),
    rateTile("Read from below", moved("read"), `${bytes(moved("read")(status))} in all`, history, "file", bytes),
    rateTile("Written below", moved("write"), `${bytes(moved("write")(status))} in all`, history, "file", bytes),
    tile("Host memory given", percent(given / size), `${memory(given)} of ${memory(size)}`, bar([{ name: "given", value: given, kind: "l2" }], size, memory)),
    tile("Clients", count(connected), [gone > 0 && `${count(gone)} gone, may still copy; `, events.join(", ") || "none has left yet"]),
    tile("Not stored", rate(history.rate(dropped)), `${count(dropped(status))} blocks in all`, line(history.rates(dropped), history.span, rate, "miss")),
    tile("Corrupted", [wrong > 0 && "▲ ", count(wrong)], wrong ? "blocks failed verification; none was served" : "✓ every block read was the one stored", null, wrong ? "bad" : "good"),
  );
}

function nothingYet(status) {
  return h(
    "section",
    { class: "card empty" },
    h("h2", {}, "No engine has attached yet"),
    h("p", {}, "Start one with this setting; its model appears here as soon as it is there."),
    h("pre", {}, `KVTIER_SERVICE__SOCKET=${status.socket}`),
  );
}

// a model

function modelOf(model, history) {
  const facts = `blocks of ${count(model.block_size)} tokens in ${memory(model.block_bytes)} · ${count(model.clients)} ${model.clients === 1 ? "client" : "clients"}`;
  return h(
    "section",
    { class: "model", "aria-label": `model ${model.model}` },
    h("h2", {}, "Model ", h("code", {}, model.model), h("small", {}, facts)),
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
  );
}

function tiersOf(model) {
  const { slots, ready, leased, dirty, filling, quarantined, pinned } = model.l2;
  const notes = [["dirty", dirty], ["pinned", pinned]];
  return [
    tier(model, "l2", { ready: ready - leased, leased, filling, quarantined }, slots, notes), // leased slots are ready ones
    Object.entries(model.tiers).map(([name, below]) => tier(model, name, below.slots, sum(below.slots), [])),
  ];
}

function tier(model, name, slots, whole, more) {
  const used = Object.entries(slots).filter(([state, value]) => value && SLOTS[state] !== "rest");
  const parts = used.map(([state, value]) => ({ name: state, value, kind: `${name} ${SLOTS[state] ?? "ready"}` }));
  const full = whole > 0 ? percent(sum(Object.fromEntries(used)) / whole) : "";
  const counts = [["stored", model.stored[name]], ["evicted", model.evicted[name]], ...more];
  const facts = [...used, ...counts].filter(([, value]) => value).map(([what, value]) => `${what} ${count(value)}`);
  const wrong = model.corrupted[name] ?? 0;
  return h(
    "div",
    { class: "meter" },
    h("p", {}, h("b", {}, swatch(name), NAMES[name] ?? name), h("span", {}, whole > 0 && `${full} of ${count(whole)} slots`)),
    whole > 0 && bar(parts, whole),
    h("p", { class: "note" }, facts.join(" · ") || "empty", wrong > 0 && h("b", { class: "bad" }, ` ▲ corrupted ${count(wrong)}`)),
  );
}

function lookupsOf(model, history) {
  const total = sum(model.lookups);
  const shown = TIERS.filter((tier) => model.lookups[tier] || tier === "l2" || tier === "miss" || tier in model.tiers);
  if (!total) return none("Nobody has asked yet.");
  return table(
    [["tier"], ["", "wide"], ["share", "number"], ["blocks", "number"], ["now", "number"]],
    shown.map((tier) => {
      const value = model.lookups[tier] ?? 0;
      const picture = bar([{ name: NAMES[tier], value, kind: tier }], total);
      const now = history.rate(of(model.model, (each) => each.lookups[tier] ?? 0));
      return [[swatch(tier), NAMES[tier]], picture, percent(value / total), count(value), rate(now)];
    }),
  );
}

function movedOf(model, history) {
  const ways = Object.entries(model.moved).flatMap(([tier, each]) => Object.keys(each).map((direction) => [tier, direction]));
  if (!ways.length) return none("Nothing has moved between tiers yet.");
  return table(
    [["way"], ["", "wide"], ["bytes", "number"], ["now", "number"]],
    ways.map(([tier, direction]) => {
      const counter = of(model.model, (each) => each.moved[tier]?.[direction] ?? 0);
      const picture = line(history.rates(counter), history.span, (value) => rate(value, bytes), tier);
      return [[swatch(tier), `${NAMES[tier] ?? tier} ${direction}`], picture, bytes(model.moved[tier][direction]), rate(history.rate(counter), bytes)];
    }),
  );
}

// Counted by tier and reason: "file: queue full".
function droppedOf(model, history) {
  const rows = Object.entries(model.dropped).flatMap(([tier, each]) =>
    Object.entries(each).map(([reason, value]) => {
      const now = history.rate(of(model.model, (other) => other.dropped[tier]?.[reason] ?? 0));
      return { name: `${NAMES[tier] ?? tier}: ${reason}`, value, now };
    }),
  );
  return breakdown("blocks", rows, "Every block offered was stored.");
}

function missedOf(model, history) {
  const rows = Object.entries(model.missed).map(([reason, value]) => {
    return { name: reason, value, now: history.rate(of(model.model, (other) => other.missed[reason] ?? 0)) };
  });
  return breakdown("blocks", rows, "Every block found was served.");
}

function breakersOf(model) {
  const tiers = Object.entries(model.tiers);
  if (!tiers.length) return none("No tier below host memory is configured: see [file] and [redis].");
  const directions = [...new Set(tiers.flatMap(([, { breakers }]) => Object.keys(breakers)))];
  const rows = tiers.map(([name, { breakers }]) => [[swatch(name), NAMES[name] ?? name], ...directions.map((each) => breaker(breakers[each]))]);
  return table([["tier"], ...directions.map((each) => [each])], rows);
}

function breaker(state) {
  if (state === undefined) return "–";
  const [text, kind] = BREAKERS[state] ?? [state, "warn"];
  return h("span", { class: `badge ${kind}` }, text);
}

// clients

function clientsOf(clients) {
  if (!clients.length) return null;
  const rows = clients.slice(0, MAX_CLIENTS).map((client) => [
    [client.pids.join(", ") || "–", !client.connected && " (gone)"],
    client.model ? h("code", {}, client.model) : "–",
    duration(client.seconds),
    count(client.claims),
    count(client.leases),
    count(client.reservations),
  ]);
  const heads = [["pids"], ["model"], ["for", "number"], ["claims", "number"], ["leases", "number"], ["filling", "number"]];
  const more = clients.length - rows.length;
  return card("Clients", table(heads, rows), more > 0 && none(`and ${count(more)} more`));
}
