from .chain import PromptChain, explain_chain, held_by_tenants, is_unknown, tenant_name
from .lines import ExplainedLines, Explanation, explained
from .request_log import UNSALTED, LoggedRequest, Recent, RequestLog, client_of, tenant_of

__all__ = [
    "UNSALTED",
    "ExplainedLines",
    "Explanation",
    "LoggedRequest",
    "PromptChain",
    "Recent",
    "RequestLog",
    "client_of",
    "explain_chain",
    "explained",
    "held_by_tenants",
    "is_unknown",
    "tenant_name",
    "tenant_of",
]
