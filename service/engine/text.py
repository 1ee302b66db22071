"""The text of an answer as it may be sent: whole characters, and nothing from a stop string on."""

from collections.abc import Sequence

from kvtier.service.openai import Detokenizer, overlap


class AnswerText:
    """Tokens in, text out. Text that may begin a stop string is held back until that is decided."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self.is_stopped = False  # a stop string came: no more text is sent
        self._detokenizer = detokenizer
        self._stops = stops
        self._held = ""

    def push(self, token_id: int) -> str:
        return self._release(self._detokenizer.push(token_id))

    def end(self) -> str:
        ready = self._release(self._detokenizer.end())
        ready, self._held = ready + self._held, ""
        return ready

    def _release(self, piece: str) -> str:
        if self.is_stopped:
            return ""
        text = self._held + piece
        stopped_at = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if stopped_at is not None:
            self.is_stopped, self._held = True, ""
            return text[:stopped_at]
        num_held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]
