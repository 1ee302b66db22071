"""Text to tokens and back, as a checkpoint's own tokenizer and chat template have it: no torch, no transformers.

transformers would bring torch into every router; what it adds to `tokenizers` here is the rendering of the template,
and that is jinja2's sandbox with four helpers.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvtier.connector.tokenizer import load_tokenizer
from kvtier.service.openai_bodies import ChatPrompt, CompletionPrompt, Message
from kvtier.service.openai_errors import OpenAIError
from kvtier.tiers.errors import ConfigError

_UNKNOWN: Final = "\ufffd"  # what stands for bytes that are no character, or not yet
_CHARACTER: Final = 4  # tokens a character may have: its bytes
_RUBBISH: Final = 16  # tokens without a character's end, in a row: they are none
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Prompts:
    """One checkpoint's tokenizer and template. Thread-safe; tokenizing releases the GIL.

    `context`: the model's tokens; a text of more characters than they can stand for is refused before it is tokenized,
    which takes some hundred bytes of memory and a microsecond for each.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: Template | None, special_tokens: dict[str, str], context: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = special_tokens
        self._context = context
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)  # characters of a token
        added = tokenizer.get_added_tokens_decoder()
        self._silent = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def open(cls, directory: Path) -> "Prompts":
        """Of a checkpoint directory. ConfigError where tokenizer or template cannot be used; a template may lack."""
        if not (directory / "tokenizer.json").is_file():
            raise ConfigError(f'--model "{directory}": no tokenizer.json there; save the tokenizer with the model')
        tokenizer = load_tokenizer(directory)
        tokenizer.no_truncation()  # what is too long is refused, never cut
        tokenizer.no_padding()
        settings = _settings(directory)
        special = {name: text for name in _SPECIAL if (text := _content(settings.get(name))) is not None}
        source = _template_source(directory, settings)
        try:
            template = None if source is None else _environment().from_string(source)
        except TemplateError as error:
            raise ConfigError(f'--model "{directory}": its chat template cannot be read ({error}); mend it') from None
        return cls(tokenizer, template, special, _context(directory))

    def tokens(self, body: CompletionPrompt | ChatPrompt) -> list[int]:
        """The tokens of the chat, or of the first prompt. OpenAIError for what cannot be made tokens of."""
        return self.chat(body.messages) if isinstance(body, ChatPrompt) else self._encode("prompt", body.prompts[0])

    def all_tokens(self, body: CompletionPrompt | ChatPrompt) -> list[list[int]]:
        """Those of every prompt."""
        if isinstance(body, ChatPrompt):
            return [self.chat(body.messages)]
        return [self._encode("prompt", prompt) for prompt in body.prompts]

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a chat that the assistant is to go on with."""
        if self._template is None:
            why = "this model has no chat template; use /v1/completions, or save one with its tokenizer"
            raise OpenAIError(400, f"messages: {why}", param="messages", code="unsupported_parameter")
        turns = [message.turn for message in messages]
        try:
            text = self._template.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:  # of the model's own program
            raise OpenAIError(400, f"messages: the model's template refuses them: {error}", param="messages") from None
        return self._encode("messages", text)

    def detokenizer(self) -> "Detokenizer":
        """For one answer."""
        return Detokenizer(self._tokenizer, self._silent)

    def _encode(self, param: str, prompt: str | list[int]) -> list[int]:
        """A template writes the special tokens itself."""
        if isinstance(prompt, list):
            return prompt
        if self._context is not None and len(prompt) > self._context * self._longest:
            message = f"{param}: {len(prompt)} characters; the model's context is {self._context} tokens: shorten it"
            raise OpenAIError(400, message, param=param, code="context_length_exceeded")
        # encode itself keeps the GIL: every thread would stand still
        (made,) = self._tokenizer.encode_batch_fast([prompt], add_special_tokens=param == "prompt")
        ids: list[int] = made.ids
        return ids


class Detokenizer:
    """An answer's text, piece by piece; no piece ends within a character. All of them are the whole text."""

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int] = frozenset()) -> None:
        """`silent`: special tokens; they are no text, and a decoder does not look at them."""
        self._tokenizer = tokenizer
        self._silent = silent
        self._ids: list[int] = []  # what is not told, behind what was told last: a decoder looks back
        self._num_context = 0
        self._num_told = 0  # characters of their text

    def push(self, token_id: int) -> str:
        """The text that is certain with one more token."""
        if token_id in self._silent:
            return ""
        self._ids.append(token_id)
        text = self._text()
        certain = text.rstrip(_UNKNOWN)  # the rest of a character may be in the next token
        is_rubbish = certain != text and len(self._ids) - self._num_context > _RUBBISH
        if is_rubbish:
            certain = text[:-1]  # what is no character by now never will be, but for the last sign
        piece = certain[self._num_told :]
        self._num_told = max(self._num_told, len(certain))
        if is_rubbish or (piece and certain == text):  # what is looked back at stays short
            self._ids = self._ids[-_CHARACTER:] if is_rubbish else self._ids[self._num_context :]
            self._num_context = len(self._ids)
            self._num_told = len(self._text()) - is_rubbish
        return piece

    def end(self) -> str:
        """What is left: of bytes that never became a character, the signs that stand for them."""
        piece, self._ids = self._text()[self._num_told :], []
        return piece

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training: its body stands as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> Environment:
    """What chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike jinja2's own, without HTML's escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f'--model "{directory}": tokenizer_config.json cannot be read ({error}); mend it') from None
    return settings if isinstance(settings, dict) else {}


def _context(directory: Path) -> int | None:
    """The model's context in tokens, where its configuration says it."""
    try:
        context = json.loads((directory / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return context if isinstance(context, int) else None


def _template_source(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {one["name"]: one["template"] for one in template}.get("default")
    return template if isinstance(template, str) else None


def _content(token: Any) -> str | None:
    """A special token is written as its text, or as an object with it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
