"""Adapters' names: those of the weights that vLLM has loaded, however files, paths and numbers change meanwhile."""

import logging
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connector.vllm.keys import RequestNames, ServedAdapters
from kvtier.tiers.config.sections import CacheConfig


@dataclass
class Lora:
    """vLLM's request for an adapter."""

    lora_path: str
    lora_int_id: int = 1
    lora_name: str = "tone"
    load_inplace: bool = False


def write(path: Path, weights: str) -> Path:
    """An adapter's directory with these weights; whoever had it open goes on with the old ones."""
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    new = path / "adapter_model.safetensors.new"
    new.write_text(weights)
    new.replace(path / "adapter_model.safetensors")
    return path


def fresh(path: Path) -> bytes | None:
    """What a server that starts now calls the adapter."""
    return ServedAdapters().digest(Lora(str(path)))


def has_computed(served: ServedAdapters, lora: Lora, *reloading: int) -> None:
    """A step has ended, with an output of a request with this adapter."""
    assert not served.look()
    served.computed(lora)
    served.confirm(reloading)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "adapter", "one")


def test_a_served_adapter_keeps_its_name_until_it_is_loaded_anew(path: Path) -> None:
    served, lora = ServedAdapters(), Lora(str(path))
    one = served.digest(lora)
    assert one == fresh(path) is not None
    has_computed(served, lora)
    # training writes the next one over it: the server goes on with what it has
    two = fresh(write(path, "two"))
    assert two != one
    assert served.digest(lora) == one
    assert not served.is_unsettled
    # under another path and name, too, as long as its number is the same
    assert served.digest(Lora(str(write(path.with_name("other"), "three")), lora_name="other")) == one
    # a request may have it loaded in place; those before it still have the old weights, those behind it the new ones
    again = Lora(str(path), load_inplace=True)
    assert served.digest(again) == served.current(1) == two
    assert served.look()  # for who was named by the old ones
    assert served.digest(lora) is None
    served.computed(lora)
    assert served.digest(lora) is None  # an answer by the old ones
    has_computed(served, again)
    assert served.digest(lora) == two
    # or the server forgets it, and the next request has it loaded
    served.removed(1)
    assert served.look()
    assert served.current(1) is None
    write(path, "four")
    assert served.digest(lora) == fresh(path) != two


def test_of_equal_weights_the_name_is_one_whatever_the_adapter_is_called(path: Path) -> None:
    plan: Any = SimpleNamespace(canonical=True, block_size=4, hash_size=4, lookahead=0)

    def names(lora: Lora) -> list[bytes]:
        request = SimpleNamespace(
            lora_request=lora,
            cache_salt=None,
            mm_features=[],
            prompt_embeds=None,
            all_token_ids=[1, 2, 3, 4],
            num_tokens=4,
        )
        chain = RequestNames(plan, CacheConfig(), bytes(32)).of(request)
        assert chain is not None
        return list(chain.current().hashes)

    moved = write(path.with_name("moved"), "one")
    assert names(Lora(str(path))) == names(Lora(str(moved), 7, "voice")) != names(Lora(str(write(path, "two"))))


def test_what_was_loaded_before_any_request_is_what_counts(path: Path) -> None:
    served, lora = ServedAdapters(), Lora(str(path))
    one = fresh(path)
    served.loading(lora)
    served.loaded(1)
    write(path, "two")
    served.loading(lora)  # it has one of that number
    served.loaded(1)
    assert served.digest(lora) == one
    # loaded in place, by the same call
    again = Lora(str(path), load_inplace=True)
    served.loading(again)
    served.loaded(1)
    assert served.digest(lora) == fresh(path) != one


def test_files_that_change_while_they_are_loaded_name_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served, lora = ServedAdapters(), Lora(str(path))
    # a request brings it: nobody knows what it was when the server came to read it
    assert served.digest(lora) is not None
    write(path, "two")
    assert served.look()
    assert served.digest(lora) is served.current(1) is None
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"no blocks of requests with the adapter {path} are kept: its files changed while it was loaded; "
        "load it again, in place or under a new number"
    ]
    assert not served.look()
    # the server loads it: it may have read either
    served.removed(1)
    served.loading(lora)
    write(path, "three")
    served.loaded(1)
    assert served.digest(lora) is None


def test_an_adapter_reloaded_at_every_step_is_checked_after_every_step(path: Path) -> None:
    served, lora = ServedAdapters(), Lora(str(path), load_inplace=True)
    one = served.digest(lora)
    has_computed(served, lora, 1)
    has_computed(served, Lora(str(path)), 1)  # another's output ends no doubt
    write(path, "two")
    assert served.look()
    assert served.current(1) is None
    assert served.digest(lora) == fresh(path) != one
    assert served.look()  # for who was named before
    has_computed(served, lora, 1)
    # once the last such request has ended the server keeps what it has
    served.confirm([])
    write(path, "three")
    assert not served.is_unsettled
    assert served.digest(Lora(str(path))) == served.current(1) != fresh(path)


def test_of_more_adapters_than_vllm_keeps_a_changed_one_may_be_either(path: Path, tmp_path: Path) -> None:
    others = [write(tmp_path / str(number), str(number)) for number in (2, 3)]
    served, lora = ServedAdapters(capacity=2), Lora(str(path))
    one = served.digest(lora)
    served.digest(Lora(str(others[0]), 2))
    write(path, "two")
    assert served.digest(lora) == one  # both have a place
    served.digest(Lora(str(others[1]), 3))
    assert served.digest(lora) is None  # the third may have taken its place since
    assert served.is_mixed(lora)
    for number, other in enumerate(others, 2):
        assert served.digest(Lora(str(other), number)) == fresh(other)  # loaded again, they are the same
    assert served.digest(Lora(str(path), load_inplace=True)) == fresh(path)


def test_under_one_name_vllm_may_hold_kv_of_several_weights(path: Path) -> None:
    served, lora = ServedAdapters(), Lora(str(path))
    served.digest(lora)
    served.digest(Lora(str(path), load_inplace=True))
    assert not served.is_mixed(lora)  # the same weights
    write(path, "two")
    served.digest(Lora(str(path), load_inplace=True))
    assert served.is_mixed(lora)
    # under a number of its own, too: vLLM names its blocks by name and path
    served = ServedAdapters()
    served.digest(lora)
    write(path, "three")
    served.digest(Lora(str(path), 2))
    assert served.is_mixed(lora)
    assert not served.is_mixed(Lora(str(path), 2, "voice"))


def test_a_missing_adapter_has_no_name_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    served, lora = ServedAdapters(), Lora("somebody/adapter")
    assert served.digest(lora) is None
    assert served.digest(lora) is None
    assert not served.look()
    assert len(caplog.records) == 1
