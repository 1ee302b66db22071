"""Guides of answers that are JSON of a schema, by llguidance. It is loaded when the first is asked for."""

import json
import logging
from collections.abc import Callable, Collection, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.engine import Guide
from kvtier.service import Json
from kvtier.service.openai import OpenAIError
from kvtier.tiers import MissingPackages, require_extra

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_log = logging.getLogger(__name__)

_SPACE: Final = r"[ \t\n\r]{0,16}"  # between JSON's tokens: a model that writes nothing else comes to an end


class JsonGuides:
    """Of one model. Thread-safe."""

    def __init__(self, tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`tokenizer` makes the content of a `tokenizer.json`: some ten megabytes, when they are needed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._made: LLTokenizer | None = None
        self._lock = Lock()

    def of(self, schema: Json, param: str) -> Guide:
        """A guide of a JSON schema. Raises OpenAIError, about the field `param`, if there can be none."""
        if not self._eos_token_ids:
            raise _refused(param, "this model has no token that ends an answer", "unsupported_parameter")
        try:
            require_extra(param, "engine")
            from llguidance import LLMatcher
        except MissingPackages as error:
            raise _refused(param, str(error), "unsupported_parameter") from None
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": _SPACE})
        except (ValueError, RecursionError) as error:
            raise _refused(param, f"no JSON schema ({_first_line(str(error))}); fix it") from None
        tokenizer = self._opened()
        is_wrong, why = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
        if is_wrong:
            raise _refused(param, f"a schema that cannot be followed ({_first_line(' '.join(why))}); fix it")
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        matcher.compute_bitmask()  # what never begins: a reference to itself, say
        if matcher.is_error():
            raise _refused(param, f"a schema that cannot be followed ({_first_line(matcher.get_error())}); fix it")
        return _SchemaGuide(matcher, self._vocab_size, self._eos_token_ids)

    def _opened(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        with self._lock:
            if self._made is None:
                self._made = LLTokenizer(self._tokenizer(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
            return self._made


class _SchemaGuide:
    def __init__(self, matcher: "LLMatcher", vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._ends = np.zeros(-(-vocab_size // 32), np.uint32)
        for token_id in eos_token_ids:
            self._ends[token_id // 32] |= np.uint32(1 << token_id % 32)

    def start(self, token_ids: Sequence[int], num_prompt_tokens: int) -> "_SchemaAnswer":
        return _SchemaAnswer(self._matcher.deep_copy(), self._ends, token_ids, num_prompt_tokens)


class _SchemaAnswer:
    """Follows its answer by its tokens: a step that failed, or was made again, leaves no trace."""

    def __init__(self, matcher: "LLMatcher", ends: NDArray[np.uint32], token_ids: Sequence[int], num_seen: int) -> None:
        self._matcher = matcher
        self._ends = ends
        self._token_ids = token_ids
        self._num_seen = num_seen
        self.is_cut = False

    def allowed(self) -> NDArray[np.uint32]:
        if len(self._token_ids) > self._num_seen:
            self._matcher.consume_tokens(list(self._token_ids[self._num_seen :]))
            self._num_seen = len(self._token_ids)
        mask = self._ends if self._matcher.is_error() else np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():  # too complex to go on with: the answer ends here
            if not self.is_cut:
                _log.warning("a guided answer ended early: %s", _first_line(self._matcher.get_error()))
            self.is_cut = True
            return self._ends
        return mask[: len(self._ends)]


def _first_line(text: str) -> str:
    """Of what llguidance says: behind it come its state, and the client's schema."""
    return text.strip().partition("\n")[0][:200]


def _refused(param: str, why: str, code: str = "invalid_value") -> OpenAIError:
    return OpenAIError(400, f"{param}: {why}", param=param, code=code)
