// What the page shows of a status: a node's daemon.

import { about, bar, bytes, count, duration, h, line, memory, percent, rate } from "./draw.js";

const TIERS = ["l1", "l2", "file", "redis", "miss"];
const NAMES = { l1: "L1 device", l2: "L2 host memory", file: "file", redis: "Redis", miss: "nowhere" };
const SLOTS = { ready: "ready", leased: "leased", dirty: "dirty", filling: "filling", quarantined: "bad", free: "rest", unused: "rest" };
const BREAKERS = { closed: ["● closed", "good"], "half-open": ["◐ half-open", "warn"], open: ["▲ open", "bad"] };
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

const sum = (counts) => Object.values(counts ?? {}).reduce((total, value) => total + value, 0);
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

function tile(title, value, note, picture, kind = "") {
  return h("section", { class: `card tile ${kind}` }, h("h2", {}, title), h("p", { class: "value" }, value), h("p", { class: "note" }, note), picture);
}

function rateTile(title, counter, note, history, kind, shown = about) {
  const picture = line(history.rates(counter), history.span, (value) => rate(value, shown), kind);
  return tile(title, rate(history.rate(counter), shown), note, picture);
}

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
    rateTile("Looked up", lookups, "blocks", history, "l2"),
    rateTile("Read from below", moved("read"), `${bytes(moved("read")(status))} in all`, history, "file", bytes),
    rateTile("Written below", moved("write"), `${bytes(moved("write")(status))} in all`, history, "file", bytes),
    tile("Host memory given", percent(given / size), `${memory(given)} of ${memory(size)}`, bar([{ name: "given", value: given, kind: "l2" }], size, memory)),
    tile("Clients", count(connected), [gone > 0 && `${count(gone)} gone, may still copy; `, events.join(", ") || "none has come yet"]),
    tile("Not stored", rate(history.rate(dropped)), `${count(dropped(status))} blocks in all`, line(history.rates(dropped), history.span, rate, "miss")),
    tile("Corrupted", [wrong ? "▲ " : "● ", count(wrong)], wrong ? "blocks failed verification; none was served" : "every block read was the one stored", null, wrong ? "bad" : "good"),
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
      card("Fill", fillOf(model)),
      card("Lookups, by where found", lookupsOf(model, history)),
      card("Moved", movedOf(model, history)),
      card("Not served, by reason", reasonsOf(model.missed, "Every block found was served.", (reason) => history.rate(of(model.model, (each) => each.missed[reason] ?? 0)))),
      card("Not stored, by reason", droppedOf(model, history)),
      card("Breakers", breakersOf(model)),
      card("Tier by tier", tiersOf(model)),
    ),
  );
}

const card = (title, ...content) => h("section", { class: "card" }, h("h3", {}, title), content);
const table = (heads, rows) =>
  h(
    "table",
    {},
    h("thead", {}, h("tr", {}, heads.map(([text, kind]) => h("th", { scope: "col", class: kind }, text)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, i) => (i ? h("td", { class: heads[i][1] }, cell) : h("th", { scope: "row" }, cell)))))),
  );
const none = (text) => h("p", { class: "quiet" }, text);

function fillOf(model) {
  const { slots, ready, leased, dirty, filling, quarantined, free } = model.l2;
  // Leased and dirty slots are ready ones: the bar shows each slot once.
  const host = fill("l2", { ready: ready - leased, leased, filling, quarantined }, slots);
  const rest = [["dirty", dirty], ["free", free], ["pinned", model.l2.pinned]].filter(([, value]) => value);
  const below = Object.entries(model.tiers).filter(([, tier]) => sum(tier.slots) > 0);
  return [
    host,
    rest.length > 0 && h("p", { class: "note" }, rest.map(([name, value]) => `${name} ${count(value)}`).join(" · ")),
    below.map(([name, tier]) => fill(name, tier.slots, sum(tier.slots))),
  ];
}

