// What the page shows of the router.

import { chart, line, rateTile, timeAxis } from "./charts.js";
import {
  about, bar, breakdown, card, count, duration, h, none, percent, shares, sum, swatch, table, tile, wait,
} from "./draw.js";
import { money } from "./saved.js";
import { captionOf, readTiers } from "./tiers.js";

const STATES = {
  __proto__: null,
  up: ["● up", "good"],
  joining: ["◐ joining", "warn"],
  draining: ["◐ draining", "warn"],
  down: ["✕ down", "bad"],
  refused: ["✕ refused", "bad"],
};
const FEEDS = {
  __proto__: null,
  live: ["● live", "good"],
  replaying: ["◐ replaying", "warn"],
  stale: ["▲ stale", "bad"],
  refused: ["✕ refused", "bad"],
};
const LOST = ["stale", "refused"]; // states of a feed in which nobody knows what its publisher holds
const REASONS = {
  __proto__: null,
  prefix: "holds more of the prompt than any other",
  nearer: "what it holds is nearer to its device",
  load: "has less to do",
  equal: "nothing speaks for one: they take turns",
  only: "no other can take a request",
  unsure: "what they hold is not known: they take turns",
  turn: "round robin",
  session: "where its session belongs",
  full: "all have the work they may have",
  dead: "none is alive",
};
const MAX_DECISIONS = 12;

/** "router, up 3.4 h, blocks of 16 tokens of model tiny 2adf752b523bf584". */
export function aboutOf({ uptime_s: uptime, block_size: size, fingerprint, models = [] }) {
  const names = models.join(", ");
  const model = fingerprint || names ? ` of model ${names} ${fingerprint?.slice(0, 16) ?? ""}`.trimEnd().replace("  ", " ") : "";
  return `router, up ${duration(uptime)}${size ? `, blocks of ${count(size)} tokens${model}` : ""}`;
}

/** The badge's text and kind, and what is wrong. */
export function stateOf({ replicas }) {
  const wrong = replicas.filter(({ state }) => state !== "up");
  const trouble = wrong.map(({ name, state, why }) => `${name} is ${state}${why ? `: ${why}` : ""}`).join("; ");
  if (wrong.length === replicas.length) return { text: "✕ no replica", kind: "bad", trouble };
  const num_up = replicas.length - wrong.length;
  if (wrong.length) return { text: `▲ ${num_up} of ${replicas.length} replicas`, kind: "warn", trouble };
  const unknown = replicas.flatMap(({ name, events, node_events: node }) =>
    [[name, events], [`the node of ${name}`, node]].filter(([, feed]) => LOST.includes(feed?.state)).map(([whose]) => whose));
  if (unknown.length) return { text: "▲ events stale", kind: "warn", trouble: `Not known what it holds: ${unknown.join(", ")}.` };
  return { text: "● ok", kind: "good", trouble: "" };
}

/** Everything below the header. */
export function panelsOf(status, history) {
  readTiers(status);
  return [
    tiles(status, history),
    card("Replicas", replicasOf(status)),
    h("div", { class: "charts" }, latenciesOf(status, history)),
    card("Tokens of prompts, by where their KV was found", foundOf(status, history)),
    card("Last decisions, the newest first; in blocks, the least work in all wins", decisionsOf(status)),
    h(
      "div",
      { class: "tiles" },
      card("Decisions, by reason", counted("requests", history, status)),
      card("Retries, by what went wrong", counted("retries", history, status)),
      card("Errors of its own, by reason", counted("errors", history, status)),
      card("Prompts not known, by reason", counted("unknown_prompts", history, status)),
    ),
  ];
}

function tiles(status, history) {
  const counters = [["requests", "Requests", "main"], ["retries", "Retries", "miss"], ["errors", "Errors", "miss"]];
  const [requests, ...problems] = counters.map(([name, title, kind]) => {
    const total = (each) => sum(each[name]);
    return rateTile(title, total, `${count(total(status))} in all`, history, kind);
  });
  return h("div", { class: "tiles" }, requests, foundTile(status, history), priceTile(status), problems);
}

