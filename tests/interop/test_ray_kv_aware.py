"""Ray Serve's own KVAwareRouter reads our engines' events as they are: `make test-ray`."""

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs Ray Serve; run `make test-ray`")
pytest.importorskip("dynamo.llm", reason="needs NVIDIA Dynamo's runtime; run `make test-ray`")

from ray_rig import application, ray_cluster, until
from server_rig import save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT = "What stands in the document that all of us have read so often? " * 6


def test_its_index_finds_conversations_by_our_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_checkpoint(tmp_path)
    benchmarks = str(Path(__file__).resolve().parents[2] / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", benchmarks)  # Ray's workers find the router there
    env = {"KVTIER_CACHE__BLOCK_SIZE": "16"}
    with (
        ray_cluster(2) as cluster,
        application(
            cluster, model, replicas=2, env=env, router="_ray_kv_aware.KVAware", router_options={"model": str(model)}
        ) as app,
    ):
        asked = 0

        def is_indexed() -> bool:
            """Whether three conversations in a row went back to who had them: events are heard by then."""
            nonlocal asked
            asked += 3
            hits = 0
            for number in range(asked, asked + 3):
                first = app.ask([f"{number}: {TEXT}"])
                for other in range(3):  # so that the load alone would lead elsewhere
                    app.ask([f"{number}, {other}"])
                again = app.ask([f"{number}: {TEXT}", first.text, "and then?"])
                hits += again.replica == first.replica and again.num_cached >= first.num_prompt // 16 * 16
            return hits == 3

        until(is_indexed)
        # Chance would do this once in 2^12 tries.
        talks = [[f"talk {number}: {TEXT}"] for number in range(12)]
        first = [app.ask(talk) for talk in talks]
        later = [app.ask([*talk, answer.text, "and then?"]) for talk, answer in zip(talks, first, strict=True)]
        assert [answer.replica for answer in later] == [answer.replica for answer in first]
        assert all(
            answer.num_cached >= before.num_prompt // 16 * 16 for answer, before in zip(later, first, strict=True)
        )
