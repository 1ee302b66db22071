"""Which replicas there are and how they are reached: a file, the DNS, TLS; and how late one may be."""

import json
import logging
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from command_rig import kvtier
from extent import brief
from node_rig import free_port
from router_rig import (
    MODEL,
    PATIENCE,
    RawReplica,
    RoutedReplicas,
    RouteProcess,
    ToldReplica,
    page,
    replicas,
    routed,
    until,
)

from kvtier.service.router import fleet as router_fleet
from kvtier.service.router import replica_list
from kvtier.service.router.replica_list import ReplicaSpec
from kvtier.tiers.errors import ConfigError


def states(router: RoutedReplicas) -> dict[str, str]:
    return {each["name"]: each["state"] for each in router.status()["replicas"]}


# --- how late one may be ---------------------------------------------------------------------------------------------


def late(router: RoutedReplicas, replica: RawReplica, times: int) -> None:
    """Wait until so many more looks have begun; all before the last of them were too late."""
    before = replica.asked["/readyz"]
    until(lambda: replica.asked["/readyz"] >= before + times)


def test_one_late_look_takes_no_replica_down_and_several_do() -> None:
    replica = RawReplica(lambda path, headers: page("{}"))
    try:
        with routed(f"http://{replica.name}", probe_timeout="300ms", probe_failures=100) as router:
            until(lambda: states(router) == {replica.name: "up"})
            replica.hangs["/readyz"] = threading.Event()
            late(router, replica, 4)
            assert states(router) == {replica.name: "up"}
            assert router.complete().status_code == 200  # it is busy, and does what it is asked
            replica.hangs.pop("/readyz").set()
        with routed(f"http://{replica.name}", probe_timeout="1s") as router:
            until(lambda: states(router) == {replica.name: "up"})
            replica.hangs["/readyz"] = threading.Event()
            until(lambda: states(router) == {replica.name: "down"})
            assert router.status()["replicas"][0]["why"] == "no answer within 1 s"
            replica.hangs.pop("/readyz").set()
            until(lambda: states(router) == {replica.name: "up"})
            # one that was late twice, and then was not, begins anew
            assert router.complete().status_code == 200
    finally:
        replica.close()


def test_replicas_that_hang_at_the_start_keep_no_router_from_answering() -> None:
    hanging = [RawReplica(lambda path, headers: page("{}")) for _ in range(3)]
    for each in hanging:
        each.hangs["/readyz"] = threading.Event()
    try:
        with (
            replicas(1) as (one,),
            routed(*(f"http://{each.name}" for each in hanging), one.url, probe_timeout="1h") as router,
        ):
            until(lambda: states(router)[one.name] == "up")
            assert router.complete().headers["x-kvtier-replica"] == one.name
            for each in hanging:
                each.hangs.pop("/readyz").set()
            until(lambda: set(states(router).values()) == {"up"})
    finally:
        for each in hanging:
            each.close()


def test_a_refused_connection_is_news_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with replicas(1) as (one,), routed(one.url, probe_failures=100, probe_timeout="20s") as router:
        one.kill()
        until(lambda: states(router) == {one.name: "down"})


