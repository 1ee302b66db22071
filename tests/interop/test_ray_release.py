"""A release rolled out on a real Ray cluster, under load: `make test-ray`."""

import sys
from pathlib import Path

import pytest
from redis_rig import standalone
from release_rig import last_release

pytest.importorskip("ray", reason="needs Ray Serve; run `make test-ray`")

from ray_rig import Crowd, application, ray_cluster, until
from server_rig import save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_engines_of_the_last_release_are_replaced_and_conversations_go_on(tmp_path: Path) -> None:
    tree = last_release(tmp_path / "release")
    old_engine = ("env", f"PYTHONPATH={tree}", sys.executable, "-m", "kvtier.cli", "engine")
    env = {"KVTIER_CACHE__LOAD_OR_RECOMPUTE": "load"}  # of so small a model computing is always faster
    with (
        ray_cluster(2) as cluster,
        standalone() as redis,
        application(
            cluster,
            save_checkpoint(tmp_path / "model"),
            replicas=2,
            program=old_engine,
            env=env | {"KVTIER_REDIS__URL": redis.url},
        ) as app,
    ):
        old = {*app.running()}
        with Crowd(app, 4) as crowd:
            until(lambda: {answer.replica for _, answer in crowd.answers} == old)
            app.deploy(program=())  # both releases answer meanwhile, behind an ingress of this one
            until(lambda: len(app.running()) == 2 and old.isdisjoint(app.running()))
            seen = len(crowd.answers)
            until(lambda: len(crowd.answers) >= seen + 24)
        assert not crowd.failures
        assert old.isdisjoint(answer.replica for _, answer in crowd.answers[seen:])
        # The first new replica read conversations that the last release had left in Redis.
        later = [answer for turns, answer in crowd.answers if len(turns) > 1 and answer.replica not in old]
        assert any(answer.cached.get("redis", 0) for answer in later)
        app.require_right(crowd.answers)
