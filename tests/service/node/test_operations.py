"""The daemon serves every operation there is, each in one place."""

import pytest

from kvtier.connector.daemon.wire import OPERATIONS, OperationRow, handlers_of
from kvtier.service.node.session import Holdings, Session


@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: row.message.__name__)
def test_an_operation_has_one_handler(row: OperationRow) -> None:
    serving = [owner.__name__ for owner in (Session, Holdings) if row.message in handlers_of(owner)]
    assert len(serving) == 1, f"{row.message.__name__}: {serving or 'nobody'} has _on_{row.message.__name__.lower()}"


def test_no_code_is_given_twice_and_no_handler_serves_nothing() -> None:
    assert [row.code for row in OPERATIONS] == list(range(len(OPERATIONS)))
    named = {f"_on_{row.message.__name__.lower()}" for row in OPERATIONS}
    for owner in (Session, Holdings):
        assert {name for name in vars(owner) if name.startswith("_on_")} <= named
