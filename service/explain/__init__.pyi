from .chain import AskedChain, explain_chain, held_by_tenants, is_unknown, tenant_name
from .lines import ExplainedLines, Explanation, explained
from .request_log import UNSALTED, EndedRequest, Recent, RequestLog, client_of, tenant_of

__all__ = [
    "UNSALTED",
    "AskedChain",
    "EndedRequest",
    "ExplainedLines",
    "Explanation",
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
