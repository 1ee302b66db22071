"""Our application on a real Ray cluster while Ray Serve starts and ends replicas: `make test-ray`."""

from pathlib import Path

import pytest
from redis_rig import standalone

pytest.importorskip("ray", reason="needs Ray Serve; run `make test-ray`")

from ray_rig import Answer, Crowd, application, ray_cluster, until
from server_rig import save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_new_replica_finds_old_conversations_in_the_tier_that_all_share(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path)
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 1.0}
    scaling |= {"downscale_delay_s": 4.0, "metrics_interval_s": 1.0, "look_back_period_s": 2.0}
    with (
        ray_cluster(2) as cluster,
        standalone() as redis,
        application(cluster, model, autoscaling=scaling, env={"KVTIER_REDIS__URL": redis.url}) as scaled,
    ):
        (first,) = scaled.running()
        with Crowd(scaled, 8) as crowd:
            until(lambda: len(scaled.running()) == 2)
            seen = len(crowd.answers)
            until(lambda: any(answer.replica != first for _, answer in crowd.answers[seen:]))
            until(lambda: any(_is_taken_over(turns, answer, first) for turns, answer in crowd.answers))
        assert not crowd.failures
        until(lambda: len(scaled.running()) == 1)  # nobody asks any more
        scaled.require_right(crowd.answers[-24:])


def _is_taken_over(turns: tuple[str, ...], answer: Answer, first: str) -> bool:
    """Whether the new replica answered a later turn, of which it read the beginning from Redis."""
    return answer.replica != first and len(turns) > 1 and answer.cached.get("redis", 0) > 0
