"""SGLang's storage opened and closed while it serves, and every policy of its unified radix tree and of HiCache."""

from pathlib import Path
from typing import Any, Final

import pytest
from extent import brief

pytest.importorskip("sglang", reason="needs SGLang; run `make test-sglang`")

from sglang_rig import Sglang, Slab, names_of, wait_until
from test_sglang import PROMPTS, STORED, Stored, cached, stored, tokens_of  # noqa: F401 -- `stored` is a fixture
from tiny_models import prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TROUBLE: Final = {
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
}


def test_attached_and_detached_while_calls_fail(stored: Stored, tmp_path: Path) -> None:  # noqa: F811
    """Attach, prefetch, back up, detach, again and again; a third of SGLang's calls fail, and answers stay right."""
    directory = stored.copy(tmp_path / "slabs")
    none: dict[str, Any] = {"hicache_storage_backend": None}
    with Sglang(stored.model, directory, environment=TROUBLE, **none) as engine:
        assert cached(engine.generate(PROMPTS[2:])) == [0]  # no storage yet
        new = [prompt(50 + turn, 200) for turn in range(brief(2, 5))]
        alone = tokens_of(engine.generate(new))
        for turn, tokens in enumerate(new):
            engine.flush()
            refused = engine.attach(file={"path": str(directory), "sise": "16MiB"})
            assert not refused[0]
            assert "did you mean size?" in refused[1]
            done, message = engine.attach()
            assert done, message
            found = 0
            for _ in range(8):
                answers = engine.generate(PROMPTS)
                assert tokens_of(answers) == stored.answers
                found += sum(cached(answers))
                engine.flush()
            assert found > 0
            # What is new comes into the slab, in whole or as far as SGLang's calls let it.
            before = len(Slab(directory).names())
            assert tokens_of(engine.generate([tokens])) == alone[turn : turn + 1]
            counters = engine.detach()
            assert any("lookup_blocks" in name and "miss" not in name for name in counters)
            assert "kvtier_corruption_total" not in " ".join(counters)
            assert before <= len(Slab(directory).names()) <= before + len(names_of([tokens])) + 1
            engine.flush()
            assert cached(engine.generate(PROMPTS[2:])) == [0]  # closed: neither found nor kept
            assert tokens_of(engine.generate(new)) == alone


TLRU: Final = {"threshold": 256, "next_prompt_estimate": 64}
POLICIES: Final[list[dict[str, Any]]] = [
    {"hicache_write_policy": "write_through_selective", "radix_eviction_policy": "slru"},
    {"hicache_host_memory_mode": "buffer_only"},
    {"hicache_storage_prefetch_policy": "best_effort", "radix_eviction_policy": "lfu"},
    {"hicache_storage_prefetch_policy": "timeout", "radix_eviction_policy": "priority"},
    {"hicache_write_policy": "write_back", "radix_eviction_policy": "tlru", "radix_eviction_policy_config": TLRU},
    {"enable_session_radix_cache": True},
]
CASES: Final = [(policy, "rust") for policy in POLICIES] + [(policy, "python") for policy in POLICIES[:2]]


@pytest.mark.parametrize(("policy", "core"), brief(CASES[:2], CASES), ids=str)
def test_every_policy(policy: dict[str, Any], core: str, stored: Stored, tmp_path: Path) -> None:  # noqa: F811
    """Of the unified radix tree, with either core, and of HiCache: stored pages are found, and new ones stored."""
    directory = stored.copy(tmp_path / "slabs")
    environment = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": core}
    new = [prompt(60 + i, 200) for i in range(14)]  # more than its L1 has room for
    with Sglang(stored.model, directory, environment=environment, **policy) as engine:

        def is_found() -> bool:
            engine.flush()
            answers = engine.generate(PROMPTS)
            assert tokens_of(answers) == stored.answers
            # by best effort SGLang computes what has not come when it could begin: all of it, maybe
            return cached(answers)[0] == STORED[0] or "best_effort" in policy.values()

        wait_until(is_found, "stored pages to be found")

        def is_stored() -> bool:
            for tokens in new:
                for _ in range(3):  # the selective policy keeps what is asked for again
                    engine.generate([tokens], num_tokens=1)
            return len(names_of(new) & Slab(directory).names()) >= 6 * 12

        wait_until(is_stored, "new pages to be stored", 90)
        settled = [tokens for tokens in new if names_of([tokens]) <= Slab(directory).names()][:3]
        engine.flush()
        loaded = engine.generate(settled)
        assert cached(loaded) == [192 for _ in settled] or "best_effort" in policy.values()
        engine.detach()
        engine.flush()
        assert tokens_of(loaded) == tokens_of(engine.generate(settled))  # without any storage
        assert "kvtier_corruption_total" not in engine.log()
