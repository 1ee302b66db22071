"""Stories of the live page: a real browser looks at it while blocks come and go, and its server with them."""

import json
import re
import socket as sockets
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from browser_rig import Browser, browser, missing
from doubles import chain_of, wait_until
from http_rig import MODEL, ServedDaemon, ServedStatus, ServePages
from node_rig import free_port, node
from router_rig import RoutedReplicas, replicas, routed
from service_rig import Attach, load, store

from kvtier.service.node import served_tiers
from kvtier.service.node.status import MemoryUse
from kvtier.service.observe import live_page
from kvtier.tiers.errors import TierUnavailable
from kvtier.tiers.kinds import tier_captions

Json = dict[str, Any]

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&lt;b&gt; __proto__"
ROUTER: Json = {
    "tier_captions": tier_captions(),
    "uptime_s": 12.0,
    "block_size": 16,
    "fingerprint": "2adf752b523bf584" * 4,
    "models": ["tiny"],
    "replicas": [
        {
            "name": "127.0.0.1:8000",
            "url": "http://127.0.0.1:8000",
            "state": "up",
            "why": "",
            "load": 12.0,
            "in_flight": 2,
            "requests": 3,
            "errors": {},
            "events": {"state": "live", "seq": 41, "gaps": 0, "lost": 0, "age_s": 0.5},
            "node_events": {"state": "stale", "seq": None, "gaps": 2, "lost": 1, "age_s": None},
            "blocks": {"GPU": 40, "CPU": 80, "STORAGE": 0, "EXTERNAL": 7},
            "latency": {
                "ttft": {"num": 3, "p50_s": 0.25, "p95_s": 1.5},
                "itl": {"num": 90, "p50_s": 0.0123, "p95_s": 0.05},
            },
        },
        {
            "name": "127.0.0.1:8001",
            "url": "http://127.0.0.1:8001",
            "state": "down",
            "why": "no answer within 1 s",
            "load": 0.0,
            "in_flight": 0,
            "requests": 1,
            "errors": {"unreachable": 2},
            "events": None,
            "node_events": None,
            "blocks": {},
        },
    ],
    "decisions": [
        {
            "time": 1.0,
            "prompt_blocks": 20,
            "chosen": "127.0.0.1:8000",
            "reason": "prefix",
            "scores": [
                {"name": "127.0.0.1:8000", "cached": 15, "load": 12.0, "work": 18.5},
                {"name": "127.0.0.1:8001", "cached": 0, "load": 0.0, "work": None},
            ],
        }
    ],
    "requests": {"prefix": 3, "only": 1},
    "retries": {"unreachable": 2},
    "errors": {"bad_json": 1},
    "unknown_prompts": {},
    "tokens": {
        "prompt": 400,
        "promised": 240,
        "told_prompt": 400,
        "told_cached": 300,
        "told_tiers": {"L1": 200, "redis": 60},
    },
    "indexed_blocks": 127,
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if missing():
        pytest.skip(missing())
    with browser() as made:
        yield made


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status three times a second, where it is one of this process."""
    monkeypatch.setattr(live_page, "_PERIOD", 0.3)


@pytest.fixture
def page(chromium: Browser) -> Iterator[Browser]:
    """The browser, which must have nothing to complain of at the end."""
    yield chromium
    chromium.be()
    chromium.open("about:blank")
    # The page may have asked once more for something of a server that its story has stopped by now.
    gone = re.compile(r".*/(stream|history|memory) - Failed to load resource: net::ERR_CONNECTION_REFUSED")
    assert [complaint for complaint in chromium.complaints() if not gone.fullmatch(complaint)] == []


@pytest.fixture
def served(serve_pages: ServePages, home: Path, disk_dir: Path) -> ServedDaemon:
    return serve_pages(file={"path": str(disk_dir), "size": "4MiB"}, service={"socket": str(home / "s")})


def poisoned(value: Any) -> Any:
    """Every text in it, names of fields apart, in the hands of an attacker; counts by reason get such a reason."""
    if isinstance(value, dict):
        made = {name: poisoned(inner) for name, inner in value.items()}
        counts = value and all(isinstance(inner, int) for inner in value.values()) and "gaps" not in value
        return made | {HOSTILE: 5, "__proto__": 3} if counts and "slots" not in value else made
    if isinstance(value, list):
        return [poisoned(inner) for inner in value]
    return HOSTILE if isinstance(value, str) else value


def events(lines: Iterator[str]) -> Iterator[tuple[str, str, Json]]:
    """Kind, id and value of each event of a stream."""
    fields: dict[str, str] = {}
    for each in lines:
        name, _, value = each.partition(": ")
        if name:
            fields[name] = value
        elif "data" in fields:
            yield fields["event"], fields["id"], json.loads(fields.pop("data"))


def status_of(served: ServedStatus) -> int:
    """What a stream of it is answered with."""
    with served.watch() as answer:
        return answer.status_code


# what it shows


def test_blocks_come_and_are_found_while_somebody_looks(
    page: Browser, served: ServedDaemon, home: Path, disk_dir: Path, monkeypatch: pytest.MonkeyPatch, attach: Attach
) -> None:
    monkeypatch.setattr(served_tiers, "_SAME", 0.0)  # who asks in vain and then again is another
    page.open(f"http://{served.http}/")
    # Nobody is there: it says what to do, with the socket to use.
    page.wait_for("● ok", "No engine has attached yet", f"KVTIER_SERVICE__SOCKET={home / 's'}")
    # An engine comes: its model, empty.
    tiers, chain = attach(), chain_of(6)
    page.wait_for(MODEL, "1 client", "blocks of 4 tokens in 4 KiB")
    page.wait_for("Nobody has asked yet.", card="Lookups, by where found")
    page.wait_for("1 none has left yet", card="Clients")
    page.run("document.querySelector('.model').kept = true")
    # It asks in vain, stores, and finds.
    assert load(tiers, chain) == 0
    page.wait_for("nowhere 100 % 6", card="Lookups, by where found")
    page.wait_for("absent 6", card="Not served, by reason")
    store(tiers, chain)
    page.wait_for("host memory 9.4 % of 64 slots ready 6 · stored 6", "file 0.6 % of", "ready 6", card="Tiers")
    page.wait_for(f"{disk_dir}", "% of", "in use", card="Tiers")  # the disk, whoever fills it
    page.wait_for("file write 24.6 kB", card="Moved")
    assert load(tiers, chain) == 6
    page.wait_for("host memory 50.0 % 6", "nowhere 50.0 % 6", card="Lookups, by where found")
    page.wait_for("of 12 blocks", card="Found in the cache")
    page.wait_for("● closed ● closed", card="Breakers")
    page.wait_for("0 ✓ every block read was the one stored", card="Corrupted")
    # What was there is changed in place: what is selected stays selected.
    assert page.run("return document.querySelector('.model').kept") is True
    # The engine goes.
    tiers.close()
    page.wait_for("0 bye 1", card="Clients")


def test_what_is_wrong_is_said_in_words(page: Browser, served: ServedDaemon, attach: Attach) -> None:
    tiers = attach()
    store(tiers, chain_of(2))
    (namespace,) = served.daemon.call(served.daemon.namespaces)
    page.open(f"http://{served.http}/")
    page.wait_for("● closed", card="Breakers")
    namespace.hierarchy.ports[0].breakers["read"].trip()
    namespace.hierarchy.metrics.corrupted("file", 3)
    namespace.hierarchy.metrics.dropped("file", "queue_full", 1234)
    page.wait_for("▲ degraded", f"Left alone for now, its blocks are misses: file of {MODEL}, reads")
    page.wait_for("▲ open ● closed", card="Breakers")
    page.wait_for("▲ 3 blocks failed verification; none was served", card="Corrupted")
    page.wait_for("▲ corrupted 3", card="Tiers")
    page.wait_for("file: queue full 1,234", card="Not stored, by reason")


def test_a_daemon_without_a_lower_tier_says_how_to_have_one(
    page: Browser, serve_pages: ServePages, attach: Attach
) -> None:
    daemon = serve_pages(host={"size": 1 << 20})
    tiers = attach()
    page.open(f"http://{daemon.http}/")
    page.wait_for("No tier below host memory is configured: see [file], [peers], [redis], [objects].", card="Breakers")
    assert load(tiers, chain_of(2)) == 0
    page.wait_for("host memory 0 % 0", "nowhere 100 % 2", card="Lookups, by where found")
    tiers.close()
    page.open("about:blank")


def test_a_page_that_is_opened_late_shows_what_was_before(
    page: Browser, disk_dir: Path, monkeypatch: pytest.MonkeyPatch, serve_pages: ServePages, attach: Attach
) -> None:
    monkeypatch.setattr(live_page, "PERIOD", 0.2)
    daemon = serve_pages(host={"size": 1 << 20})
    tiers = attach()

    def found() -> list[int]:
        """Blocks found in L2 at each sample."""
        series = daemon.client.get("/history").json()["series"]
        values: Any = next((each["values"] for each in series if each["path"][-2:] == ["lookups", "l2"]), [])
        return values if isinstance(values, list) else [values]

    # Nobody looks while blocks are stored and found, and while nothing happens afterwards.
    store(tiers, chain_of(6))
    wait_until(lambda: 0 in found())
    load(tiers, chain_of(8))
    wait_until(lambda: found().count(6) > 30)  # six seconds: for the last five it may have its own
    page.open(f"http://{daemon.http}/")
    page.wait_for("host memory0/s", "nowhere0/s", card="Looked up, over time")
    # The line begins before the page was opened: what was found then is its highest point.
    chart = "const figure = document.querySelector('[data-chart$=\"looked up\"]');"
    wait_until(lambda: page.run(f"{chart} return Math.max(...figure.firstElementChild.spec.data[1]) > 0"))
    # The legend has the last numbers, or those that the pointer or the arrow keys choose.
    legend = f"{chart} return figure.querySelector('.u-legend').innerText"
    press = "figure.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft', bubbles: true}))"
    before = page.run(legend)
    page.run(f"{chart} for (let i = 0; i < 30; i += 1) {press}")
    wait_until(lambda: page.run(legend) != before)
    assert re.search(r"at\s*\d\d:\d\d:\d\d\s*host memory.*/s\s*nowhere.*/s", page.run(legend)), page.run(legend)
    # Who wants the last minutes alone says so.
    page.run("document.querySelector('#window button').click()")
    assert page.run("return document.querySelector('#window [aria-pressed=true]').innerText") == "5 min"
    page.run("localStorage.clear()")
    tiers.close()
    page.open("about:blank")


def test_what_fills_memory_and_what_it_saves(
    page: Browser, disk_dir: Path, monkeypatch: pytest.MonkeyPatch, serve_pages: ServePages, attach: Attach
) -> None:
    monkeypatch.setattr(MemoryUse.__init__, "__defaults__", (0.1,))  # seconds that a look is good for
    file = {"path": str(disk_dir), "size": "4MiB"}
    daemon = serve_pages(host={"size": 1 << 20}, file=file, service={"gpu_hour": 3600})
    tiers, chain = attach(), chain_of(6)
    page.open(f"http://{daemon.http}/", speed=20)
    page.wait_for("Nothing is stored yet.", card="What fills memory, by tenant")
    page.wait_for("No request has loaded a block yet.", card="Saved")
    store(tiers, chain)
    assert load(tiers, chain) == 6
    # Nobody knows what 24 tokens cost, until an engine says it or the operator assumes it.
    page.wait_for("tokens whose time is not known 24", "Assume it: [service] prefill_rate.", card="Saved")
    tiers.computed(100, 1.0)
    load(tiers, chain)
    saved = (
        "tokens loaded instead of computed 48",
        "saved 0.2 s",
        "at 3,600 an hour of GPUs 0.24",
        "a million tokens: loaded 0",
        "a million tokens: computed 10,000",
        "100 tokens a second (measured)",
    )
    page.wait_for(*saved, card="Saved")
    page.wait_for("host memory 6 blocks · 24 KiB", "file 6 blocks", card="What fills memory, by tenant")
    prefix = ("24 KiB 100 %", "Names are for operators: these are labels.")
    page.wait_for(*prefix, card="Prefixes that most blocks begin with")
    tiers.close()
    page.open("about:blank")


def test_a_model_has_its_name_and_a_server_its_memory(page: Browser, served: ServedDaemon, attach: Attach) -> None:
    tiers = attach()
    status = served.client.get("/status").json()
    [model], [client] = status["models"], status["clients"]
    tiers.close()
    assert (model["name"], client["model"]) == (None, model["model"])  # nobody has said
    model["name"] = "meta/llama"
    full, unbounded = {"place": "r:6379", "used": 97 << 20, "limit": 100 << 20}, {"place": "s:6379", "used": 5 << 20}
    model["tiers"]["redis"] = {**model["tiers"]["file"], "slots": {}, "room": [full, {**unbounded, "limit": None}]}
    tenants = [{"tenant": "ab", "cache_salt": "team", "quota_bytes": 3 << 20, "blocks": 1, "bytes": 4096}]
    host = {"blocks": 1, "bytes": 4096, "num_tenants": 1, "tenants": tenants, "prefixes": []}
    memory = {"named": True, "models": [{"model": model["model"], "tiers": {"l2": host}}]}
    with ServedStatus(lambda: status, memory=memory) as told:
        page.open(told.url)
        page.wait_for(f"Model meta/llama {MODEL}", f"\tmeta/llama {MODEL}\t")  # the latter in the table of clients
        page.wait_for("r:6379 ▲ 97.0 % of 100 MiB in use", "s:6379 5 MiB in use, no bound is set", card="Tiers")
        page.wait_for("team 3 MiB 4 KiB 100 %", card="What fills memory, by tenant")


def test_why_blocks_were_missing_and_how_long_they_live(page: Browser, served: ServedDaemon, attach: Attach) -> None:
    tiers = attach()
    status = served.client.get("/status").json()
    [model] = status["models"]
    tiers.close()
    causes = "Missing, by what became of the block"
    with ServedStatus(lambda: status) as told:
        page.open(told.url)
        # Nothing has happened; then blocks are gone, and come back too late.
        page.wait_for("No block was missing yet.", card=causes)
        model["ages"] = {"l2": [0, 0, 0]}
        page.wait_for("Nothing has been evicted yet.", card="How long blocks live: host memory")
        model["absent"] = {"never_seen": {"": 30}, "evicted": {"l2": 60, "file": 10}}
        page.wait_for("evicted to make room host memory 60.0 % 60", "evicted to make room file 10.0 % 10", card=causes)
        page.wait_for("never seen here, or too long ago – 30.0 % 30", card=causes)
        model["ages"]["l2"] = [0, 0, 0, 10, 10, 0]  # below 1 s, 2 s, 4 s, 8 s, 16 s, and any
        alone = ("Half of the evicted blocks lived 8 s or less in host memory.", "No request is known to have returned")
        page.wait_for(*alone, card="How long blocks live: host memory")
        model["return_gaps"] = {"bounds": [2, 20, 200], "counts": [5, 10, 4, 1]}
        compared = (
            "Half of the returns come within 11 s.",
            "41.7 % of the returns come within that time: more memory would help much.",
        )
        page.wait_for(*compared, card="How long blocks live: host memory")
        model["return_gaps"]["counts"] = [100, 5, 0, 0]
        page.wait_for("more memory would help little.", card="How long blocks live: host memory")


def test_the_router_shows_who_is_there_and_why_a_request_went_where_it_did(page: Browser) -> None:
    with ServedStatus(lambda: ROUTER) as router:
        page.open(router.url)
        page.wait_for("▲ 1 of 2 replicas", "127.0.0.1:8001 is down: no answer within 1 s")
        page.wait_for(
            "127.0.0.1:8000 ● up 12 3 0 ● live engine · no. 41 · 0 s ago ▲ stale node · 2 gaps", card="Replicas"
        )
        page.wait_for("L1 device 40", "Redis 7", "127", card="Replicas")
        page.wait_for("127.0.0.1:8001 ✕ down 0 1 ▲ 2 unreachable 2 none", card="Replicas")
        decision = "20 blocks 127.0.0.1:8000 prefix holds more of the prompt than any other"
        decisions = "Last decisions, the newest first; in blocks, the least work in all wins"
        page.wait_for(decision, "✓ 15 held, 12 to do, 18.5 in all", "can take none", card=decisions)
        page.wait_for("blocks of 16 tokens of model tiny 2adf752b523bf584")
        ttft, itl = (
            "Time to the first token: the median of each replica",
            "Between two tokens: the median of each replica",
        )
        page.wait_for("127.0.0.1:8000 250 ms 1.5 s 3", card=ttft)
        page.wait_for("127.0.0.1:8000 12.3 ms 50 ms 90", card=itl)
        page.wait_for("75.0 % of 400 tokens", card="Prompt found in a cache")
        where = "Tokens of prompts, by where their KV was found"
        page.wait_for("L1 device 50.0 % 200", "Redis 15.0 % 60", "a replica's cache 10.0 % 40", card=where)
        page.wait_for("nowhere: computed 25.0 % 100", card=where)
        page.wait_for("prefix 3", "only 1", card="Decisions, by reason")
        page.wait_for("unreachable 2", card="Retries, by what went wrong")
        page.wait_for("bad json 1", card="Errors of its own, by reason")


def test_a_router_at_work(page: Browser) -> None:
    with replicas(2) as (one, other), routed(one.url, other.url, prompt_price=0.5) as router:
        address = f"http://{router.server.address}/"
        page.open(address)
        page.wait_for("● ok", "No request has come yet. Send one:", f"curl {address}v1/completions")
        assert router.complete().status_code == 200
        page.wait_for("1 in all", card="Requests")
        page.wait_for("unsure 1", card="Decisions, by reason")
        page.wait_for("80.0 % of 40 tokens", card="Prompt found in a cache")
        page.wait_for("0.1 a million prompt tokens; 0.5 if all were computed", card="Price")
        assert "0.1 a million prompt tokens, 0.5 computed" in router.client.get("/summary").text
        found = ("L1 device 60.0 % 24", "Redis 20.0 % 8", "nowhere: computed 20.0 % 8")
        page.wait_for(*found, card="Tokens of prompts, by where their KV was found")
        other.kill()
        page.wait_for("▲ 1 of 2 replicas", f"{other.name} is down")
        # What the other stories take for a router's status is what it says.
        status = router.status()
        assert ROUTER.keys() <= status.keys()
        assert ROUTER["replicas"][0].keys() <= status["replicas"][0].keys()
        assert ROUTER["decisions"][0].keys() <= status["decisions"][0].keys()
        assert ROUTER["tokens"].keys() <= status["tokens"].keys()
        page.open("about:blank")


def test_names_from_outside_are_text(page: Browser, served: ServedDaemon, attach: Attach) -> None:
    tiers, chain = attach(), chain_of(4)
    store(tiers, chain)
    load(tiers, chain)
    status = served.client.get("/status").json()
    tiers.close()
    for told in (status, ROUTER):
        with ServedStatus(lambda told=told: poisoned(told)) as attacker:  # type: ignore[misc]
            page.open(attacker.url)
            page.wait_for(HOSTILE)
            assert page.text.count(HOSTILE) > 5
            assert page.run("return document.querySelectorAll('img, script:not([src]), main a').length") == 0
            assert "owned" not in page.driver.title.partition("·")[0]
            assert page.run("return ({}).polluted") is None


# when there is nothing to show


def test_a_daemon_that_is_killed_and_comes_back(chromium: Browser) -> None:
    with node() as daemon:
        chromium.open(f"{daemon.http}/", speed=2)
        chromium.wait_for("● ok", f"pid {daemon.pid},")
        daemon.kill()
        chromium.wait_for("✕ connection lost", "Is it running? Trying again. What stands below is from before.")
        assert "connection lost" in chromium.driver.title
        daemon.start()
        chromium.wait_for("● ok", f"pid {daemon.pid},")
        assert "No word since" not in chromium.text
        chromium.open("about:blank")
    # The browser notes that nobody answered; nothing else.
    assert all("net::ERR_" in complaint for complaint in chromium.complaints())


def test_a_status_that_cannot_be_had_is_said(page: Browser) -> None:
    def stuck() -> Json:
        raise TierUnavailable("the daemon's loop has not answered within 5 s")

    with ServedStatus(stuck) as served:
        page.open(served.url)
        page.wait_for("▲ no answer", "the daemon's loop has not answered within 5 s")


def test_too_many_pages_are_told_so_and_wait(chromium: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "_MAX_WATCHERS", 1)
    with ServedStatus(lambda: ROUTER) as served:
        with served.watch() as first:
            lines = first.iter_lines()
            assert next(events(lines))[0] == "status"
            refused = httpx2.get(f"{served.url}stream")
            assert refused.status_code == 503
            assert refused.json() == {"error": "1 pages are watching already; close one, or ask for /status"}
            chromium.open(served.url, speed=5)
            chromium.wait_for("✕ connection lost", "The stream is refused: too many pages may be watching.")
        chromium.wait_for("▲ 1 of 2 replicas")  # its turn
        chromium.open("about:blank")
    assert all("503" in complaint for complaint in chromium.complaints())


def test_a_page_in_the_background_asks_for_nothing(page: Browser) -> None:
    hide = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
    hide += "document.dispatchEvent(new Event('visibilitychange'))"
    with ServedStatus(lambda: ROUTER) as served:
        page.open(served.url)
        page.wait_for("▲ 1 of 2 replicas")
        page.run(hide, True)
        wait_until(lambda: not served.is_asked())
        page.run(hide, False)
        wait_until(served.is_asked)
        assert "connection lost" not in page.text


# for everybody's eyes


def test_it_can_be_read_in_both_colour_schemes(page: Browser) -> None:
    with ServedStatus(lambda: ROUTER) as served:
        for scheme in ("light", "dark"):
            page.be(scheme=scheme)
            page.open(served.url)
            page.wait_for("▲ 1 of 2 replicas", "prefix")
            red = int(page.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"))
            assert red > 200 if scheme == "light" else red < 50
            least, text = page.contrasts()[0]
            assert least >= 4.5, (least, text)  # WCAG AA


def test_screen_readers_and_narrow_screens_have_it_too(page: Browser, served: ServedDaemon, attach: Attach) -> None:
    tiers, chain = attach(), chain_of(4)
    store(tiers, chain)
    load(tiers, chain)
    page.be(width=360)
    for url in (f"http://{served.http}/", None):
        with ServedStatus(lambda: ROUTER) as router:
            page.open(url or router.url)
            page.wait_for("held" if url is None else "blocks of 4 tokens")
            assert page.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            # A table that is too wide scrolls in its box. Pictures say in words what they show, tables name their
            # columns, and what changes is announced.
            wide = "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth)"
            assert page.run(f"return {wide}.length") > 0
            assert page.run(f"return {wide}.every((e) => getComputedStyle(e).overflowX === 'auto')")
            assert page.run("return document.querySelectorAll('canvas').length") > 1
            assert page.run("return document.querySelectorAll('[data-chart]:not([aria-label])').length") == 0
            assert page.run("return document.querySelectorAll('svg:not([role=img][aria-label])').length") == 0
            columns = (
                "return [...document.querySelectorAll('.scroll > table')].every((t) => t.tHead.rows[0].cells.length)"
            )
            assert page.run(columns)
            assert page.run("return document.querySelectorAll('h1').length") == 1
            assert page.run("return document.getElementById('state').role") == "status"
            assert page.run("return document.getElementById('trouble').role") == "alert"


# over HTTP


def test_its_files_run_nothing_from_elsewhere(served: ServedDaemon) -> None:
    scripts = ("charts", "daemon", "dashboard", "draw", "memory", "past", "router", "saved", "tiers", "why")
    for path in ("/", "/dashboard.css", "/uplot.css", "/uplot.js", *(f"/{name}.js" for name in scripts)):
        answer = served.client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        text = answer.text.removeprefix("/*! https://github.com/leeoniya/uPlot (v1.6.32) */")  # where it comes from
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert "https://" not in text
        for markup in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "DOMParser"):
            assert markup not in answer.text


def test_however_many_look_it_is_asked_once_and_nobody_is_not_asked_for() -> None:
    with ServedStatus(lambda: ROUTER) as served:
        with served.watch() as one, served.watch() as two, served.watch() as three:
            streams = [events(each.iter_lines()) for each in (one, two, three)]
            looks = sorted({int(next(stream)[1]) for _ in range(3) for stream in streams})
            assert len(looks) >= 3
            assert all(later - earlier >= 300 for earlier, later in pairwise(looks))  # ms: one look serves all three
        wait_until(lambda: not served.is_asked())
        # Not one more, from now on.
        assert not served.is_asked()


def test_a_reader_who_takes_nothing_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "_PERIOD", 0.01)
    monkeypatch.setattr(live_page, "_MAX_WATCHERS", 1)
    monkeypatch.setattr(live_page, "_LIFE", 1.0)
    monkeypatch.setattr(live_page, "_PATIENCE", 0.5)
    with ServedStatus(lambda: {"much": "x" * 1_000_000}) as served:
        host, _, port = served.url.removeprefix("http://").rstrip("/").rpartition(":")
        with sockets.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"  # it has the one place, before anybody else asks for it
            wait_until(lambda: status_of(served) == 503)
            wait_until(lambda: status_of(served) == 200)


def test_a_server_that_stops_ends_its_streams(home: Path) -> None:
    daemon = ServedDaemon(home / "s", host={"size": 1 << 20})
    router = RoutedReplicas(f"http://127.0.0.1:{free_port()}")
    for address, close in ((daemon.http, daemon.close), (router.server.address, router.close)):
        with httpx2.stream("GET", f"http://{address}/stream", timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(events(lines))[0] == "status"
            close()
            list(lines)  # its end comes, and is no error
