"""An answer's text as it may be told: whole characters, and nothing of a stop string or behind it."""

from collections.abc import Sequence

from kvtier.service.prompts import Detokenizer


class AnswerText:
    """Tokens in, text out. What may be the beginning of a stop string is held back until it is one, or is none."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self.is_stopped = False  # a stop string came: nothing more is told
        self._detokenizer = detokenizer
        self._stops = stops
        self._held = ""

    def push(self, token_id: int) -> str:
        """The text that can be told with one more token."""
        return self._tell(self._detokenizer.push(token_id))

    def end(self) -> str:
        """What is left."""
        told = self._tell(self._detokenizer.end())
        told, self._held = told + self._held, ""
        return told

    def _tell(self, piece: str) -> str:
        if self.is_stopped:
            return ""
        text = self._held + piece
        stopped_at = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if stopped_at is not None:
            self.is_stopped, self._held = True, ""
            return text[:stopped_at]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the text's end begin the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
