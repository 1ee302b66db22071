// The tiers as the server names them, nearest first: the page knows none by itself.

const COLOURS = 6; // .tier0 to .tier5 in dashboard.css; further tiers begin again

let known = [];

/** Read what a status says of the tiers there can be: before anything of it is drawn. */
export function readTiers(status) {
  known = status.tier_captions ?? [];
}

/** All of them: [{name, label, shown, medium, lower}]; "lower" are those below host memory. */
export const tiers = () => known;

/**
 * {shown, kind}: what people call a tier, and the class of its colour. It is known by its name in counters, by its
 * "label" in an answer's usage or by its "medium" in KV events. What is not known is shown as it is.
 */
export function captionOf(value, field = "name") {
  const place = known.findIndex((tier) => tier[field] === value);
  return place < 0 ? { shown: value, kind: "miss" } : { shown: known[place].shown, kind: `tier${place % COLOURS}` };
}
