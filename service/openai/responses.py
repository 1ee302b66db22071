"""`POST /v1/responses`, OpenAI's newer API, as a translation to a chat and back: nothing is kept between requests."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, Tag

from kvtier.service import Json, writable
from kvtier.service.openai.bodies import (
    CACHING,
    MAX_LIST,
    ApiCacheSalt,
    ChatReuse,
    Content,
    Off,
    Text,
    TextOr,
    TokenLimit,
    Tolerant,
    by_kind,
    by_type,
    must_be,
    sent_content,
)
from kvtier.service.openai.errors import OpenAIError


class _InputItem(Tolerant):
    neutral = frozenset(["encrypted_content", "id", "phase", "status", "summary"])


class _Said(_InputItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class _Called(_InputItem):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class _Output(_InputItem):
    type: Literal["function_call_output"]
    call_id: Text
    output: Content


class _Reasoned(_InputItem):
    type: Literal["reasoning"]
    content: list[Any] | None = None

    @property
    def text(self) -> str:
        parts = self.content or ()
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))


_Item = Annotated[
    Annotated[_Said, Tag("=message")]
    | Annotated[_Called, Tag("=function_call")]
    | Annotated[_Output, Tag("=function_call_output")]
    | Annotated[_Reasoned, Tag("=reasoning")],
    by_type(
        "input",
        "not an item of type message, function_call, function_call_output or reasoning",
        *("message", "function_call", "function_call_output", "reasoning"),
        default="message",
    ),
]


def _as_json(value: Json) -> Json:
    """What the answer repeats has to be JSON: the parser takes NaN and half a surrogate."""
    writable(json.dumps(value, ensure_ascii=False, allow_nan=False))
    return value


class _Tool(Tolerant):
    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_as_json)] | None = None
    strict: bool | None = None


class _Choice(Tolerant):
    type: Literal["function"]
    name: Text


class _Format(Tolerant):
    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @property
    def of_chat(self) -> Json:
        given = {"name": self.name or "answer", "schema": self.schema_}
        return {"type": self.type, **({"json_schema": given} if self.type == "json_schema" else {})}


class _TextOptions(Tolerant):
    neutral = frozenset(["verbosity"])
    format: _Format | None = None


class _Reasoning(Tolerant):
    neutral = frozenset(["generate_summary", "summary"])
    effort: Text | None = None


_AS_ITEMS: Final = "send the turns in input instead: nothing is kept here"


class ResponsesBody(Tolerant):
    """The body of a request, and how its answer looks."""

    neutral = frozenset([*CACHING, "include", "safety_identifier", "service_tier", "store", "stream_options", "user"])

    model: Text
    input: TextOr[Annotated[list[_Item], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)]]
    instructions: Text | None = None
    max_output_tokens: TokenLimit | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    tools: Annotated[list[_Tool], Field(max_length=1024)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("=word")] | Annotated[_Choice, Tag("=tool")],
            by_kind(
                "tool_choice",
                "not none, auto, required or a function's name",
                lambda value: "=word" if isinstance(value, str) else "=tool" if isinstance(value, dict) else None,
            ),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: _TextOptions | None = None
    reasoning: _Reasoning | None = None
    previous_response_id: Annotated[None, must_be(fix=_AS_ITEMS)] = None
    conversation: Annotated[None, must_be(fix=_AS_ITEMS)] = None
    prompt: Annotated[None, must_be()] = None
    background: Off = None
    truncation: Annotated[None, must_be("disabled")] = None
    top_logprobs: Annotated[None, must_be(0)] = None
    max_tool_calls: Annotated[None, must_be()] = None
    metadata: Annotated[dict[Text, Text], Field(max_length=16)] | None = None
    # kvtier's own, as in a chat
    cache_salt: ApiCacheSalt | None = None
    kvtier: ChatReuse | None = None

    names: ClassVar[Mapping[str, str]] = {  # of fields: a chat's, and this API's
        r"messages\b.*": "input",
        r"response_format(\.json_schema)?": "text.format",
        r"(tools\.\d+)\.function": r"\1",
    }

    @property
    def chat(self) -> Json:
        """The body of the chat that is the same request."""
        turns: list[Json] = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            turns.append({"role": "user", "content": self.input})
        else:
            for item in self.input:
                _add(turns, item)
        same = ("temperature", "top_p", "cache_salt", "parallel_tool_calls")
        chat: Json = {"model": self.model, "messages": turns}
        chat |= {name: value for name in same if (value := getattr(self, name)) is not None}
        if self.max_output_tokens is not None:
            chat["max_completion_tokens"] = self.max_output_tokens
        if self.kvtier is not None:
            chat["kvtier"] = self.kvtier.model_dump(mode="json", exclude_none=True)
        if self.tools:
            chat["tools"] = [{"type": "function", "function": _function(tool)} for tool in self.tools]
        if isinstance(self.tool_choice, _Choice):
            chat["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            chat["tool_choice"] = self.tool_choice
        if self.text is not None and self.text.format is not None:
            chat["response_format"] = self.text.format.of_chat
        if self.reasoning is not None and self.reasoning.effort is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        return chat | ({"stream": True, "stream_options": {"include_usage": True}} if self.stream else {})

    def head(self, chat: Json, status: str) -> Json:
        tools = [{"type": "function", "strict": bool(tool.strict), **_function(tool)} for tool in self.tools or ()]
        chosen = self.tool_choice
        return {
            "id": f"resp_{chat['id']}",
            "object": "response",
            "created_at": chat["created"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "model": chat["model"],
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "tool_choice": chosen.model_dump() if isinstance(chosen, _Choice) else chosen or "auto",
            "tools": tools,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def ended(self, chat: Json, output: list[Json], reason: str, usage: Json) -> Json:
        """The response when the answer is whole."""
        is_cut = reason == "length"
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        head = self.head(chat, "incomplete" if is_cut else "completed")
        return {**head, **details, "output": output, "usage": _usage(usage)}

    def whole(self, chat: Json) -> Json:
        [choice] = chat["choices"]
        message, output = choice["message"], list[Json]()
        if message["content"] or not message.get("tool_calls"):
            output.append(_message(f"msg_{chat['id']}", message["content"] or ""))
        output += [_call_item(call) for call in message.get("tool_calls", ())]
        return self.ended(chat, output, choice["finish_reason"], chat["usage"])

    def stream_of(self) -> "ResponseStream":
        return ResponseStream(self)

    @staticmethod
    def refused(error: OpenAIError) -> Json:
        return error.content


class ResponseStream:
    """A chat's chunks as a response's events: each output item is added, filled and done."""

    def __init__(self, body: ResponsesBody) -> None:
        self._body = body
        self._number = 0
        self._output: list[Json] = []
        self._text: str | None = None  # of the message under way
        self._chunk: Json = {}
        self._reason = ""
        self._usage: Json = {}

    def push(self, chunk: Json) -> Iterator[tuple[str, Json]]:
        if not self._chunk:
            self._chunk = chunk
            for kind in ("created", "in_progress"):
                yield self._event(f"response.{kind}", response=self._body.head(chunk, "in_progress"))
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                yield from self._begin_text()
                self._text = (self._text or "") + text
                yield self._event("response.output_text.delta", **self._part, delta=text, logprobs=[])
            for call in choice["delta"].get("tool_calls", ()):
                yield from self._end_text()
                yield from self._called(call)
            if choice["finish_reason"] is not None:
                self._reason = choice["finish_reason"]
                if not self._output:
                    yield from self._begin_text()
                yield from self._end_text()
        self._usage = chunk.get("usage") or self._usage

    def end(self) -> Iterator[tuple[str, Json]]:
        response = self._body.ended(self._chunk, self._output, self._reason, self._usage)
        yield self._event(f"response.{response['status']}", response=response)

    def _begin_text(self) -> Iterator[tuple[str, Json]]:
        if self._text is None:
            self._text = ""
            empty = {**_message(self._id, ""), "status": "in_progress", "content": []}
            yield self._event("response.output_item.added", output_index=len(self._output), item=empty)
            yield self._event("response.content_part.added", **self._part, part=_text_part(""))

    def _end_text(self) -> Iterator[tuple[str, Json]]:
        if self._text is not None:
            text, self._text = self._text, None
            yield self._event("response.output_text.done", **self._part, text=text, logprobs=[])
            yield self._event("response.content_part.done", **self._part, part=_text_part(text))
            yield from self._done(_message(self._id, text))

    def _called(self, call: Json) -> Iterator[tuple[str, Json]]:
        item, at = _call_item(call), {"output_index": len(self._output)}
        named = {**at, "item_id": item["id"]}
        yield self._event("response.output_item.added", **at, item={**item, "status": "in_progress", "arguments": ""})
        yield self._event("response.function_call_arguments.delta", **named, delta=item["arguments"])
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield self._event("response.function_call_arguments.done", **named, **done)
        yield from self._done(item)

    def _done(self, item: Json) -> Iterator[tuple[str, Json]]:
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    @property
    def _id(self) -> str:
        return f"msg_{self._chunk['id']}_{len(self._output)}"

    @property
    def _part(self) -> Json:
        return {"item_id": self._id, "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, **content: Any) -> tuple[str, Json]:
        self._number += 1
        return kind, {"sequence_number": self._number - 1, **content}


def _add(turns: list[Json], item: Any) -> None:
    """Add an item to the turns of a chat. What an assistant said and called is one turn."""
    last = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
    has_said = last is not None and ("content" in last or "tool_calls" in last)
    if isinstance(item, _Reasoned) and not item.text:
        return
    if isinstance(item, _Output):
        turns.append({"role": "tool", "tool_call_id": item.call_id, "content": sent_content(item.output)})
    elif isinstance(item, _Said) and item.role != "assistant":
        turns.append({"role": item.role, "content": sent_content(item.content)})
    else:
        if last is None or (has_said and not isinstance(item, _Called)):
            turns.append({"role": "assistant"})
        if isinstance(item, _Reasoned):
            turns[-1]["reasoning"] = turns[-1].get("reasoning", "") + item.text
        elif isinstance(item, _Called):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turns[-1]["tool_calls"] = [*turns[-1].get("tool_calls", ()), call]
        else:
            turns[-1]["content"] = sent_content(item.content)


def _function(tool: _Tool) -> Json:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(name: str, text: str) -> Json:
    head = {"id": name, "type": "message", "status": "completed", "role": "assistant"}
    return {**head, "content": [_text_part(text)]}


def _call_item(call: Json) -> Json:
    names = {"id": f"fc_{call['id']}", "call_id": call["id"], "type": "function_call", "status": "completed"}
    return {**names, "name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
