// The page's life: one stream of statuses, the hour before it, and what to say while there is none.

import { drawCharts } from "./charts.js";
import * as daemon from "./daemon.js";
import { duration, h, morph } from "./draw.js";
import { History } from "./past.js";
import * as router from "./router.js";

const WINDOWS = [[300, "5 min"], [3600, "1 h"]]; // seconds that lines show at most
const KEEPS = "kvtier.window"; // where the browser keeps which
const BROKEN = 3000; // milliseconds without a message after the connection broke
const SILENT = 8000; // the same while the connection stands: a server that hangs says so after five seconds
const AGAIN = 5000; // milliseconds until a stream that was refused is asked for again
const ASKS = 30000; // milliseconds that the past hour may take to come

const history = new History();
const ids = ["about", "state", "trouble", "panels", "since", "window"];
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
  remember();
}

/** Take over what the server remembers from before this page, or from while nobody saw it. It does without, too. */
async function remember() {
  try {
    const answer = await fetch("history", { signal: AbortSignal.timeout(ASKS) });
    if (!answer.ok) return;
    history.recall(await answer.json());
    if (!document.hidden && history.latest) show();
  } catch {
    // it was stopped, or is an older one: the lines begin now
  }
}

function alive() {
  lastMessage = performance.now();
  broken = false;
  lost = null;
  document.body.classList.remove("stale");
}

function show() {
  const status = history.latest;
  const view = "replicas" in status ? router : daemon;
  const { text, kind, trouble } = view.stateOf(status);
  say(text, kind, trouble);
  place.about.textContent = view.aboutOf(status);
  place.since.textContent = `Lines show the last ${duration(history.span)}.`;
  morph(place.window, windows());
  document.title = `kvtier · ${text}`;
  morph(place.panels, h("main", { id: "panels" }, view.panelsOf(status, history)));
  drawCharts();
}

/** Which time the lines show. */
function windows() {
  const buttons = WINDOWS.map(([seconds, text]) => {
    const chosen = history.window === seconds;
    return h("button", { type: "button", value: seconds, "aria-pressed": String(chosen) }, text);
  });
  return h("p", { id: "window", role: "group", "aria-label": "time that lines show" }, buttons);
}

place.window.addEventListener("click", ({ target }) => {
  if (!target.value) return;
  history.window = Number(target.value);
  localStorage.setItem(KEEPS, target.value);
  show();
});

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
  const before = history.latest ? " What stands below is from before." : "";
  say("✕ connection lost", "bad", `No word since ${lost.toLocaleTimeString()}. ${why} Trying again.${before}`);
  document.title = "kvtier · connection lost";
  document.body.classList.add("stale");
}

const kept = Number(localStorage.getItem(KEEPS));
if (WINDOWS.some(([seconds]) => seconds === kept)) history.window = kept;

// A page nobody sees costs the server nothing.
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  source?.close();
  if (!document.hidden) begin();
});
setInterval(watchSilence, 500);
if (!document.hidden) begin();
