"""`POST /v1/messages`, Anthropic's API, as a translation to a chat and back. https://docs.anthropic.com/en/api/messages"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, Tag, model_validator

from kvtier.service import Json
from kvtier.service.openai.bodies import (
    MAX_LIST,
    ApiCacheSalt,
    CacheMark,
    ChatReuse,
    Stop,
    Text,
    TextOr,
    TextPart,
    TokenLimit,
    Tolerant,
    by_type,
    must_be,
    sent_content,
)
from kvtier.service.openai.errors import OpenAIError

_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_EPHEMERAL: Final = {"type": "ephemeral"}


class _ToolUse(Tolerant):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]
    cache_control: CacheMark = False


class _Thinking(Tolerant):
    neutral = frozenset(["signature"])
    type: Literal["thinking"]
    thinking: Text


class _Redacted(Tolerant):
    type: Literal["redacted_thinking"]  # nobody here can read it


_TextBlocks = Annotated[list[TextPart], Field(max_length=MAX_LIST)]


class _ToolResult(Tolerant):
    neutral = frozenset(["is_error"])
    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextOr[_TextBlocks] = ""
    cache_control: CacheMark = False


_Block = Annotated[
    Annotated[TextPart, Tag("=text")]
    | Annotated[_ToolUse, Tag("=tool_use")]
    | Annotated[_ToolResult, Tag("=tool_result")]
    | Annotated[_Thinking, Tag("=thinking")]
    | Annotated[_Redacted, Tag("=redacted_thinking")],
    by_type(
        "content",
        "not a block of type text, tool_use, tool_result or thinking; leave it out",
        *("text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
    ),
]


_BLOCKS: Final = {"user": (TextPart, _ToolResult), "assistant": (TextPart, _ToolUse, _Thinking, _Redacted)}


class _Message(Tolerant):
    role: Literal["user", "assistant", "system"]
    content: TextOr[Annotated[list[_Block], Field(min_length=1, max_length=MAX_LIST)]]

    @model_validator(mode="after")
    def _has_its_blocks(self) -> Self:
        known = _BLOCKS.get(self.role, TextPart)
        blocks = self.content if isinstance(self.content, list) else []
        if wrong := next((block.type for block in blocks if not isinstance(block, known)), None):
            raise ValueError(f"content: a block of type {wrong} in a turn of role {self.role}; leave it out")
        return self


class _Tool(Tolerant):
    type: Literal["custom"] | None = None
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any]
    cache_control: CacheMark = False


class _Choice(Tolerant):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class _ThinkingOption(Tolerant):
    neutral = frozenset(["budget_tokens"])
    type: Literal["enabled", "disabled", "adaptive"]


class CountBody(Tolerant):
    """`POST /v1/messages/count_tokens`."""

    model: Text
    messages: Annotated[list[_Message], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)]
    system: TextOr[_TextBlocks] | None = None
    tools: Annotated[list[_Tool], Field(max_length=1024)] | None = None
    tool_choice: _Choice | None = None
    thinking: _ThinkingOption | None = None
    cache_control: CacheMark = False

    names: ClassVar[Mapping[str, str]] = {  # of fields: a chat's, and this API's; a turn has other numbers there
        r"messages\..*": "messages",
        r"(tools\.\d+)\.function\.parameters": r"\1.input_schema",
        r"(tools\.\d+)\.function": r"\1",
    }

    @property
    def prompt(self) -> Json:
        """The fields of a chat that decide its tokens."""
        turns = [] if self.system in (None, []) else [{"role": "system", "content": sent_content(self.system)}]
        for message in self.messages:
            turns += _turns(message)
        chat: Json = {"model": self.model, "messages": turns}
        if self.tools:
            chat["tools"] = [_tool(tool) for tool in self.tools]
        if self.thinking is not None and self.thinking.type != "adaptive":
            chat["chat_template_kwargs"] = {"enable_thinking": self.thinking.type == "enabled"}
        if turns[-1]["role"] == "assistant" and turns[-1].get("content"):  # the answer goes on with it
            chat |= {"add_generation_prompt": False, "continue_final_message": True}
        return chat


class MessagesBody(CountBody):
    """The body of a request, and how its answer looks."""

    neutral = frozenset(["context_management", "metadata", "output_config", "service_tier"])

    max_tokens: TokenLimit
    stop_sequences: Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    mcp_servers: Annotated[None, must_be([])] = None
    container: Annotated[None, must_be()] = None
    # kvtier's own, as in a chat
    cache_salt: ApiCacheSalt | None = None
    kvtier: ChatReuse | None = None

    @property
    def chat(self) -> Json:
        """The body of the chat that is the same request."""
        same = ("max_tokens", "temperature", "top_p", "top_k", "cache_salt")
        chat = self.prompt | {name: value for name in same if (value := getattr(self, name)) is not None}
        if self.stop_sequences:
            chat["stop"] = self.stop_sequences
        if self.kvtier is not None:
            chat["kvtier"] = self.kvtier.model_dump(mode="json", exclude_none=True)
        if self.is_marked:
            chat["cache_control"] = _EPHEMERAL
        if self.tool_choice is not None:
            words: Json = {"any": "required"}
            named = {"type": "function", "function": {"name": self.tool_choice.name or ""}}
            kind = self.tool_choice.type
            chat["tool_choice"] = named if kind == "tool" else words.get(kind, kind)
            if self.tool_choice.disable_parallel_tool_use:
                chat["parallel_tool_calls"] = False
        return chat | ({"stream": True, "stream_options": {"include_usage": True}} if self.stream else {})

    @property
    def is_marked(self) -> bool:
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        return any(getattr(each, "cache_control", False) for each in (self, *blocks, *(self.tools or ())))

    def whole(self, chat: Json) -> Json:
        [choice] = chat["choices"]
        message, content = choice["message"], list[Json]()
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        content += [_used(call, json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())]
        return {**_head(chat), "content": content, **_ending(choice), "usage": _usage(chat["usage"])}

    def stream_of(self) -> "MessageStream":
        return MessageStream()

    @staticmethod
    def refused(error: OpenAIError) -> Json:
        """An error in this API's form."""
        return error.anthropic_content


