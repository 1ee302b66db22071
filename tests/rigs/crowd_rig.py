"""Clients of a cluster that breaks under them: whatever they take for a whole answer must be the text of a cold run."""

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2

NUM_CLIENTS: Final = 32
PATIENCE: Final = 100.0  # seconds until everybody has an answer again
_PATH: Final = "/v1/chat/completions"
_PAUSE: Final = 0.5  # seconds before a client asks on, or again
_ANSWER: Final = 90.0  # seconds: one that waits longer was not told cleanly
_CLEAN: Final = (408, 429, 502, 503, 504)  # nobody could answer; a 500 would be a fault that reached an engine
HANG: Final = "left without a word"
_SALTS: Final = itertools.count()  # no tenant comes back
_TOLD: Final = {"role": "assistant"}

Json = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """The messages of a conversation so far, and what is answered to them."""

    model: str
    messages: tuple[Json, ...]
    answer: str

    def body(self, *, streams: bool = False, salt: str | None = None) -> Json:
        """The request, greedy."""
        asked: Json = {"model": self.model, "messages": self.messages, "max_tokens": 12, "temperature": 0}
        if streams:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return asked if salt is None else asked | {"cache_salt": salt}


@dataclass(frozen=True)
class Said:
    """What a client was told: the text so far, and how that ended."""

    text: str = ""
    is_whole: bool = False
    trouble: str | None = None  # a clean error
    fault: str | None = None  # one that is not
    usage: Json | None = None


def conversations(model: Path, number: int, num_turns: int) -> list[list[Turn]]:
    """Conversations as an engine tells them that caches nothing; some begin alike."""
    from server_rig import serving  # takes torch along, which the crowd does without

    manners = ("You are a harbour master. ", "You are a lighthouse. ", "You know all the tides, and say little. ")

    def hold(place: int) -> list[Turn]:
        messages: tuple[Json, ...] = ({"role": "system", "content": manners[place % 3] * 2},)
        turns = []
        for turn in range(num_turns):
            question = f"{place * turn + place}: and where does ship {place} lie now?"
            messages = (*messages, {"role": "user", "content": question})
            answer = server.post("chat/completions", **Turn(model.name, messages, "").body()).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            turns.append(Turn(model.name, messages, answer["choices"][0]["message"]["content"]))
            messages = (*messages, _TOLD | {"content": turns[-1].answer})
        return turns

    alone = {"l1": {"enable_prefix_caching": False}, "server": {"max_num_seqs": 16}}
    with serving(model, exact=True, **alone) as server, ThreadPoolExecutor(8) as threads:
        told = list(threads.map(hold, range(number)))
    assert len({turn.answer for turns in told for turn in turns}) > number * num_turns // 2  # a mix-up would show
    return told


async def _is_retrying(http: httpx2.AsyncClient) -> bool:
    """Whether the router has asked another replica anew: what the first one stored of a request is found then."""
    status = (await http.get("/status")).json()
    return any(status["retries"].values())


