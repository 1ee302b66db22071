// Why blocks were missing: what became of those that no tier held, and how long blocks live against how long they had to.

import { ageAxis, chart, timeAxis } from "./charts.js";
import { card, count, duration, h, none, percent, rate, sum, swatch, table } from "./draw.js";
import { captionOf } from "./tiers.js";

// What became of a block, as people say it, and the class of its colour. Others are the reasons of stores not made.
const CAUSES = {
  __proto__: null,
  never_seen: ["never seen here, or too long ago", "miss"],
  evicted: ["evicted to make room", "tier3"],
  not_admitted: ["not admitted: seen too seldom", "tier5"],
  queue_full: ["dropped: the store queue was full", "tier4"],
  removed: ["removed by an operator", "tier0"],
  reset: ["forgotten in a reset", "tier2"],
};
const OTHER = "tier1";
const [ENOUGH, SOME] = [0.9, 0.5]; // of the returns, that come while a block is still there

const wordsOf = (cause) => CAUSES[cause] ?? [`not stored: ${cause.replaceAll("_", " ")}`, OTHER];

/** The card of misses by cause: stacked over time, and as a table. `counter` reads a number of any status. */
export function causesOf(model, counter, history) {
  return card("Missing, by what became of the block", causesIn(model, counter, history));
}

function causesIn(model, counter, history) {
  const causes = Object.entries(model.absent ?? {}).sort(([, one], [, other]) => sum(other) - sum(one));
  if (!causes.length) return none(model.missed.absent ? "What became of them is not known." : "No block was missing yet.");
  const total = causes.reduce((all, [, tiers]) => all + sum(tiers), 0);
  const series = causes.map(([cause]) => {
    const [name, kind] = wordsOf(cause);
    return { name, kind, points: history.rates(counter(({ absent }) => sum(absent?.[cause]))) };
  });
  const rows = causes.flatMap(([cause, tiers]) => Object.entries(tiers).map(([tier, value]) => {
    const [name, kind] = wordsOf(cause);
    const now = history.rate(counter(({ absent }) => absent?.[cause]?.[tier]));
    return [[swatch(kind), name], tier ? captionOf(tier).shown : "–", percent(value / total), count(value), rate(now)];
  }));
  return [
    chart(`${model.model}/causes`, series, timeAxis(history.span), (value) => rate(value), { stacked: true }),
    table([["cause"], ["tier"], ["share", "number"], ["blocks", "number"], ["now", "number"]], rows),
  ];
}

/** A card for each tier that evicts: how long its blocks lived, against how long until requests return. */
export function lifetimesOf(model) {
  return Object.entries(model.ages ?? {}).map(([tier, counts]) => {
    const { shown, kind } = captionOf(tier);
    const lifetime = { bounds: counts.slice(1).map((_, i) => 2 ** i), counts }; // the last count has no bound
    return card(`How long blocks live: ${shown}`, lifetimeOf(model, tier, lifetime, kind, shown));
  });
}

function lifetimeOf(model, tier, lifetime, kind, shown) {
  const [evicted, gaps] = [sum(lifetime.counts), model.return_gaps];
  const returns = gaps ? sum(gaps.counts) : 0;
  if (!evicted) return none("Nothing has been evicted yet.");
  const lived = quantile(lifetime, 0.5);
  const places = [...Array(61).keys()].map((i) => 86400 ** (i / 60)); // seconds, from one to a day
  const series = [{
    name: "blocks still there", kind, points: places.map((age) => [age, 1 - below(lifetime, age) / evicted]),
  }];
  const words = [`Half of the evicted blocks lived ${duration(lived)} or less in ${shown}.`];
  if (returns) {
    const within = below(gaps, lived) / returns;
    series.push({
      name: "requests that have returned", kind: "miss", dashed: true,
      points: places.map((age) => [age, below(gaps, age) / returns]),
    });
    const helps = within >= ENOUGH ? "would help little" : within >= SOME ? "would help some" : "would help much";
    words.unshift(`Half of the returns come within ${duration(quantile(gaps, 0.5))}.`);
    words.push(`${percent(within)} of the returns come within that time: more memory ${helps}.`);
  } else {
    words.push("No request is known to have returned yet: engines tell it when requests end.");
  }
  const id = `${model.model}/lifetime ${tier}`;
  return [
    chart(id, series, ageAxis(), percent, { top: 1, now: false }),
    h("p", { class: "note" }, words.join(" ")),
  ];
}

/** How many observations lie below this age, as if those between two bounds lay evenly. */
function below({ bounds, counts }, age) {
  let all = 0;
  for (let i = 0; i < counts.length; i += 1) {
    const [from, to] = [i ? bounds[i - 1] : 0, bounds[i] ?? 2 * bounds.at(-1)];
    if (age >= to) all += counts[i];
    else if (age > from) all += (counts[i] * (age - from)) / (to - from);
  }
  return all;
}

function quantile(ages, share) {
  const wanted = share * sum(ages.counts);
  let [low, high] = [0, 2 * ages.bounds.at(-1)];
  for (let i = 0; i < 40; i += 1) {
    const middle = (low + high) / 2;
    if (below(ages, middle) < wanted) low = middle;
    else high = middle;
  }
  return high;
}
