"""Texts that are going to be segments, computed each by itself: the answer says what was held and what was not."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.service import Json
from kvtier.service.engine.completion import late
from kvtier.service.engine.loop import EngineLoop, LiveRequest, SequenceInput


@dataclass(frozen=True, slots=True)
class PrecomputeRequest:
    model: str
    inputs: Sequence[SequenceInput]
    deadline: float  # on the event loop's clock


class Precomputation:
    """One request's texts on their way through the engine. `close` aborts what is still computed; idempotent."""

    headers: dict[str, str] = {}  # noqa: RUF012 - none, and nobody writes it

    def __init__(self, request: PrecomputeRequest, loop: EngineLoop) -> None:
        """Submits the texts. Raises OpenAIError if the engine has no room for them."""
        self._wanted = request
        self._loop = loop
        self._live = LiveRequest(request.inputs, f"precompute-{secrets.token_hex(12)}")
        self._unfinished = set(range(len(request.inputs)))
        loop.submit(self._live)

    async def whole(self) -> Json:
        """What became of each text, as the response's JSON. Raises OpenAIError."""
        num_held = [0] * len(self._wanted.inputs)
        try:
            async with asyncio.timeout_at(self._wanted.deadline):
                while self._unfinished:
                    update = await self._live.next()
                    self._unfinished.discard(update.index)
                    if update.source is not None:
                        num_held[update.index] = sum(update.source.cached.values())
        except TimeoutError:
            raise late() from None
        lengths = [len(each.prompt.token_ids) for each in self._wanted.inputs]
        texts = [_told(length, held) for length, held in zip(lengths, num_held, strict=True)]
        total = _told(sum(lengths), sum(num_held))
        return {"object": "precompute", "model": self._wanted.model, **total, "texts": texts}

    def close(self) -> None:
        if self._unfinished:
            self._loop.abort(self._live, list(self._unfinished))
            self._unfinished.clear()


def _told(num_tokens: int, num_held: int) -> Json:
    return {"tokens": num_tokens, "held": num_held, "computed": num_tokens - num_held}