# --- TLS -------------------------------------------------------------------------------------------------------------


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an authority and certificates it has signed: for 127.0.0.1, and for somebody else."""
    home = tmp_path_factory.mktemp("tls")
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    openssl(*new, "-subj", "/CN=authority", "-keyout", home / "ca.key", "-out", home / "ca.pem")
    for name, subject in (("ours", "IP:127.0.0.1,DNS:replicas.test"), ("other", "DNS:other.test")):
        signed = ("-CA", home / "ca.pem", "-CAkey", home / "ca.key", "-addext", f"subjectAltName={subject}")
        openssl(*new, "-subj", f"/CN={name}", *signed, "-keyout", home / f"{name}.key", "-out", home / f"{name}.pem")
    return home


def secured(home: Path, name: str = "ours", **nature: object) -> dict[str, Any]:
    return {
        **MODEL,
        "key": str(home / f"{name}.key"),
        "certificate": str(home / f"{name}.pem"),
        "authority": str(home / "ca.pem"),
        **nature,
    }


def test_a_replica_behind_tls_answers_as_any_other(authority: Path) -> None:
    with (
        replicas(2, secured(authority), MODEL) as (secret, plain),
        routed(secret.url, plain.url, replica_ca=str(authority / "ca.pem")) as router,
    ):
        until(lambda: set(states(router).values()) == {"up"})
        assert {router.complete().headers["x-kvtier-replica"] for _ in range(4)} == {secret.name, plain.name}
        asked = {"model": "m", "prompt": "x", "stream": True}
        told = {router.client.post("/v1/completions", json=asked).content for _ in range(4)}
        assert told == {plain.client.post("/v1/completions", json=asked).content}
        # it is killed in a stream, and another answers the next
        for replica in (secret, plain):
            replica.behave(events=1000, pause=0.01, die_after=4)
        text = router.client.post("/v1/completions", json=asked).text
        assert "mid_stream_broken" in text
        until(lambda: sorted(states(router).values()) == ["down", "up"])


def test_a_certificate_is_verified(authority: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    natures = (secured(authority), secured(authority, "other"))
    with replicas(1, natures[0]) as (ours,):
        with routed(ours.url) as router:  # by the system's authorities it is nobody's
            until(lambda: "untrusted: " in router.status()["replicas"][0]["why"])
            assert states(router) == {ours.name: "down"}
            assert router.complete().json()["error"]["code"] == "untrusted"
            assert ours.seen == []  # not a byte of the request went there
        # TLS where there is none, and none where there is
        with replicas(1) as (plain,), routed(plain.url.replace("http:", "https:")) as router:
            until(lambda: "untrusted: " in router.status()["replicas"][0]["why"])
        with routed(ours.url.replace("https:", "http:")) as router:
            until(lambda: states(router) == {ours.name: "down"})
    # the name must be right: this one is another's, by the right authority
    stranger = ToldReplica(natures[1])
    stranger.client = _blind(stranger)
    try:
        stranger.start()
        with routed(stranger.url, replica_ca=str(authority / "ca.pem")) as router:
            until(lambda: "untrusted: " in router.status()["replicas"][0]["why"])
            assert "mismatch" in router.status()["replicas"][0]["why"]
    finally:
        stranger.close()


def _blind(replica: ToldReplica) -> Any:
    """A client that verifies no name: the test itself must reach it."""
    context = ssl.create_default_context(cafile=str(replica.nature["authority"]))
    context.check_hostname = False
    return httpx2.Client(base_url=replica.url, timeout=60, trust_env=False, verify=context)


def test_certificates_are_read_again(authority: Path, tmp_path: Path) -> None:
    """At SIGHUP, also from a file whose name is as before."""
    ca, file = tmp_path / "ca.pem", tmp_path / "kvtier.toml"
    ca.write_bytes((authority / "other.pem").read_bytes())
    with replicas(1, secured(authority)) as (ours,):
        file.write_text(f'[router]\nreplicas = ["{ours.url}"]\nreplica_ca = "{ca}"\n')
        with closing(RouteProcess(file)) as router:

            def replica() -> Any:
                return httpx2.get(f"{router.url}/status", timeout=PATIENCE, trust_env=False).json()["replicas"][0]

            until(lambda: "untrusted: " in replica()["why"])
            ca.write_bytes((authority / "ca.pem").read_bytes())
            router.hang_up()
            until(lambda: replica()["state"] == "up")
            assert router.said("configuration reloaded: nothing new")
            ca.write_text("no certificate")  # the ones in force stay
            router.hang_up()
            until(lambda: router.said(f'the one in force stays: [router] replica_ca "{ca}"'))
            assert router.complete("none").status_code == 200


def test_an_authority_that_is_none_is_one_line(tmp_path: Path) -> None:
    for text, why in ((None, "No such file"), ("no certificate", "")):
        file = tmp_path / "ca.pem"
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match=r"^\[router\] replica_ca .*: give a file|^\[router\] replica_ca") as told:
            RoutedReplicas("https://127.0.0.1:1", replica_ca=str(file))
        assert why in str(told.value)
        assert "\n" not in str(told.value)


# --- a list that changes ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at files and replicas more often."""
    monkeypatch.setattr(replica_list, "_EVERY", 0.05)
    monkeypatch.setattr(router_fleet, "EVERY", 0.05)


