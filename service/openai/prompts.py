"""Text to tokens and back, by a checkpoint's own tokenizer and chat template, without torch and transformers.

transformers would load torch into every router. All it adds to `tokenizers` here is rendering the template
(`chat.py`).
"""

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

from jinja2 import TemplateError
from tokenizers import Tokenizer, pre_tokenizers

from kvtier.connector import AS_SENT, ChatPrefix
from kvtier.connector.models import REASONING_MARKS, Reasoning, ToolCalls, load_tokenizer
from kvtier.service import Json, writable
from kvtier.service.openai.bodies import AnyPrompt, ChatPrompt, CompletionPrompt
from kvtier.service.openai.chat import Chat, ChatTemplate, PromptPiece, TextTooLong, TokenizedPrompt, Turn, chat_pieces
from kvtier.service.openai.errors import OpenAIError, bad_field
from kvtier.tiers import ConfigError


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text may begin the mark."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)


CallForm = Literal["hermes", "llama"]

HERMES_MARK: Final = "<tool_call>"
LLAMA_MARK: Final = "<|python_tag|>"
_HERMES_END: Final = "</tool_call>"
MARKS: Final[dict[CallForm, tuple[str, ...]]] = {"hermes": (HERMES_MARK, _HERMES_END), "llama": (LLAMA_MARK,)}


@dataclass(frozen=True, slots=True)
class ToolCall:
    index: int  # in its answer
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @property
    def content(self) -> Json:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class AnswerPart:
    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class HermesReader:
    """Calls as `<tool_call>{…}</tool_call>` among text; the last end mark may be missing. `push`, then `end`."""

    def __init__(self, most: int | None = None) -> None:
        self.num_calls = 0
        self._most = most
        self._held = ""
        self._is_inside = False

    def push(self, text: str) -> AnswerPart:
        self._held += text
        texts: list[str] = []
        calls: list[ToolCall] = []
        while True:
            mark = _HERMES_END if self._is_inside else HERMES_MARK
            before, found, rest = self._held.partition(mark)
            if not found:
                break
            if self._is_inside:
                texts += self._close(before, HERMES_MARK + before + _HERMES_END, calls)
            else:
                texts.append(before.rstrip())
            self._is_inside, self._held = not self._is_inside, rest
        if not self._is_inside:
            certain = self._held[: len(self._held) - overlap(self._held, HERMES_MARK)].rstrip()
            texts.append(self._held[: len(certain)])
            self._held = self._held[len(certain) :]
        return AnswerPart("".join(texts), tuple(calls))

    def end(self) -> AnswerPart:
        calls: list[ToolCall] = []
        left, self._held = self._held, ""
        if self._is_inside:
            texts = self._close(left, HERMES_MARK + left, calls)
            return AnswerPart("".join(texts), tuple(calls))
        return AnswerPart("" if self.num_calls and not left.strip() else left)

    def _close(self, inside: str, whole: str, calls: list[ToolCall]) -> list[str]:
        try:
            name, arguments = _call_of(_read(inside), ("arguments", "parameters"))
        except (ValueError, RecursionError):
            return [whole]
        if self._most is None or self.num_calls < self._most:
            calls.append(ToolCall(self.num_calls, name, arguments))
            self.num_calls += 1
        return []


class LlamaReader:
    """The whole answer is `{"name": …, "parameters": {…}}`, one or more, and names the request's tools."""

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        self.num_calls = 0
        self._names, self._most = names, most
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> AnswerPart:
        if self._is_text:
            return AnswerPart(text)
        self._held += text
        begun = self._held.lstrip()
        if not begun or begun.startswith("{") or LLAMA_MARK.startswith(begun[: len(LLAMA_MARK)]):
            return AnswerPart()
        self._is_text, text, self._held = True, self._held, ""
        return AnswerPart(text)

    def end(self) -> AnswerPart:
        whole, self._held = self._held, ""
        try:
            found = list(self._calls(whole.strip().removeprefix(LLAMA_MARK)))
        except (ValueError, RecursionError):
            return AnswerPart(whole)
        calls = tuple(ToolCall(number, *call) for number, call in enumerate(found[: self._most]))
        self.num_calls = len(calls)
        return AnswerPart("", calls)

    def _calls(self, text: str) -> Iterator[tuple[str, str]]:
        decoder, left = json.JSONDecoder(parse_constant=_no_json), text.strip()
        if not left:
            raise ValueError("no call")
        while left:
            value, end = decoder.raw_decode(left)
            name, arguments = _call_of(value, ("parameters", "arguments"))
            if name not in self._names:
                raise ValueError("no tool of this name")
            yield name, arguments
            left = left[end:].lstrip("; \t\r\n")