/** What a million prompt tokens cost: those that a replica had cached cost nothing. */
function priceTile({ prompt_price: price, tokens: { told_prompt: prompts, told_cached: cached } }) {
  if (price === undefined || price === null || !prompts) return null;
  const note = `a million prompt tokens; ${money(price)} if all were computed`;
  return tile("Price", money(price * (1 - cached / prompts)), `${note}; saved ${money((price * cached) / 1e6)}`);
}

function foundTile({ tokens }, history) {
  const shares = history.pairs((before, after) => {
    const [was, is] = [before.tokens ?? {}, after.tokens ?? {}];
    const grown = is.told_prompt - was.told_prompt; // no number where nobody remembers
    const cached = is.told_cached - was.told_cached;
    return grown > 0 ? Math.min(1, Math.max(0, cached / grown)) : null;
  });
  const { told_prompt: prompts, told_cached: cached } = tokens;
  const note = prompts ? `of ${about(prompts)} tokens, as replicas said` : "no replica has said yet";
  const picture = line("tile/found", "found", shares, history.span, percent, "main", 1);
  return tile("Prompt found in a cache", prompts ? percent(cached / prompts) : "–", note, picture);
}

/** [{shown, kind, tokens}] by where they were found: each tier that usage names, and what is left of the sums in it. */
function foundBy({ told_prompt: all, told_cached: cached, told_tiers: tiers = {} }) {
  return [
    ...Object.entries(tiers).map(([label, tokens]) => ({ ...captionOf(label, "label"), tokens })),
    { shown: "a replica's cache", kind: "main", tokens: cached - sum(tiers) },
    { shown: "nowhere: computed", kind: "miss", tokens: all - cached },
  ];
}

function foundOf(status, history) {
  if (!status.tokens.told_prompt) return none("No replica has said yet.");
  const rows = foundBy(status.tokens).filter(({ tokens }) => tokens > 0).map(({ shown, kind, tokens: value }) => {
    const before = (each) => foundBy(each.tokens ?? {}).find((row) => row.shown === shown)?.tokens ?? 0;
    return { name: shown, kind, value, now: history.rate(before) };
  });
  return shares("tokens", rows);
}

// replicas

function replicasOf({ replicas }) {
  const most = Math.max(1, ...replicas.map(({ load }) => load));
  const known = Math.max(1, ...replicas.map(({ blocks }) => sum(blocks)));
  const heads = [
    ["replica"], ["state"], ["load, in blocks", "narrow"], ["", "number"], ["requests", "number"], ["failed", "number"],
    ["events", "whole"], ["blocks known, by tier", "narrow"], ["", "number"],
  ];
  return table(
    heads,
    replicas.map((replica) => [
      replica.name,
      badge(STATES, replica.state),
      bar([{ name: "load", value: replica.load, kind: "load" }], most, about),
      about(replica.load),
      count(replica.requests),
      failuresOf(replica.errors),
      feedsOf(replica),
      [bar(media(replica.blocks), known), h("small", {}, legend(replica.blocks))],
      about(sum(replica.blocks)),
    ]),
  );
}

// What a replica's own metrics tell of waiting, by the name it has in the status, and what people call it.
const WAITS = [["ttft", "Time to the first token"], ["itl", "Between two tokens"]];
const COLOURS = 6;

/** A card for each wait: the median of each replica over time, and the figures of the last minute. */
function latenciesOf({ replicas }, history) {
  return WAITS.map(([what, title]) => {
    const known = replicas.map((replica, i) => [replica, `tier${i % COLOURS}`]).filter(([{ latency }]) => latency?.[what]);
    if (!known.length) return card(title, none("No replica has told it in the last minute."));
    const series = known.map(([{ name }, kind]) => ({
      name, kind, points: history.values(({ replicas: all }) => all?.find((each) => each.name === name)?.latency?.[what]?.p50_s),
    }));
    const rows = known.map(([{ name, latency }, kind]) => {
      const { num, p50_s: half, p95_s: most } = latency[what];
      return [[swatch(kind), name], wait(half), wait(most), count(num)];
    });
    return card(
      `${title}: the median of each replica`,
      chart(`wait/${what}`, series, timeAxis(history.span), wait),
      table([["in the last minute"], ["p50", "number"], ["p95", "number"], ["count", "number"]], rows),
    );
  });
}