class MessageStream:
    """A chat's chunks as a message's events: each block starts, gets deltas and stops."""

    def __init__(self) -> None:
        self._has_begun = False
        self._num_blocks = 0
        self._is_open = False  # a block of text
        self._ending: Json = {}

    def push(self, chunk: Json) -> Iterator[tuple[str, Json]]:
        if not self._has_begun:
            self._has_begun = True
            usage = {"input_tokens": 0, "output_tokens": 0}  # known at the end: `message_delta` has them
            empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield "message_start", {"message": {**_head(chunk), **empty}}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if text := delta.get("content"):
                if not self._is_open:
                    yield from self._start({"type": "text", "text": ""})
                    self._is_open = True
                yield self._delta({"type": "text_delta", "text": text})
            for call in delta.get("tool_calls", ()):
                yield from self._stop()
                yield from self._start(_used(call, {}))
                self._is_open = True
                yield self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
                yield from self._stop()
            if choice["finish_reason"] is not None:
                yield from self._stop()
                self._ending = _ending(choice)
        if chunk.get("usage"):
            yield "message_delta", {"delta": self._ending, "usage": _usage(chunk["usage"])}

    def end(self) -> Iterator[tuple[str, Json]]:
        yield "message_stop", {}

    def _start(self, block: Json) -> Iterator[tuple[str, Json]]:
        yield "content_block_start", {"index": self._num_blocks, "content_block": block}

    def _delta(self, delta: Json) -> tuple[str, Json]:
        return "content_block_delta", {"index": self._num_blocks, "delta": delta}

    def _stop(self) -> Iterator[tuple[str, Json]]:
        if self._is_open:
            yield "content_block_stop", {"index": self._num_blocks}
            self._num_blocks += 1
            self._is_open = False


def _head(chat: Json) -> Json:
    return {"id": f"msg_{chat['id']}", "type": "message", "role": "assistant", "model": chat["model"]}


def _ending(choice: Json) -> Json:
    stopped_by = choice.get("stop_reason")
    reason = _REASONS[choice["finish_reason"]] if stopped_by is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stopped_by}


def _used(call: Json, given: Json) -> Json:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}


def _usage(usage: Json) -> Json:
    """Here cached tokens are not among the input tokens."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    num_input, num_output = usage["prompt_tokens"] - cached, usage["completion_tokens"]
    counts = {"input_tokens": num_input, "output_tokens": num_output, "cache_read_input_tokens": cached}
    return {**counts, "cache_creation_input_tokens": 0}


def _tool(tool: _Tool) -> Json:
    about = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **about, "parameters": tool.input_schema}}


def _turns(message: _Message) -> list[Json]:
    """A message as turns of a chat: each tool's result is one."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts = [block for block in message.content if isinstance(block, TextPart)]
    results = [block for block in message.content if isinstance(block, _ToolResult)]
    turns: list[Json] = [
        {"role": "tool", "tool_call_id": each.tool_use_id, "content": sent_content(each.content) or ""}
        for each in results
    ]
    turn: Json = {"role": message.role, **({"content": sent_content(texts)} if texts else {})}
    if message.role == "assistant":
        thoughts = [block.thinking for block in message.content if isinstance(block, _Thinking)]
        used = [block for block in message.content if isinstance(block, _ToolUse)]
        turn |= {"reasoning": "".join(thoughts)} if thoughts else {}
        turn |= {"tool_calls": [_call(each) for each in used]} if used else {}
        return [*turns, turn]
    return [*turns, turn] if texts else turns


def _call(used: _ToolUse) -> Json:
    return {"id": used.id, "type": "function", "function": {"name": used.name, "arguments": json.dumps(used.input)}}
