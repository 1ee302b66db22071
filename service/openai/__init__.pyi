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
from .errors import OpenAIError, busy, error_handlers, too_long, unknown_model
from .explain_body import ExplainBody
from .pieces import TokenizedPrompt
from .prompts import Detokenizer, Prompts
from .tokenize_body import DetokenizeBody, TokenizeBody

__all__ = [
    "ChatBody",
    "CompletionBody",
    "CompletionPrompt",
    "DetokenizeBody",
    "Detokenizer",
    "ExplainBody",
    "OpenAIError",
    "PrecomputeBody",
    "Prompts",
    "RequestBody",
    "TokenizeBody",
    "TokenizedPrompt",
    "busy",
    "chat_of",
    "error_handlers",
    "json_object",
    "parse",
    "template_variables",
    "too_long",
    "unknown_model",
]
