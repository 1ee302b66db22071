// What the page remembers: the hour that the server kept, then every status it was told, and rates of what only grows.

const KEPT = 3600; // seconds
const FINE = 120; // seconds of which every status is kept; of those before it one in COARSE seconds
const COARSE = 5;
const SHORTEST = 30; // seconds that lines show at least
const POINTS = 240; // of a line at most
const RECENT = 300; // seconds, the shorter window: of these all that the server kept is taken over
const STRIDES = [1, 5, 15, 60]; // seconds between two points
const SAME = 10; // seconds between what two samples say of the start of one process
const GAP = 12; // seconds between two statuses that are no neighbours
const LISTS = { __proto__: null, models: "model", replicas: "name" }; // lists in a status, and the field that names an entry

/** The statuses of the last hour; those of the server's memory have nothing but the numbers it kept. */
export class History {
  samples = []; // {at: seconds, status}
  latest = null; // the last whole status
  window = KEPT; // seconds that lines show at most
  #steps = null;

  add(at, status) {
    const last = this.samples.at(-1);
    if (last && at === last.at) return; // a stream begins with what the one before said last
    // A new process counts anew.
    if (last && (status.uptime_s < last.status.uptime_s || at < last.at)) this.samples = [];
    this.samples.push({ at, status });
    this.latest = status;
    while (this.samples[0].at < at - KEPT) this.samples.shift();
    this.#thin(at - FINE);
    this.#steps = null;
  }

  /** Take over what the server kept (`GET /history`), as far as the page does not know it. */
  recall({ at, series }) {
    // No more of them than a line of that length shows.
    const bucket = (ms) => Math.floor(ms / 1000 / (KEPT / POINTS));
    const last = at.length - 1;
    const chosen = [...at.keys()].filter((i) => i === last || at[last] - at[i] < 1000 * RECENT || bucket(at[i]) !== bucket(at[i + 1]));
    const told = chosen.map((i) => ({ at: at[i] / 1000, status: Object.create(null) }));
    for (const { path, values } of series) {
      told.forEach(({ status }, i) => {
        const value = Array.isArray(values) ? values[chosen[i]] : values;
        if (value !== null) place(status, path, value);
      });
    }
    const begun = (sample) => sample.at - sample.status.uptime_s;
    const newest = told.at(-1);
    const known = this.samples.filter((sample) => !newest || Math.abs(begun(sample) - begun(newest)) < SAME);
    const isNew = ({ at: when }) => !known.some((sample) => Math.abs(sample.at - when) < COARSE);
    this.samples = [...told.filter(isNew), ...known].sort((one, other) => one.at - other.at);
    this.#steps = null;
  }

  /** Seconds that lines show. */
  get span() {
    const all = this.samples.length ? this.samples.at(-1).at - this.samples[0].at : 0;
    return Math.max(SHORTEST, Math.min(this.window, all));
  }

  /** [seconds ago, f(earlier status, later status, seconds between) or null] of the times that a line shows. */
  pairs(f) {
    const now = this.samples.at(-1)?.at;
    const { steps, stride } = (this.#steps ??= this.#chosen());
    return steps.slice(1).map(({ at, status }, i) => {
      const before = steps[i];
      const isGap = at - before.at > Math.max(GAP, 2.5 * stride);
      return [now - at, isGap ? null : f(before.status, status, at - before.at)];
    });
  }

  /** [seconds ago, what `gauge` was or null]. */
  values(gauge) {
    return this.pairs((_, status) => gauge(status) ?? null);
  }

  /** What `counter` grew by each second. Nothing is known where it shrank: a model was closed. */
  rates(counter) {
    return this.pairs((before, after, seconds) => {
      const grown = counter(after) - counter(before);
      return grown < 0 ? null : grown / seconds;
    });
  }

  /** What `counter` grew by over the last seconds, and how many those were; null where that is not known. */
  grown(counter, seconds) {
    const last = this.samples.at(-1);
    const first = this.samples.find(({ at }) => at >= last.at - seconds - 0.5);
    if (first === last) return null;
    const value = counter(last.status) - counter(first.status);
    return value < 0 ? null : { value, seconds: last.at - first.at };
  }

  /** Its rate now: over the last few seconds. */
  rate(counter) {
    const grown = this.grown(counter, 5);
    return grown && grown.value / grown.seconds;
  }

  /** The last status of each stride, at most POINTS of them; before those the very first, which the first one grew from. */
  #chosen() {
    const span = this.span;
    const stride = STRIDES.find((each) => span / each <= POINTS) ?? STRIDES.at(-1);
    const from = (this.samples.at(-1)?.at ?? 0) - span;
    const shown = this.samples.filter(({ at }) => at >= from - stride);
    const bucket = ({ at }) => Math.floor(at / stride);
    const steps = shown.filter((sample, i) => {
      return i === shown.length - 1 || sample === this.samples[0] || bucket(sample) !== bucket(shown[i + 1]);
    });
    return { steps, stride };
  }

  /** The one that is no longer fine goes, if the one before it is near. */
  #thin(fine) {
    let i = this.samples.length - 1;
    while (i > 1 && this.samples[i].at >= fine) i -= 1;
    if (i > 0 && this.samples[i].at < fine && this.samples[i].at - this.samples[i - 1].at < COARSE - 1) {
      this.samples.splice(i, 1);
    }
  }
}

/** Put a number where it stood in the status. What a path names comes from outside: nothing has a prototype. */
function place(status, path, value) {
  let at = status;
  path.slice(0, -1).forEach((key, depth) => {
    const field = depth === 1 ? LISTS[path[0]] : undefined;
    if (field) {
      let entry = at.find((each) => each[field] === key);
      if (!entry) at.push((entry = Object.assign(Object.create(null), { [field]: key })));
      at = entry;
    } else {
      at = at[key] ??= depth === 0 && LISTS[key] ? [] : Object.create(null);
    }
  });
  at[path.at(-1)] = value;
}
