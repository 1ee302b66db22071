"""vLLM's plugin entry point: registers `KVTierConnector` with the connector factory, in each of vLLM's processes.

Every vLLM process imports and calls it if kvtier is installed, used or not. So it imports only the factory, which vLLM
needs anyway. kvtier's connector is imported when one is made.
"""

import logging
from typing import Final

_log = logging.getLogger(__name__)

_NAME: Final = "KVTierConnector"
_MODULE: Final = "kvtier.connector.vllm"
_registered: set[type] = set()  # factories with which this module has registered


def register() -> None:
    """Register the connector with vLLM's factory. Idempotent. Raises nothing, since vLLM would not start then.

    Does nothing without vLLM. If another package registered this name, it stays, with a warning.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:  # no vLLM here, or its factory is elsewhere: then users name the module's path instead
        return
    if KVConnectorFactory in _registered:
        return
    try:
        KVConnectorFactory.register_connector(_NAME, _MODULE, _NAME)
    except ValueError:  # the name is taken
        _log.warning(
            "vLLM's connector %s was registered by another package, and stays that one; for kvtier's, set "
            'kv_connector_module_path to "%s"',
            *(_NAME, _MODULE),
        )
    _registered.add(KVConnectorFactory)
