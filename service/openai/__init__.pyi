from .bodies import (
    ChatBody,
    CompletionBody,
    CompletionPrompt,
    PrecomputeBody,
    RequestBody,
    json_object,
    parse,
)
from .chat_turns import chat_of, template_variables
from .errors import OpenAIError, busy, error_handlers, refusal, stopping_error, too_long, unknown_model
from .explain_body import ExplainBody
from .overlap import overlap
from .pieces import TokenizedPrompt
from .prompts import Detokenizer, Prompts
from .response_format import schema_of
from .token_texts import TokenTexts
from .tokenize_body import DetokenizeBody, TokenizeBody
from .tool_calls import MARKS, CallForm, CallReader, GuidedReader, Heard, HermesReader, LlamaReader, ToolCall

__all__ = [
    "MARKS",
    "CallForm",
    "CallReader",
    "ChatBody",
    "CompletionBody",
    "CompletionPrompt",
    "DetokenizeBody",
    "Detokenizer",
    "ExplainBody",
    "GuidedReader",
    "Heard",
    "HermesReader",
    "LlamaReader",
    "OpenAIError",
    "PrecomputeBody",
    "Prompts",
    "RequestBody",
    "TokenTexts",
    "TokenizeBody",
    "TokenizedPrompt",
    "ToolCall",
    "busy",
    "chat_of",
    "error_handlers",
    "json_object",
    "overlap",
    "parse",
    "refusal",
    "schema_of",
    "stopping_error",
    "template_variables",
    "too_long",
    "unknown_model",
]