def test_a_file_of_replicas_may_change_while_they_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "replicas"
    with replicas(2) as (one, other), ThreadPoolExecutor(1) as clients:
        file.write_text(f"# the first\n{one.url}  # alone\n\n")
        with routed(replicas_file=str(file)) as router:
            until(lambda: states(router) == {one.name: "up"})

            # one more comes, and gets requests
            file.write_text(f"{one.url}\n{other.url}\n")
            until(lambda: states(router) == {one.name: "up", other.name: "up"})
            assert {router.complete().headers["x-kvtier-replica"] for _ in range(4)} == {one.name, other.name}

            # the first goes in the middle of a stream: that goes on to its end, nothing new comes
            one.behave(events=100_000, pause=0.02)
            other.behave(status=503)  # so that the stream is the first's
            asked = {"model": "m", "prompt": "x", "stream": True}
            stream = clients.submit(router.client.post, "/v1/completions", json=asked)
            until(lambda: router.status()["replicas"][0]["in_flight"] == 1)
            other.behave()
            file.write_text(f"{other.url}\n")
            until(lambda: states(router).get(one.name) == "draining")
            assert {router.complete().headers["x-kvtier-replica"] for _ in range(4)} == {other.name}
            assert not stream.done()
            one.behave()
            answer = stream.result(PATIENCE)
            assert answer.headers["x-kvtier-replica"] == one.name
            assert answer.text.endswith("data: [DONE]\n\n")
            until(lambda: states(router) == {other.name: "up"})  # and it is seen off

            # it comes back
            file.write_text(f"{other.url}\n{one.url}\n")
            until(lambda: states(router) == {other.name: "up", one.name: "up"})
            assert {router.complete().headers["x-kvtier-replica"] for _ in range(4)} == {one.name, other.name}


@pytest.mark.parametrize(
    "wrong", ["", *brief([], ["# nobody\n", "http://a:1\nhttp://a:1\n"]), "http://a:1\nrubbish\n", "\udcff", None]
)
def test_a_wrong_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str | None) -> None:
    file = tmp_path / "replicas"
    with replicas(1) as (one,):
        file.write_text(one.url)
        with routed(replicas_file=str(file)) as router:
            until(lambda: states(router) == {one.name: "up"})
            if wrong is None:
                file.unlink()
            else:
                file.write_bytes(wrong.encode("utf-8", "surrogateescape"))
            until(lambda: router.status()["list"]["errors"] == {"file": 1})
            assert states(router) == {one.name: "up"}
            assert router.complete().status_code == 200
            assert "[router] replicas" in router.status()["list"]["why"]
            assert router.metrics()['kvtier_route_list_errors_total{reason="file"}'] == 1
            (line,) = (line for line in caplog.messages if "list of replicas stays as it was" in line)
            assert "\n" not in line
            # it is right again
            file.write_text(one.url)
            until(lambda: router.status()["list"]["why"] is None)


def test_a_list_on_a_hung_disk_keeps_nothing_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_list, "_PATIENCE", 0.2)
    file = tmp_path / "replicas"
    with replicas(1) as (one,):
        file.write_text(one.url)
        router = RoutedReplicas(replicas_file=str(file))
        try:
            until(lambda: states(router) == {one.name: "up"})
            # a pipe without a writer is opened for ever, as a file on a server that is gone
            file.unlink()
            os.mkfifo(file)
            until(lambda: "not read within 0.2 s" in (router.status()["list"]["why"] or ""))
            assert router.status()["list"]["errors"]["file"] == 1
            assert router.complete().status_code == 200
            # a stop waits for nobody
            router.close()
            until(lambda: not [each for each in threading.enumerate() if each.name == "kvtier-http"])
        finally:
            router.close()
            os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))  # whoever still opens it may go on


