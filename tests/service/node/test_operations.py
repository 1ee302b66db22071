"""The daemon serves every operation there is."""

from contextlib import closing
from pathlib import Path

from service_rig import DaemonThread, attach

from kvtier.connector.daemon.wire import OPERATIONS


def test_every_operation_is_served_and_no_code_is_given_twice(home: Path) -> None:
    assert [kind.__struct_config__.tag for kind in OPERATIONS] == list(range(len(OPERATIONS)))
    daemon = DaemonThread(home / "s", host={"size": 1 << 20})
    with closing(attach(home / "s")):
        [session] = daemon.daemon.call(lambda: list(daemon.daemon._sessions.values()))
        assert set(session._verbs) == set(OPERATIONS)
    daemon.close()