function fill(name, slots, whole) {
  const used = Object.entries(slots).filter(([state]) => SLOTS[state] !== "rest");
  const parts = used.map(([state, value]) => ({ name: state, value, kind: `${name} ${SLOTS[state] ?? "ready"}` }));
  const total = used.reduce((so_far, [, value]) => so_far + value, 0);
  const words = used.filter(([, value]) => value).map(([state, value]) => `${state} ${count(value)}`).join(" · ") || "empty";
  return h(
    "div",
    { class: "meter" },
    h("p", {}, h("b", {}, swatch(name), NAMES[name] ?? name), h("span", {}, percent(whole ? total / whole : 0))),
    bar(parts, whole),
    h("p", { class: "note" }, `${words}, of ${count(whole)} slots`),
  );
}

const swatch = (kind) => h("i", { class: `swatch ${kind}`, "aria-hidden": "true" });

function lookupsOf(model, history) {
  const total = sum(model.lookups);
  const shown = TIERS.filter((tier) => model.lookups[tier] || tier === "l2" || tier === "miss" || tier in model.tiers);
  if (!total) return none("Nobody has asked yet.");
  return table(
    [["tier"], ["share", "wide"], ["blocks", "number"], ["now", "number"]],
    shown.map((tier) => {
      const value = model.lookups[tier] ?? 0;
      const picture = bar([{ name: NAMES[tier], value, kind: tier }], total);
      return [[swatch(tier), NAMES[tier]], [picture, h("span", {}, percent(value / total))], count(value), rate(history.rate(of(model.model, (each) => each.lookups[tier] ?? 0)))];
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

function reasonsOf(counts, nothing, now) {
  const rows = Object.entries(counts).sort(([, one], [, other]) => other - one);
  if (!rows.length) return none(nothing);
  const most = rows[0][1];
  return table(
    [["reason"], ["", "wide"], ["blocks", "number"], ["now", "number"]],
    rows.map(([reason, value]) => [reason.replaceAll("_", " "), bar([{ name: reason, value, kind: "miss" }], most), count(value), rate(now(reason))]),
  );
}

function droppedOf(model, history) {
  const flat = Object.entries(model.dropped).flatMap(([tier, each]) => Object.keys(each).map((reason) => [`${NAMES[tier] ?? tier}: ${reason}`, [tier, reason]]));
  const at = Object.fromEntries(flat);
  const counts = Object.fromEntries(flat.map(([name, [tier, reason]]) => [name, model.dropped[tier][reason]]));
  return reasonsOf(counts, "Every block offered was stored.", (name) => {
    const [tier, reason] = at[name];
    return history.rate(of(model.model, (each) => each.dropped[tier]?.[reason] ?? 0));
  });
}

function breakersOf(model) {
  const rows = Object.entries(model.tiers).flatMap(([tier, { breakers }]) =>
    Object.entries(breakers).map(([direction, state]) => {
      const [text, kind] = BREAKERS[state] ?? [state, "warn"];
      return [[swatch(tier), NAMES[tier] ?? tier], direction, h("span", { class: `badge ${kind}` }, text)];
    }),
  );
  return rows.length ? table([["tier"], ["direction"], ["state"]], rows) : none("No tier below host memory is configured: see [file] and [redis].");
}

function tiersOf(model) {
  const tiers = ["l2", ...Object.keys(model.tiers)];
  return table(
    [["tier"], ["stored", "number"], ["evicted", "number"], ["corrupted", "number"]],
    tiers.map((tier) => {
      const wrong = model.corrupted[tier] ?? 0;
      return [[swatch(tier), NAMES[tier] ?? tier], count(model.stored[tier] ?? 0), count(model.evicted[tier] ?? 0), wrong ? h("b", { class: "bad" }, "▲ ", count(wrong)) : "0"];
    }),
  );
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
  return h("section", { class: "card" }, h("h2", {}, "Clients"), table(heads, rows), more > 0 && none(`and ${count(more)} more`));
}