def test_a_name_that_no_dns_could_have_is_counted() -> None:
    spec = f"http://{'a' * 64}.test:{free_port()},addresses=all"
    with replicas(1) as (one,), routed(one.url, spec, resolve_interval="50ms") as router:
        until(lambda: states(router) == {one.name: "up"})
        until(lambda: router.status()["list"]["errors"].get("name", 0) > 2)


def test_a_replica_of_a_name_that_no_dns_could_have_is_down() -> None:
    with routed(f"http://{'a' * 64}.test:{free_port()}") as router:
        assert router.complete().status_code == 502  # not an error of the router's own
        (replica,) = router.status()["replicas"]
        assert replica["state"] == "down"


def test_a_list_that_cannot_be_at_the_start_ends_the_command_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("http://a\n")
    (tmp_path / "router.toml").write_text(f'[router]\nreplicas_file = "{tmp_path / "list"}"\n')
    told = kvtier("route", "--http", "127.0.0.1:0", "--config", str(tmp_path / "router.toml"))
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)
    assert 'replicas "http://a": not http://HOST:PORT' in told.stderr
    (tmp_path / "list").unlink()
    told = kvtier("route", "--http", "127.0.0.1:0", "--config", str(tmp_path / "router.toml"))
    assert (told.returncode, told.stderr) == (
        2,
        f'kvtier: [router] replicas_file "{tmp_path / "list"}": No such file or directory; '
        "give a file with one replica per line\n",
    )


def test_a_name_has_as_many_replicas_as_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    natures = [{**MODEL, "host": f"127.0.0.{number}", "port": port} for number in (1, 2)]
    addresses: list[str] = ["127.0.0.1"]
    real = socket.getaddrinfo

    def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        if host != "replicas.test":
            return real(host, *arguments, **options)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with replicas(2, *natures) as (one, other):
        spec = f"http://replicas.test:{port},addresses=all"
        with routed(spec, resolve_interval="50ms") as router:
            until(lambda: states(router) == {one.name: "up"})
            addresses.append("127.0.0.2")
            until(lambda: states(router) == {one.name: "up", other.name: "up"})
            assert {router.complete().headers["x-kvtier-replica"] for _ in range(4)} == {one.name, other.name}
            # the resolver knows nothing for a while: they stay
            kept, addresses[:] = list(addresses), []
            until(lambda: router.status()["list"]["errors"].get("name", 0) > 2)
            assert set(states(router)) == {one.name, other.name}
            # one address goes
            addresses[:] = kept[1:]
            until(lambda: states(router) == {other.name: "up"})
            assert other.seen[-1]["headers"]["host"] == f"replicas.test:{port}"


def test_a_real_resolver_is_asked() -> None:
    with replicas(1) as (one,), routed(one.url.replace("127.0.0.1", "localhost") + ",addresses=all") as router:
        until(lambda: states(router).get(one.name) == "up")
        assert router.complete().headers["x-kvtier-replica"] == one.name


def test_the_events_of_an_address_are_there() -> None:
    spec = ReplicaSpec.parse(
        "https://h:8000,events=tcp://*:5557,replay=tcp://h:5558,node=ipc:///n,block_size=16,addresses=all"
    )
    made = spec.at("10.0.0.7")
    assert (made.url, made.server_name, made.has_addresses) == ("https://10.0.0.7:8000", "h", False)
    told = made.publishers
    assert (told.events, told.replay, told.node) == ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558", "ipc:///n")
    six = spec.at("fd00::7")
    assert (six.url, six.publishers.events) == ("https://[fd00::7]:8000", "tcp://[fd00::7]:5557")


def test_a_change_of_a_spec_is_a_change_of_the_replica(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    with replicas(1, {"id": "m", "object": "model"}) as (one,):
        file.write_text(one.url)
        with routed(replicas_file=str(file)) as router:
            until(lambda: states(router) == {one.name: "up"})
            assert router.status()["block_size"] is None
            file.write_text(f"{one.url},block_size=16")
            until(lambda: router.status()["block_size"] == 16)
            assert states(router) == {one.name: "up"}
            assert len(json.dumps(router.status()["replicas"])) > 0


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("kvtier-resolve")])
