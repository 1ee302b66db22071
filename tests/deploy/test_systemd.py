"""deploy/systemd without a system: the daemon takes the unit's command."""

import configparser
from typing import Final

import pytest
from node_rig import ROOT

from kvtier.cli.program import load
from kvtier.service.cluster.cluster import GRACE

UNIT: Final = ROOT / "deploy" / "systemd" / "kvtier.service"


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string(UNIT.read_text())
    return dict(parsed["Service"])


def test_the_daemon_takes_its_command(service: dict[str, str]) -> None:
    program, verb, *arguments = service["ExecStart"].split()
    parsed = load(verb).make_context(verb, arguments).params
    assert (program, verb) == ("/opt/kvtier/bin/kvtier", "serve")
    # where it writes, systemd has made a directory for it alone
    assert str(parsed["socket"]) == f"/run/{service['RuntimeDirectory']}/kv.sock"
    assert service["Environment"] == f"KVTIER_FILE__PATH=/var/lib/{service['StateDirectory']}/slabs"
    assert service["RuntimeDirectoryMode"] == service["StateDirectoryMode"] == "0700"
    # who has the directory of the socket mounted finds the next daemon's socket there, too
    assert service["RuntimeDirectoryPreserve"] == "restart"
    assert int(service["TimeoutStopSec"]) == GRACE
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    # wrong options stay wrong: it is not started again for them
    assert service["RestartPreventExitStatus"] == "2"
