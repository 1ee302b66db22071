// What fills memory, by tenant and by prefix: asked for now and then, as it costs the server a look at every block.

import { bar, card, count, h, memory, none, percent, swatch, table } from "./draw.js";
import { captionOf } from "./tiers.js";

const EVERY = 10000; // milliseconds between two questions
const PATIENCE = 8000; // that an answer may take
const COLOURS = 6; // .tier0 to .tier5 in dashboard.css
const MOST = 10; // prefixes shown
const SHOWN = 16; // digits of a name; all of them stand in its tooltip
const TOGETHER = { __proto__: null, others: "miss", "not known": "miss" };

let told = null;
let asked = -Infinity; // when, by performance.now()

/** Cards of one model: what fills each tier that can tell. Asks the server, if that was some time ago. */
export function memoryOf(model) {
  if (performance.now() - asked >= EVERY) ask();
  const tiers = told?.models?.find((each) => each.model === model.model)?.tiers ?? {};
  const known = Object.entries(tiers).filter(([, { blocks }]) => blocks > 0);
  const nothing = () => none(told ? "Nothing is stored yet." : "Not known yet.");
  return [
    card("What fills memory, by tenant", known.length ? tenantsOf(known) : nothing()),
    card("Prefixes that most blocks begin with", known.length ? prefixesOf(known) : nothing()),
  ];
}

async function ask() {
  asked = performance.now();
  try {
    const answer = await fetch("memory", { signal: AbortSignal.timeout(PATIENCE) });
    if (answer.ok) told = await answer.json();
  } catch {
    // it is asked again; what is known is some seconds older then
  }
}

/** One colour for each tenant, whatever tier it is in. */
function colouring(known) {
  const names = new Set(known.flatMap(([, { tenants }]) => tenants.map(({ tenant }) => tenant)));
  const own = [...names].filter((name) => !TOGETHER[name]).sort();
  return (name) => TOGETHER[name] ?? `tier${own.indexOf(name) % COLOURS}`;
}

const callOf = ({ tenant, cache_salt: salt }) => salt ?? tenant;

function tenantsOf(known) {
  const colourOf = colouring(known);
  const bars = known.map(([name, { blocks, bytes, num_tenants: number, tenants }]) => {
    const parts = tenants.map((each) => ({ name: callOf(each), value: each.blocks, kind: colourOf(each.tenant) }));
    const { kind, shown } = captionOf(name);
    const many = `${count(number)} ${number === 1 ? "tenant" : "tenants"}`;
    const facts = h("span", {}, `${count(blocks)} blocks · ${memory(bytes)} · ${many}`);
    return h("div", { class: "meter" }, h("p", {}, h("b", {}, swatch(kind), shown), facts), bar(parts, blocks));
  });
  const all = joined(known, ({ tenants }) => tenants, ({ tenant }) => tenant);
  const anyQuota = all.some(([each]) => each.quota_bytes);
  const rows = all.map(([each, ...here]) => [
    [swatch(colourOf(each.tenant)), callOf(each)], ...(anyQuota ? [quotaOf(each)] : []), ...sizes(here, known),
  ]);
  const quota = anyQuota ? [["quota", "number"]] : [];
  return [bars, table([["tenant", "whole"], ...quota, ...heads(known)], rows)];
}

/** What a tenant may have of host memory, which it fills to the last. */
const quotaOf = ({ quota_bytes: quota }) => (quota ? memory(quota) : "–");

function prefixesOf(known) {
  const rows = joined(known, ({ prefixes }) => prefixes, ({ prefix }) => prefix).slice(0, MOST).map(([each, ...here]) => [
    h("code", { title: each.prefix }, each.prefix.slice(0, SHOWN)), callOf(each), count(each.tokens), ...sizes(here, known),
  ]);
  const note = told.named ? "A prefix is called by its first block's name." : "Names are for operators: these are labels.";
  return [
    table([["first block"], ["tenant", "whole"], ["tokens in common", "number"], ...heads(known)], rows),
    h("p", { class: "note" }, note),
  ];
}

/** [one of them, what each tier says of it or undefined, …] of what several tiers tell, in the first tier's order. */
function joined(known, listOf, keyOf) {
  const all = new Map();
  known.forEach(([, tier], i) => {
    for (const each of listOf(tier)) {
      const row = all.get(keyOf(each)) ?? [each];
      row[i + 1] = each;
      all.set(keyOf(each), row);
    }
  });
  return [...all.values()];
}

const heads = (known) => known.flatMap(([name]) => [[captionOf(name).shown, "number"], ["share", "number"]]);

const sizes = (here, known) => known.flatMap(([, { blocks }], i) => {
  const each = here[i];
  return each ? [memory(each.bytes), percent(each.blocks / blocks)] : ["–", "–"];
});