class Crowd:
    """The clients, on a thread of their own.

    Every other one streams, one in four is a tenant anew with each conversation, one in eight hangs up on some streams.
    """

    def __init__(
        self,
        url: str,
        talks: Sequence[Sequence[Turn]],
        *,
        num_clients: int = NUM_CLIENTS,
        pause: float = _PAUSE,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """They begin at once, and each rests for `pause` seconds between two requests."""
        self.troubles: Counter[str] = Counter()  # clean errors by their name
        self.cached: Counter[str] = Counter()  # prompt tokens by the tier they came from
        self.faults: list[str] = []
        self.num_right = [0] * num_clients
        self._url, self._talks, self._pause, self._headers = url, talks, pause, dict(headers or {})
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def everybody(self, times: int = 1) -> None:
        """Wait until each client was answered so many times more."""
        goals = [count + times for count in self.num_right]
        end = time.monotonic() + PATIENCE
        while any(count < goal for count, goal in zip(self.num_right, goals, strict=True)):
            assert not self.faults, self.faults[:5]
            assert time.monotonic() < end, f"{self.num_right} of {goals}; {self.troubles}"
            time.sleep(0.05)

    def end(self) -> None:
        """Wait for everybody's last answer, and judge them."""
        self.stop()
        assert not self.faults, self.faults[:5]

    def stop(self) -> None:
        """Wait for everybody's last answer."""
        self._stopping.set()
        self._thread.join(2 * _ANSWER)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        number = len(self.num_right)
        limits = httpx2.Limits(max_connections=number, max_keepalive_connections=number)
        async with httpx2.AsyncClient(
            base_url=self._url, timeout=_ANSWER, limits=limits, headers=self._headers, trust_env=False
        ) as http:
            await asyncio.gather(*(self._watched(http, each) for each in range(number)))

    async def _watched(self, http: httpx2.AsyncClient, number: int) -> None:
        try:
            await self._client(http, number)
        except Exception as error:  # an answer of no shape at all; told at once to whoever waits
            self.faults.append(repr(error))

    async def _client(self, http: httpx2.AsyncClient, number: int) -> None:
        for conversation in itertools.count(number):
            salt = f"tenant {next(_SALTS)}" if number % 4 == 3 else None
            leaves = number % 8 == 5 and conversation % 2 == 0
            for turn in self._talks[conversation % len(self._talks)]:
                asked = turn.body(streams=number % 2 == 1, salt=salt)
                is_first = salt is not None and len(turn.messages) == 2
                while not await self._answered(http, asked, turn, is_first=is_first, leaves=leaves):
                    is_first = False
                    if self._stopping.is_set():
                        return
                    await asyncio.sleep(self._pause)
                self.num_right[number] += not leaves
                leaves = False
                if self._stopping.is_set():
                    return
                await asyncio.sleep(self._pause)

    async def _answered(
        self, http: httpx2.AsyncClient, asked: Json, turn: Turn, *, is_first: bool, leaves: bool
    ) -> bool:
        """Whether the client has what it wanted. `is_first`: nobody of its tenant has asked anything yet."""
        said = await hear(http, asked, leaves=leaves)
        if said.fault is not None:
            self.faults.append(said.fault)
        if not turn.answer.startswith(said.text) or (said.is_whole and said.text != turn.answer):
            self.faults.append(f"told {said.text!r} instead of {turn.answer!r}")
        if said.trouble is not None:
            self.troubles[said.trouble] += 1
        if said.usage is not None:
            cached = said.usage["prompt_tokens_details"]["kvtier"]
            self.cached.update(cached)
            if is_first and any(cached.values()) and not await _is_retrying(http):
                self.faults.append(f"a new tenant was given {cached}")
        return said.is_whole or (leaves and said.trouble is None)


@contextmanager
def crowd(
    url: str, talks: Sequence[Sequence[Turn]], num_clients: int = NUM_CLIENTS, headers: Mapping[str, str] | None = None
) -> Iterator[Crowd]:
    """Clients that have all been answered once; none of them was ever told anything wrong."""
    made = Crowd(url, talks, num_clients=num_clients, headers=headers)
    try:
        made.everybody()
        yield made
    finally:
        made.end()


async def hear(http: httpx2.AsyncClient, asked: Json, *, leaves: bool = False) -> Said:
    """Ask, and read to the end, or `leaves` after the first words of a stream."""
    said = Said()
    try:
        async with http.stream("POST", _PATH, json=asked) as answer:
            if answer.status_code != 200 or "stream" not in asked:
                await answer.aread()
                return _whole(answer)
            async with aclosing(_stream(answer)) as words:
                async for said in words:
                    if leaves and said.text:
                        return said
    except httpx2.TimeoutException:
        return Said(said.text, fault=f"{HANG} for {_ANSWER:g} s")
    except httpx2.TransportError as error:
        return Said(said.text, trouble=type(error).__name__)
    if not said.is_whole and said.trouble is None:
        return Said(said.text, fault=f"a stream ended like a whole one after {said.text!r}")
    return said


def _whole(answer: httpx2.Response) -> Said:
    if answer.status_code == 200:
        told = answer.json()
        [choice] = told["choices"]
        assert choice["finish_reason"] in ("stop", "length")
        return Said(choice["message"]["content"], is_whole=True, usage=told["usage"])
    if answer.status_code not in _CLEAN:
        return Said(fault=f"{answer.status_code}: {answer.text}")
    return Said(trouble=_error(answer.json()))


async def _stream(answer: httpx2.Response) -> AsyncGenerator[Said, None]:
    """All that is known after each event. Whole is what has a reason for its end, usage, and [DONE]."""
    text, reason, usage = "", None, None
    async for line in answer.aiter_lines():
        if not line:
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            assert reason in ("stop", "length")
            assert usage is not None
            yield Said(text, is_whole=True, usage=usage)
            return
        event = json.loads(data)
        if "error" in event:
            yield Said(text, trouble=_error(event))
            return
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
        usage = event["usage"] or usage
        yield Said(text)


def _error(content: Json) -> str:
    """An error in OpenAI's shape, by its code."""
    error = content["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return str(error["code"])
