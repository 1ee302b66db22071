from .explaining import AskedChain, explain_chain, held_by_tenants, is_unknown, tenant_name
from .recent import UNSALTED, Recent, client_of, tenant_of
from .request_log import EndedRequest, RequestLog

__all__ = [
    "UNSALTED",
    "AskedChain",
    "EndedRequest",
    "Recent",
    "RequestLog",
    "client_of",
    "explain_chain",
    "held_by_tenants",
    "is_unknown",
    "tenant_name",
    "tenant_of",
]