function badge(known, state) {
  const [text, kind] = known[state] ?? [`▲ ${state}`, "warn"];
  return h("span", { class: `badge ${kind}` }, text);
}

function failuresOf(errors) {
  const reasons = Object.entries(errors).map(([reason, value]) => `${reason.replaceAll("_", " ")} ${count(value)}`);
  if (!reasons.length) return "0";
  return [h("b", { class: "bad" }, "▲ ", count(sum(errors))), h("small", {}, ` ${reasons.join(" · ")}`)];
}

// Of whom it is known what they hold: the engine itself, and the daemon of its node.
function feedsOf({ events, node_events: node }) {
  const feeds = [["engine", events], ["node", node]].filter(([, feed]) => feed);
  if (!feeds.length) return "none";
  return feeds.map(([whose, { state, seq, gaps, age_s: age }]) => {
    const facts = [whose];
    if (typeof seq === "number") facts.push(`no. ${count(seq)}`);
    if (typeof age === "number") facts.push(`${duration(age)} ago`);
    if (gaps > 0) facts.push(`${count(gaps)} gaps`);
    return h("p", { class: "feed" }, badge(FEEDS, state), h("small", {}, ` ${facts.join(" · ")}`));
  });
}

function media(blocks) {
  return Object.entries(blocks).filter(([, value]) => value).map(([medium, value]) => {
    const { shown: name, kind } = captionOf(medium, "medium");
    return { name, value, kind };
  });
}

function legend(blocks) {
  return media(blocks).map(({ name, value, kind }) => h("span", { class: "key" }, swatch(kind), `${name} ${about(value)}`));
}

// decisions

function decisionsOf({ decisions, replicas }) {
  if (!decisions.length) return howToAsk();
  const names = replicas.map(({ name }) => name);
  return table(
    [["time"], ["prompt", "number"], ["goes to"], ["why", "why"], ...names.map((name) => [name, "score"])],
    decisions.slice(0, MAX_DECISIONS).map((decision) => [
      new Date(decision.time * 1000).toLocaleTimeString([], { hourCycle: "h23" }),
      `${count(decision.prompt_blocks)} ${decision.prompt_blocks === 1 ? "block" : "blocks"}`,
      decision.chosen ?? "nobody",
      [h("b", {}, decision.reason), h("small", {}, ` ${REASONS[decision.reason] ?? ""}`)],
      ...names.map((name) => scoreOf(decision, decision.scores.find((score) => score.name === name))),
    ]),
  );
}

function howToAsk() {
  const body = JSON.stringify({ model: "MODEL", prompt: "Hello", max_tokens: 8 });
  const url = new URL("v1/completions", location.href);
  return [
    none("No request has come yet. Send one:"),
    h("pre", {}, `curl ${url} -H 'content-type: application/json' -d '${body}'`),
  ];
}

function scoreOf({ chosen, prompt_blocks: prompt }, score) {
  if (!score) return "–";
  const { name, cached, load, work } = score;
  const words = work === null ? "can take none" : `${count(cached)} held, ${about(load)} to do, ${about(work)} in all`;
  const text = name === chosen ? h("b", {}, `✓ ${words}`) : words;
  return [bar([{ name: "held", value: cached, kind: "main" }], prompt), h("small", {}, text)];
}

function counted(name, history, status) {
  const rows = Object.entries(status[name]).map(([reason, value]) => {
    return { name: reason, value, now: history.rate((each) => each[name]?.[reason] ?? 0) };
  });
  return breakdown("requests", rows, "None.");
}
