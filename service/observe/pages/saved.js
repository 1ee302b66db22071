// What requests did not have to compute: seconds of prefill, and money where the price of a GPU's hour is known.

import { chart, timeAxis } from "./charts.js";
import { about, count, duration, h, none, table } from "./draw.js";

const HOUR = 3600;

/** "12.3 s", "4.5 h"; or the opposite of it. */
const time = (seconds) => {
  const size = Math.abs(seconds);
  return `${seconds < 0 ? "−" : ""}${size < 60 ? `${about(size)} s` : duration(size)}`;
};
const perSecond = (seconds) => `${seconds.toFixed(2)} s/s`;
const [CENTS, FINER] = [2, 4].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }));
export const money = (value) => (value < 10 ? FINER : CENTS).format(value);

export const netOf = ({ prefill_s: prefill, load_s: load }) => prefill - load;

/** A model's card, in what its engines measured or an operator assumes. `counter` reads a number of any status. */
export function savedOf(model, counter, history, price) {
  const { saved } = model;
  if (!saved) return none("This daemon does not tell.");
  if (!saved.tokens) return none("No request has loaded a block yet.");
  const rate = saved.tokens_per_s;
  const how = rate === null
    ? "No engine has told what it prefills in a second. Assume it: [service] prefill_rate."
    : `An engine prefills ${about(rate)} tokens a second (${saved.assumed ? "assumed" : "measured"}).`;
  const rows = [
    ["tokens loaded instead of computed", count(saved.tokens)],
    ["prefill they would have taken", time(saved.prefill_s)],
    ["less the time to read them from below", time(saved.load_s)],
    [h("b", {}, "saved"), h("b", {}, time(netOf(saved)))],
  ];
  if (price !== null && price !== undefined) rows.push([`at ${money(price)} an hour of GPUs`, money((netOf(saved) / HOUR) * price)]);
  const { million_loaded: loaded, million_computed: computed } = saved;
  if (loaded !== undefined) rows.push(["a million tokens: loaded", money(loaded)]);
  if (computed !== undefined) rows.push(["a million tokens: computed", money(computed)]);
  if (saved.untimed_tokens) rows.push(["tokens whose time is not known", count(saved.untimed_tokens)]);
  const [prefills, loads] = ["prefill_s", "load_s"].map((name) => history.rates(counter(({ saved: each }) => each?.[name])));
  const points = prefills.map(([age, value], i) => {
    const load = loads[i][1];
    return [age, value === null || load === null ? null : Math.max(0, value - load)];
  });
  return [
    chart(`${model.model}/saved`, [{ name: "prefill saved, in seconds a second", kind: "main", points }], timeAxis(history.span), perSecond, {
      nothing: "Nothing is known of the time yet.",
    }),
    table([["since the start"], ["", "number"]], rows),
    h("p", { class: "note" }, how),
  ];
}
