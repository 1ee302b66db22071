// The page's life: one stream of statuses, their history, and what to say while there is none.

import * as daemon from "./daemon.js";
import { duration, h, morph } from "./draw.js";
import * as router from "./router.js";

const KEPT = 300; // seconds of history
const SHORTEST = 30; // seconds a line shows at least
const BROKEN = 3000; // milliseconds without a message after the connection broke
const SILENT = 8000; // the same while the connection stands: a server that hangs says so after five seconds
const AGAIN = 5000; // milliseconds until a stream that was refused is asked for again
const GAP = 5; // seconds between two statuses that are no neighbours

/** The statuses of the last minutes, and rates of what only grows in them. */
class History {
  samples = []; // {at: seconds, status}

  add(at, status) {
    const last = this.samples.at(-1);
    if (last && at === last.at) return; // a stream begins with what the one before said last
    // A new process counts anew.
    if (last && (status.uptime_s < last.status.uptime_s || at < last.at)) this.samples = [];
    this.samples.push({ at, status });
    while (this.samples[0].at < at - KEPT) this.samples.shift();
  }

  /** Seconds that lines show. */
  get span() {
    return Math.max(SHORTEST, this.samples.length ? this.samples.at(-1).at - this.samples[0].at : 0);
  }

  /** [seconds ago, f(earlier status, later status, seconds between) or null], a pair of neighbours each. */
  pairs(f) {
    const now = this.samples.at(-1)?.at;
    return this.samples.slice(1).map(({ at, status }, i) => {
      const before = this.samples[i];
      return [now - at, at - before.at > GAP ? null : f(before.status, status, at - before.at)];
    });
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
}

const history = new History();
const ids = ["about", "state", "trouble", "panels", "since"];
const place = Object.fromEntries(ids.map((id) => [id, document.getElementById(id)]));
let source = null;
let lastMessage = 0; // when the stream said something last, by performance.now()
let broken = false; // whether the connection is
let lost = null; // since when nothing came, as a Date
let timer = 0;

function connect() {
  clearTimeout(timer);
  source?.close();
  source = new EventSource("stream");
  source.addEventListener("status", (event) => {
    history.add(Number(event.lastEventId) / 1000, JSON.parse(event.data));
    alive();
    if (!document.hidden) show();
  });
  source.addEventListener("trouble", (event) => {
    alive();
    say("▲ no answer", "bad", JSON.parse(event.data).error);
  });
  source.addEventListener("error", () => {
    broken = true;
    if (source.readyState === EventSource.CLOSED) timer = setTimeout(connect, AGAIN); // refused: no browser asks again
  });
}

function begin() {
  lastMessage = performance.now();
  connect();
}

function alive() {
  lastMessage = performance.now();
  broken = false;
  lost = null;
  document.body.classList.remove("stale");
}

function show() {
  const { status } = history.samples.at(-1);
  const view = "replicas" in status ? router : daemon;
  const { text, kind, trouble } = view.stateOf(status);
  say(text, kind, trouble);
  place.about.textContent = view.aboutOf(status);
  place.since.textContent = `Lines show the last ${duration(history.span)}, since this page was opened at most.`;
  document.title = `kvtier · ${text}`;
  morph(place.panels, h("main", { id: "panels" }, view.panelsOf(status, history)));
}

function say(text, kind, trouble) {
  morph(place.state, h("p", { id: "state", role: "status", class: `badge ${kind}` }, text));
  if (place.trouble.textContent !== trouble) place.trouble.textContent = trouble; // what is the same is not said twice
  place.trouble.hidden = !trouble;
}

function watchSilence() {
  if (document.hidden || performance.now() - lastMessage < (broken ? BROKEN : SILENT)) return;
  lost ??= new Date();
  const refused = source.readyState === EventSource.CLOSED;
  const why = refused ? "The stream is refused: too many pages may be watching." : "Is it running?";
  const before = history.samples.length ? " What stands below is from before." : "";
  say("✕ connection lost", "bad", `No word since ${lost.toLocaleTimeString()}. ${why} Trying again.${before}`);
  document.title = "kvtier · connection lost";
  document.body.classList.add("stale");
}

// A page nobody sees costs the server nothing.
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  source?.close();
  if (!document.hidden) begin();
});
setInterval(watchSilence, 500);
if (!document.hidden) begin();
