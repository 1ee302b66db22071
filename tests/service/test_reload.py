"""SIGHUP: a server takes what may change of its file, names what takes a restart, and refuses a wrong file whole."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from doubles import SLOT_BYTES, chain_of
from doubles import wait_until as until
from router_rig import PATIENCE, RouteProcess, ToldReplica, replicas
from service_rig import DaemonProcess, attach, store

from kvtier.tiers.config.config import Config, is_reloadable, options
from kvtier.tiers.errors import ConfigError

MODEL = b"f" * 32  # of `chain_of`
Said = Callable[[str], bool]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvtier.toml"


def get(url: str, token: str | None = None) -> httpx2.Response:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return httpx2.get(url, headers=headers, timeout=PATIENCE, trust_env=False)


def figures(url: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in get(f"{url}/metrics").text.splitlines() if line[:1] != "#"]
    return {name: float(value) for name, _, value in lines if "reloads" in name or "wanting" in name}


def test_a_daemon_takes_what_may_change_and_names_the_rest(home: Path, file: Path) -> None:
    file.write_text('[service]\ntoken = "first"\n[host]\nsize = "4MiB"\n')
    daemon = DaemonProcess(home / "s", config=str(file))
    url, said = f"http://{daemon.http}", log_of(daemon.lines)
    with closing(attach(home / "s", fingerprint=MODEL)) as tiers:
        assert store(tiers, chain_of(8, first_token=100, salt="alice")) == 8
        # a quota, a price, a token and a breaker are taken; memory takes a restart
        file.write_text(
            '[service]\ntoken = "second"\ngpu_hour = 2.5\nallowed_hosts = ["cache.example"]\n'
            f"default_quota = {4 * SLOT_BYTES}\n[breaker]\nfailures = 1\n"
            '[host]\nsize = "8MiB"\n[log]\nlevel = "debug"\n'
        )
        os.kill(daemon.process.pid, signal.SIGHUP)
        until(lambda: said("configuration reloaded"))
        assert said(
            "configuration reloaded: [service] token, [service] allowed_hosts, [service] default_quota, "
            "[service] gpu_hour, [breaker] failures, [log] level; [host] size: changed, takes a restart"
        )
        assert get(f"{url}/admin/quotas", "first").status_code == 401
        assert get(f"{url}/admin/quotas", "second").json() == {"quotas": []}
        status: Any = get(f"{url}/status").json()
        assert (status["gpu_hour"], status["budget"]["bytes"], status["status"]) == (2.5, 4 << 20, "ok")
        named = httpx2.get(f"{url}/status", headers={"host": "cache.example"}, timeout=PATIENCE, trust_env=False)
        assert named.status_code == 200
        # alice has what she stored before; what she stores from now on is bounded
        assert store(tiers, chain_of(8, first_token=900, salt="alice")) == 4
        assert get(f"{url}/status").json()["models"][0]["dropped"]["l2"] == {"quota": 4}

        # a wrong file changes nothing: one line, a metric, the health
        file.write_text('[service]\ntoken = "third"\ndefault_quota = "many"\n')
        os.kill(daemon.process.pid, signal.SIGHUP)
        why = '[service] default_quota "many": not a size; write a number of bytes, or one with a unit, as in "4GiB"'
        until(lambda: said(f"configuration not reloaded, the one in force stays: {why}"))
        assert get(f"{url}/admin/quotas", "second").status_code == 200
        ready: Any = get(f"{url}/readyz").json()
        assert (ready["ready"], ready["wanting"]) == (True, [why])
        assert get(f"{url}/status").json()["wanting"] == [{"part": "configuration", "why": why}]
        assert figures(url) == {
            'kvtier_reloads_total{outcome="done"}': 1,
            'kvtier_reloads_total{outcome="refused"}': 1,
            'kvtier_wanting{part="configuration"}': 1,
        }

        # without a token it makes its own again; all is well
        file.write_text('[host]\nsize = "4MiB"\n')
        os.kill(daemon.process.pid, signal.SIGHUP)
        until(lambda: get(f"{url}/status").json()["wanting"] == [])
        assert httpx2.get(f"{url}/admin/quotas", headers=daemon.operator, trust_env=False).status_code == 200
        assert store(tiers, chain_of(8, first_token=1800, salt="alice")) == 8  # and no quota
    assert daemon.end(signal.SIGTERM) == 0


def log_of(lines: list[str]) -> Said:
    """Whether one of the lines has a text at its end, or in it."""
    return lambda text: any(text in line for line in lines)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[ToldReplica]]:
    with replicas(2) as made:
        yield made


def test_a_router_takes_another_list_of_replicas_and_another_key(pair: list[ToldReplica], file: Path) -> None:
    one, other = pair
    file.write_text(f'[router]\ntoken = "first"\nreplicas = ["{one.url}"]\n')
    with closing(RouteProcess(file)) as router:
        assert router.complete("first").status_code == 200
        file.write_text(
            f'[router]\ntoken = "second"\nreplicas = ["{other.url}"]\nreplica_token = "key"\n'
            "probe_interval = '50ms'\nmax_requests = 7\nmax_blocks = 1000\n"
        )
        router.hang_up()
        until(lambda: router.said("configuration reloaded"))
        taken = "token, [router] replicas, [router] replica_token, [router] max_requests, [router] probe_interval"
        assert router.said(f"reloaded: [router] {taken}; [router] max_blocks: changed, takes a restart")
        before = len(other.seen)
        until(lambda: [each["state"] for each in get(f"{router.url}/status").json()["replicas"]] == ["up"])
        assert (router.complete("first").status_code, router.complete("second").status_code) == (401, 200)
        assert len(other.seen) == before + 1
        # a wrong list changes nothing
        file.write_text(f'[router]\ntoken = "second"\nreplicas = ["{one.url}", "localhost"]\n')
        router.hang_up()
        until(lambda: figures(router.url).get('kvtier_reloads_total{outcome="refused"}') == 1)
        assert router.said('the one in force stays: [router] replicas "localhost": not http://HOST:PORT')
        assert router.complete("second").status_code == 200
        assert len(other.seen) == before + 2
        [wanting] = get(f"{router.url}/status").json()["wanting"]
        assert wanting["part"] == "configuration"
        assert get(f"{router.url}/readyz").json() == {"ready": True, "replicas_up": 1, "wanting": [wanting["why"]]}


def test_all_processes_of_a_router_take_it_and_so_does_the_next(pair: list[ToldReplica], file: Path) -> None:
    one, other = pair
    file.write_text(f'[router]\ntoken = "first"\nreplicas = ["{one.url}"]\n')
    with closing(RouteProcess(file, "--processes", "2")) as router:
        file.write_text(f'[router]\ntoken = "second"\nreplicas = ["{other.url}"]\n')
        router.hang_up()
        until(lambda: router.said("configuration reloaded: [router] token, [router] replicas"))

        def all_have(token: str) -> bool:  # new connections reach any of them
            return all(router.complete(token).status_code == 200 for _ in range(12))

        until(lambda: all_have("second"))
        assert router.complete("first").status_code == 401
        until(lambda: figures(router.url)['kvtier_reloads_total{outcome="done"}'] == 1)
        # one that dies begins again with what is in force, not with what the file says meanwhile
        file.write_text("[router]\ntoken = 3\n")
        router.hang_up()
        until(lambda: router.said("the one in force stays: [router] token (not shown): not a text"))
        children = Path(f"/proc/{router.process.pid}/task/{router.process.pid}/children")
        killed = int(children.read_text().split()[0])
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(pids := children.read_text().split()) == 2 and str(killed) not in pids)
        until(lambda: all_have("second"))
        until(lambda: all(figures(router.url).get('kvtier_wanting{part="configuration"}') == 1 for _ in range(6)))
        assert sum("configuration" in line for line in router.log.read_text().splitlines()) == 2  # the parent's


@pytest.mark.slow
def test_an_engine_takes_another_key(model: Path, file: Path) -> None:
    from server_rig import ServerProcess, client  # takes torch along

    file.write_text('[server]\ntoken = "first"\n')
    server = ServerProcess(model, config=str(file))
    said = log_of(server.lines)
    file.write_text('[server]\ntoken = "second"\nrequest_timeout = "60s"\nmax_waiting = 3\n[breaker]\nfailures = 2\n')
    os.kill(server.process.pid, signal.SIGHUP)
    until(lambda: said("configuration reloaded"))
    taken = "[server] token, [server] request_timeout, [breaker] failures"
    assert said(f"configuration reloaded: {taken}; [server] max_waiting: changed, takes a restart")
    with client(server.url, "second") as second:
        answer = second.completions.create(model="tiny", prompt=[5] * 40, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2
    assert httpx2.get(f"{server.url}/v1/models", headers={"authorization": "Bearer first"}).status_code == 401
    file.unlink()  # a file that has gone is as wrong as any
    os.kill(server.process.pid, signal.SIGHUP)
    why = "No such file or directory; name a TOML file that can be read"
    until(lambda: said(why))
    ready = get(f"{server.url}/readyz").json()
    assert (ready["ready"], [each.endswith(why) for each in ready["wanting"]]) == (True, [True])
    assert figures(server.url)['kvtier_reloads_total{outcome="refused"}'] == 1
    assert server.end(signal.SIGTERM) == 0


def test_a_merge_that_does_not_fit_is_refused() -> None:
    """Reloadable options may belong with ones that are not: what would be in force is checked, too."""
    before = Config.load(service={"http": "0.0.0.0:9400", "allow_remote": True, "token": "a token"})
    given = Config.load(service={"http": "127.0.0.1:9400"})  # alone it is right: no token is needed there
    with pytest.raises(
        ConfigError, match=r'^\[service\] http "0\.0\.0\.0:9400": other machines reach it; set a token$'
    ):
        before.reloaded(given)
    # each option is taken or left, as it is marked
    given = Config.load(service={"http": "127.0.0.1:9500", "allow_remote": True, "token": "other", "gpu_hour": 3})
    merged = before.reloaded(given)
    assert (merged.service.http, merged.service.gpu_hour) == ("0.0.0.0:9400", 3)
    assert before.changes(given) == [
        ("service", "http", False),
        ("service", "token", True),
        ("service", "gpu_hour", True),
    ]
    # what differs from the defaults survives the merge
    full = Config.load(l1={"num_blocks": 4}, redis={"ttl": "2d", "url": "redis://u:p@h:1"}, router={"drain": "5s"})
    assert full.reloaded(full) == full
    assert {section for section, _, field in options() if is_reloadable(field)} == {
        "service", "server", "router", "breaker", "log",
    }  # fmt: skip