class GuidedReader:
    """An answer that a guide made a call, or a list of calls; only a cut-off answer is anything else."""

    def __init__(self, chosen: str | None) -> None:
        """`chosen`: the tool whose arguments the answer is; None: it is a list of calls."""
        self.num_calls = 0
        self._chosen = chosen
        self._held = ""

    def push(self, text: str) -> AnswerPart:
        self._held += text
        return AnswerPart()

    def end(self) -> AnswerPart:
        whole, self._held = self._held, ""
        try:
            value = _read(whole)
            made = [{"name": self._chosen, "parameters": value}] if self._chosen is not None else value
            found = [_call_of(each, ("parameters", "arguments")) for each in made]
        except (ValueError, TypeError, RecursionError):
            return AnswerPart(whole)
        self.num_calls = len(found)
        return AnswerPart("", tuple(ToolCall(number, *call) for number, call in enumerate(found)))


CallReader = HermesReader | LlamaReader | GuidedReader


def _call_of(value: Any, names: tuple[str, str]) -> tuple[str, str]:
    """The name and the arguments, as JSON, of a call. ValueError if it is not a call; arguments may be missing."""
    name = value.get("name") if isinstance(value, dict) else None
    arguments: Any = next((value[each] for each in names if each in value), {}) if isinstance(value, dict) else None
    if isinstance(arguments, str):
        arguments = _read(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("no call")
    try:
        return writable(name), writable(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:  # half a surrogate in them: an answer can have it as an escape alone
        return writable(name), json.dumps(arguments, allow_nan=False)


def _read(text: str) -> Any:
    """The text parsed as JSON. ValueError if it is not JSON, or has NaN or Infinity."""
    return json.loads(text, parse_constant=_no_json)


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# --- single tokens as texts ------------------------------------------------------------------------------------------

_UNKNOWN: Final = "\ufffd"  # decoded from bytes that are no character
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte by its number, in vocabularies of SentencePiece
_MOST: Final = 1 << 16  # tokens that are remembered


class TokenTexts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.of = lru_cache(_MOST)(self._of)  # a token's text, and its bytes

    def _of(self, token_id: int) -> tuple[str, bytes]:
        alone: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        text: str = self._tokenizer.decode([token_id] * 2, skip_special_tokens=False)
        text = text[len(alone) :]  # SentencePiece's decoder drops a text's first space
        if _UNKNOWN not in text:
            return text, text.encode()
        word: str = self._tokenizer.id_to_token(token_id) or ""
        letters = _letters()
        if (byte := _BYTE.fullmatch(word)) is not None:
            return text, bytes.fromhex(byte[1])
        if word and all(letter in letters for letter in word):
            return text, bytes(letters[letter] for letter in word)
        return text, text.encode()


@lru_cache(1)
def _letters() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    found = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    found |= {chr(256 + number): byte for number, byte in enumerate(others)}
    assert set(found) == set(pre_tokenizers.ByteLevel.alphabet())
    return found


# --- prompts ---------------------------------------------------------------------------------------------------------

_CHARACTER: Final = 4  # most tokens of one character: its bytes
_NEAR: Final = 16  # of a prompt's last tokens: some of them are no special ones
_RUBBISH: Final = 16  # after so many tokens without a whole character, the bytes are invalid
_THOUGHT: Final = "kvtierthinks"  # letters alone, which templates leave as they are
# What an answer has besides its text, and what follows it: another question, or a tool's result.
_LATER: Final[Sequence[Turn]] = ({}, {"role": "user", "content": "3+3"})
_CALL: Final = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": {}}}
_IN_CALLS: Final[Sequence[Turn]] = (
    {"tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abcdef123", "content": "4"},
)
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Prompts:
    """One checkpoint's tokenizer and template. Thread-safe; tokenizing releases the GIL.

    `context` is the model's length in tokens. A text with more characters than so many tokens can have is refused
    before it is tokenized. Tokenizing takes about 100 bytes of memory and a microsecond for each character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, ChatTemplate],
        context: int | None,
        prefix: ChatPrefix = AS_SENT,
    ) -> None:
        """`templates` by name: `default`, and `tool_use` if there is a separate one for requests with tools."""
        self.prefix = prefix  # how bodies' chats begin
        self.calls_tool = ToolCalls(tokenizer)
        self.token_texts = TokenTexts(tokenizer)
        self._tokenizer, self._templates, self._context = tokenizer, templates, context
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)  # characters of a token
        added = tokenizer.get_added_tokens_decoder()
        # The special tokens, which templates write; answers do not show them.
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def open(cls, directory: Path, prefix: ChatPrefix = AS_SENT) -> "Prompts":
        """Open a checkpoint directory, with or without a template. Raises ConfigError if one of its files is bad."""
        if not (directory / "tokenizer.json").is_file():
            raise ConfigError(f'--model "{directory}": no tokenizer.json there; save the tokenizer with the model')
        tokenizer = load_tokenizer(directory)
        settings = _settings(directory)
        special = {name: text for name in _SPECIAL if (text := _content(settings.get(name))) is not None}
        extra = settings.get("extra_special_tokens")
        special |= {name: text for name, one in _items(extra) if (text := _content(one)) is not None}
        try:
            sources = _template_sources(directory, settings)
            templates = {name: ChatTemplate(source, special) for name, source in sources.items()}
        except (TemplateError, OSError, ValueError, RecursionError) as error:
            raise ConfigError(f'--model "{directory}": its chat template cannot be read ({error}); fix it') from None
        return cls(tokenizer, templates, _context(directory), prefix)

    def tokenized(self, body: CompletionPrompt | ChatPrompt) -> list[TokenizedPrompt]:
        """The chat, or every prompt. Raises OpenAIError if one cannot be tokenized."""
        if isinstance(body, ChatPrompt):
            return [self.chat(body.chat(self.prefix))]
        return [self.prompt(prompt) for prompt in body.prompts]

    def prompt(self, prompt: AnyPrompt, *, add_special_tokens: bool = True) -> TokenizedPrompt:
        if isinstance(prompt, list):
            return TokenizedPrompt(prompt)
        return self._joined("prompt", [PromptPiece(prompt)] if isinstance(prompt, str) else prompt, add_special_tokens)

    def chat(self, chat: Chat) -> TokenizedPrompt:
        return self._joined("messages", self._pieces(chat), chat.add_special_tokens)

    def segment(self, param: str, text: str) -> list[int]:
        """A text's tokens, the same in every prompt that marks it."""
        return self._encode(param, text, add_special_tokens=False)

    @property
    def takes_tools(self) -> bool:
        return any(template.says("tools") for template in self._templates.values())

    def _pieces(self, chat: Chat) -> list[PromptPiece]:
        has_own = chat.tools is not None and "tool_use" in self._templates
        template = self._templates.get("tool_use" if has_own else "default")
        if template is None:
            why = "this model has no chat template; use /v1/completions, or save one with its tokenizer"
            raise bad_field("messages", why, "unsupported_parameter")
        limit = () if self._context is None else (self._context * self._longest,)
        try:
            return chat_pieces(chat, lambda each: template.render(each, *limit))
        except TextTooLong as error:
            raise self._too_long("messages", int(error.args[0])) from None
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:  # raised by the template
            raise OpenAIError(400, f"messages: the model's template refuses them: {error}", param="messages") from None

    def text(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's string in the vocabulary; empty for an unknown id."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(self, prompt: Sequence[int], shown: Sequence[str] = ()) -> "Detokenizer":
        """For an answer to this prompt. `shown`: special tokens that stay in the text."""
        spoken = {token_id: text for text in shown if (token_id := self._tokenizer.token_to_id(text)) is not None}
        return Detokenizer(self._tokenizer, self.special - set(spoken), spoken, prompt)

    def tokenizer_json(self) -> str:
        text: str = self._tokenizer.to_str()
        return text

    def reasoning(self) -> Reasoning | None:
        """How answers reason, if the template drops it from later turns. None: it keeps it, or this is not known."""
        for marks in REASONING_MARKS:
            begins, ends = (self._tokenizer.token_to_id(mark) for mark in marks)
            if begins is not None and ends is not None and not self._keeps_reasoning(marks, _LATER):
                return Reasoning(begins, ends, self._keeps_reasoning(marks, _IN_CALLS))
        return None

    def _keeps_reasoning(self, marks: tuple[str, str], turns: Sequence[Turn]) -> bool:
        """Whether the template may write the reasoning of an answer sent back before these turns."""
        answer: Turn = {"role": "assistant", "content": f"{marks[0]}\n{_THOUGHT}\n{marks[1]}\n\n4", **turns[0]}
        try:
            pieces = self._pieces(Chat([{"role": "user", "content": "2+2"}, answer, *turns[1:]]))
        except OpenAIError:
            return True
        return any(_THOUGHT in piece.text for piece in pieces)

    @property
    def call_form(self) -> CallForm | None:
        """How this model writes tool calls, by its template and vocabulary; None: not known."""
        for form, (mark, *_) in MARKS.items():
            if self._tokenizer.token_to_id(mark) is not None or any(
                each.says(mark) for each in self._templates.values()
            ):
                return form
        return None

    def _joined(self, param: str, pieces: Sequence[PromptPiece], add_special_tokens: bool) -> TokenizedPrompt:
        if len(pieces) == 1 and not pieces[0].is_segment:
            return TokenizedPrompt(self._encode(param, pieces[0].text, add_special_tokens=add_special_tokens))
        self._require_length(param, sum(len(piece.text) for piece in pieces))
        before, behind = self._around() if add_special_tokens else ([], [])
        token_ids, segments = list(before), []
        for piece in pieces:
            made = self._encode(piece.field or param, piece.text, add_special_tokens=False)
            if piece.is_segment:
                if not made:
                    raise bad_field(piece.field, "a segment without tokens; write some text, or leave out its mark")
                segments.append((len(token_ids), len(token_ids) + len(made)))
            token_ids += made
        return TokenizedPrompt(token_ids + behind, segments)

    def _around(self) -> tuple[list[int], list[int]]:
        bare, full = (self._encode("prompt", "a", add_special_tokens=adds) for adds in (False, True))
        places = (at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare)
        at = next(places, len(full))
        return full[:at], full[at + len(bare) :]

    def _encode(self, param: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self._require_length(param, len(text))
        try:
            writable(text)
        except ValueError as error:  # a chat's parts may hold anything that JSON allows
            raise bad_field(param, str(error)) from None
        # `encode` keeps the GIL, which would stop every other thread
        (made,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = made.ids
        return ids

    def _require_length(self, param: str, length: int) -> None:
        if self._context is not None and length > self._context * self._longest:
            raise self._too_long(param, length)

    def _too_long(self, param: str, length: int) -> OpenAIError:
        context = "" if self._context is None else f"; the model's context is {self._context} tokens"
        return bad_field(param, f"{length} characters{context}: shorten it", "context_length_exceeded")


class Detokenizer:
    """Decodes an answer piece by piece. No piece ends within a character; all pieces together are the whole text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        silent: frozenset[int] = frozenset(),
        spoken: Mapping[int, str] | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        """`silent` are special tokens, which have no text and are left out of decoding; `spoken` ones have one.

        The answer's text is what it adds to the prompt's: SentencePiece's decoder drops a text's first space.
        """
        self._tokenizer, self._silent = tokenizer, silent
        self._spoken = spoken or {}
        self._ids: list[int] = []  # not returned yet, after the last returned ones: a decoder needs these as context
        self._num_context = 0
        self._num_returned = 0  # characters of their text that were returned
        self._follow([each for each in prompt[-_NEAR:] if each not in silent and each not in self._spoken])

    def push(self, token_id: int) -> str:
        if token_id in self._silent:
            return ""
        if token_id in self._spoken:
            before = self._text()[self._num_returned :]
            self._follow(self._ids)
            return before + self._spoken[token_id]
        self._ids.append(token_id)
        text = self._text()
        certain = text.rstrip(_UNKNOWN)  # the next token may complete the character
        is_rubbish = certain != text and len(self._ids) - self._num_context > _RUBBISH
        if is_rubbish:
            certain = text[:-1]  # bytes that are not a character yet never will be, except perhaps the last
        piece = certain[self._num_returned :]
        self._num_returned = max(self._num_returned, len(certain))
        if is_rubbish or (piece and certain == text):  # keep the context short
            self._ids = self._ids[-_CHARACTER:] if is_rubbish else self._ids[self._num_context :]
            self._num_context = len(self._ids)
            self._num_returned = len(self._text()) - is_rubbish
        return piece

    def end(self) -> str:
        piece, self._ids = self._text()[self._num_returned :], []
        return piece

    def _follow(self, ids: list[int]) -> None:
        """Decode later tokens as those after these, whose text was returned."""
        self._ids = ids[-_CHARACTER:]
        if self._text().endswith(_UNKNOWN):  # a later token must not complete it
            self._ids = []
        self._num_context, self._num_returned = len(self._ids), len(self._text())

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f'--model "{directory}": tokenizer_config.json cannot be read ({error}); fix it') from None
    return settings if isinstance(settings, dict) else {}


def _context(directory: Path) -> int | None:
    try:
        context = json.loads((directory / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return context if isinstance(context, int) else None


def _template_sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name, from every place where transformers looks. Raises OSError or ValueError."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        others = (directory / "additional_chat_templates").glob("*.jinja")
        paths = {"default": path} | {other.stem: other for other in others}
        return {name: each.read_text(encoding="utf-8") for name, each in paths.items()}
    template, of_processor = settings.get("chat_template"), directory / "chat_template.json"
    if template is None and of_processor.is_file():
        template = dict(_items(json.loads(of_processor.read_text(encoding="utf-8")))).get("chat_template")
    if isinstance(template, list):  # several by name
        named = [dict(_items(one)) for one in template]
        template = {str(one.get("name")): one.get("template") for one in named}
    found = dict(_items(template)) if isinstance(template, dict) else {"default": template}
    return {name: source for name, source in found.items() if isinstance(source, str)}


def _items(value: object) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
