"""What the end of a vLLM request tells: its hint, said or read from its answer, and how long it took."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub import try_to_load_from_cache

from kvtier.connector import Answered, hint_in
from kvtier.connector.models import ToolCalls, load_tokenizer
from kvtier.tiers import ConfigError
from kvtier.tiers.reuse import Hint

_log = logging.getLogger(__name__)

HINT_KEY: Final = "kvtier_hint"  # in `kv_transfer_params`
_STOPPED: Final = "FINISHED_STOPPED"  # vLLM's status of an answer that ended by itself


def answered_of(
    request: Any, calls_tool: Callable[[Sequence[int]], bool], ignored: Callable[[str], None]
) -> Answered | None:
    """What a request of vLLM's came to; None for one without an answer, or whose answer another node makes.

    What is said goes before what the answer shows. A word that is no hint counts as none, and `ignored` is called with
    the reason: vLLM has taken the request in by then.
    """
    given = request.kv_transfer_params
    given = given if isinstance(given, Mapping) else {}
    if not request.num_output_tokens or given.get("do_remote_decode"):
        return None
    word = given.get(HINT_KEY)
    if word is not None and word not in list(Hint):
        ignored("unknown_word")
    hint, is_derived = Hint(word) if word in list(Hint) else None, False
    if hint is None and (envelope := getattr(request, "kv_hints", None)) is not None:  # from vLLM 0.32 on
        hint = hint_in(envelope, ignored)
    if hint is None and request.status.name == _STOPPED and calls_tool(request.output_token_ids):
        hint, is_derived = Hint.TOOL, True
    lasted = max(0.0, time.time() - request.arrival_time)
    return Answered(int(request.num_prompt_tokens), int(request.num_output_tokens), hint, is_derived, lasted)


class AnswerReader:
    """Says whether an answer calls a tool. The tokenizer is loaded beside the engine; until it is there, none does."""

    def __init__(self, tokenizer: str | None, revision: str | None = None) -> None:
        """`tokenizer` is a directory, or a repository that the hub's cache has; None: vLLM was told to load none."""
        self._read: ToolCalls | None = None
        if tokenizer is not None:
            threading.Thread(
                target=self._load, args=(tokenizer, revision), name="kvtier-tokenizer", daemon=True
            ).start()

    def __call__(self, token_ids: Sequence[int]) -> bool:
        return self._read is not None and self._read(token_ids)

    def _load(self, tokenizer: str, revision: str | None) -> None:
        directory = Path(tokenizer)
        if not directory.is_dir():
            cached = try_to_load_from_cache(tokenizer, "tokenizer.json", revision=revision)
            if not isinstance(cached, str):
                _log.info("tool calls are not read from answers: no tokenizer.json of %s here", tokenizer)
                return
            directory = Path(cached).parent
        try:
            self._read = ToolCalls(load_tokenizer(directory))
        except ConfigError as error:
            _log.info("tool calls are not read from answers: %s", error)
