// What the page shows of the router.

import { about, bar, breakdown, card, count, duration, h, line, none, percent, rate, rateTile, sum, swatch, table, tile } from "./draw.js";

const MEDIA = { __proto__: null, GPU: ["L1 device", "l1"], CPU: ["L2 host memory", "l2"], STORAGE: ["file", "file"], EXTERNAL: ["Redis", "redis"] };
const STATES = { __proto__: null, up: ["● up", "good"], joining: ["◐ joining", "warn"], draining: ["◐ draining", "warn"], down: ["✕ down", "bad"], refused: ["✕ refused", "bad"] };
const FEEDS = { __proto__: null, live: ["● live", "good"], replaying: ["◐ replaying", "warn"], stale: ["▲ stale", "bad"] };
const REASONS = {
  __proto__: null,
  prefix: "holds more of the prompt than any other",
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

/** "router, up 3.4 h, blocks of 16 tokens of model 2adf752b523bf584". */
export function aboutOf({ uptime_s: uptime, block_size: size, fingerprint }) {
  const blocks = size ? `, blocks of ${count(size)} tokens${fingerprint ? ` of model ${fingerprint.slice(0, 16)}` : ""}` : "";
  return `router, up ${duration(uptime)}${blocks}`;
}

/** The badge's text and kind, and what is wrong. */
export function stateOf({ replicas }) {
  const wrong = replicas.filter(({ state }) => state !== "up");
  const trouble = wrong.map(({ name, state, why }) => `${name} is ${state}${why ? `: ${why}` : ""}`).join("; ");
  if (wrong.length === replicas.length) return { text: "✕ no replica", kind: "bad", trouble };
  if (wrong.length) return { text: `▲ ${replicas.length - wrong.length} of ${replicas.length} replicas`, kind: "warn", trouble };
  return { text: "● ok", kind: "good", trouble: "" };
}

/** Everything below the header. */
export function panelsOf(status, history) {
  return [
    tiles(status, history),
    card("Replicas", replicasOf(status, history)),
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

const total = (name) => (status) => sum(status[name]);

function tiles(status, history) {
  const { told_prompt: prompts, told_cached: cached } = status.tokens;
  const shares = history.pairs((before, after) => {
    const grown = after.tokens.told_prompt - before.tokens.told_prompt;
    return grown > 0 ? Math.min(1, Math.max(0, after.tokens.told_cached - before.tokens.told_cached) / grown) : null;
  });
  const problems = (name, what) => rateTile(what, total(name), `${count(total(name)(status))} in all`, history, "miss");
  return h(
    "div",
    { class: "tiles" },
    rateTile("Requests", total("requests"), `${count(total("requests")(status))} in all`, history, "l2"),
    tile("Prompt found in a cache", prompts ? percent(cached / prompts) : "–", prompts ? `of ${about(prompts)} tokens, as replicas said` : "no replica has said yet", line(shares, history.span, percent, "l2", 1)),
    problems("retries", "Retries"),
    problems("errors", "Errors"),
  );
}

function replicasOf({ replicas }) {
  const most = Math.max(1, ...replicas.map(({ load }) => load));
  const known = Math.max(1, ...replicas.map(({ blocks }) => sum(blocks)));
  return table(
    [["replica"], ["state"], ["load, in blocks", "narrow"], ["", "number"], ["requests", "number"], ["failed", "number"], ["events", "whole"], ["blocks known, by tier", "narrow"], ["", "number"]],
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

function failuresOf(errors) {
  const reasons = Object.entries(errors).map(([reason, value]) => `${reason.replaceAll("_", " ")} ${count(value)}`);
  return reasons.length ? [h("b", { class: "bad" }, "▲ ", count(sum(errors))), h("small", {}, ` ${reasons.join(" · ")}`)] : "0";
}

function badge(known, state) {
  const [text, kind] = known[state] ?? [`▲ ${state}`, "warn"];
  return h("span", { class: `badge ${kind}` }, text);
}

// Of whom it is known what they hold: the engine itself, and the daemon of its node.
function feedsOf({ events, node_events: node }) {
  const feeds = [["engine", events], ["node", node]].filter(([, feed]) => feed);
  if (!feeds.length) return "none";
  return feeds.map(([whose, feed]) => h("p", { class: "feed" }, badge(FEEDS, feed.state), h("small", {}, ` ${whose}${feedOf(feed)}`)));
}

function feedOf({ seq, gaps, age_s: age }) {
  const parts = [typeof seq === "number" && `no. ${count(seq)}`, typeof age === "number" && `${duration(age)} ago`, gaps > 0 && `${count(gaps)} gaps`];
  return parts.filter(Boolean).map((part) => ` · ${part}`).join("");
}

const media = (blocks) =>
  Object.entries(blocks).map(([medium, value]) => {
    const [name, kind] = MEDIA[medium] ?? [medium, "miss"];
    return { name, value, kind };
  });

const legend = (blocks) => media(blocks).filter(({ value }) => value).map(({ name, value, kind }) => h("span", { class: "key" }, swatch(kind), `${name} ${about(value)}`));

function decisionsOf({ decisions, replicas }) {
  if (!decisions.length) {
    const model = "MODEL";
    return [
      none("No request has come yet. Send one:"),
      h("pre", {}, `curl ${location.origin}/v1/completions -H 'content-type: application/json' -d '{"model": "${model}", "prompt": "Hello", "max_tokens": 8}'`),
    ];
  }
  const names = replicas.map(({ name }) => name);
  return table(
    [["time"], ["prompt", "number"], ["goes to"], ["why"], ...names.map((name) => [name, "score"])],
    decisions.slice(0, MAX_DECISIONS).map((decision) => [
      new Date(decision.time * 1000).toLocaleTimeString([], { hour12: false }),
      `${count(decision.prompt_blocks)} blocks`,
      decision.chosen ?? "nobody",
      [h("b", {}, decision.reason), h("small", {}, ` ${REASONS[decision.reason] ?? ""}`)],
      ...names.map((name) => scoreOf(decision, decision.scores.find((score) => score.name === name))),
    ]),
  );
}

function scoreOf({ chosen, prompt_blocks: prompt }, score) {
  if (!score) return "–";
  const { name, cached, load, work } = score;
  const words = work === null ? "can take none" : `${count(cached)} held, ${about(load)} to do, ${about(work)} in all`;
  return [
    bar([{ name: "held", value: cached, kind: "l2" }], prompt),
    h("small", {}, name === chosen ? h("b", {}, `✓ ${words}`) : words),
  ];
}

function counted(name, history, status) {
  const rows = Object.entries(status[name]).map(([reason, value]) => {
    return { name: reason, value, now: history.rate((each) => each[name][reason] ?? 0) };
  });
  return breakdown("requests", rows, "None.");
}
