"""How likely an answer's tokens were, in OpenAI's shapes: that of chats, and the older one of completions."""

from typing import Final

from kvtier.engine import TokenLogprobs
from kvtier.service import Json
from kvtier.service.openai import TokenTexts

_LEAST: Final = -9999.0  # JSON has no infinity; OpenAI and vLLM tell this


class ChatLogprobs:
    """Of one choice of a chat: each token with its bytes, and the likeliest in its place. Each is told once."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._content: list[Json] = []

    def add(self, told: TokenLogprobs) -> None:
        """One more token."""
        likeliest = [self._entry(*each) for each in told.likeliest]
        self._content.append({**self._entry(told.token_id, told.logprob), "top_logprobs": likeliest})

    def taken(self) -> Json:
        """Of the tokens since the last call."""
        content, self._content = self._content, []
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text, data = self._texts.of(token_id)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(data)}


class TextLogprobs:
    """Of one choice of a completion: four lists. `top_logprobs` has the token itself, too, as OpenAI's has."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0  # characters of the tokens so far, each by itself
        self._begin()

    def add(self, told: TokenLogprobs) -> None:
        text = self._note(told.token_id)
        self._logprobs.append(max(told.logprob, _LEAST))
        found: dict[str, float] = {}
        for token_id, logprob in (*told.likeliest, (told.token_id, told.logprob)):
            found.setdefault(text if token_id == told.token_id else self._texts.of(token_id)[0], max(logprob, _LEAST))
        self._likeliest.append(found)

    def add_first(self, token_id: int) -> None:
        """A prompt's first token, of which nothing is said: nothing stands before it."""
        self._note(token_id)
        self._logprobs.append(None)
        self._likeliest.append(None)

    def taken(self) -> Json:
        told = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._likeliest,
            "text_offset": self._offsets,
        }
        self._begin()
        return told

    def _begin(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._likeliest: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def _note(self, token_id: int) -> str:
        text = self._texts.of(token_id)[0]
        self._tokens.append(text)
        self._offsets.append(self._offset)
        self._offset += len(text)
        return text
