"""vLLM's plugin entry point: registers kvtier's connectors with the connector factories, in each of vLLM's processes.

Every vLLM process imports and calls it if kvtier is installed, used or not. So it imports only the factories, which
vLLM needs anyway. A connector of kvtier's is imported when one is made.
"""

import logging
from importlib import import_module
from typing import Final

_log = logging.getLogger(__name__)

_MODULE: Final = "kvtier.connector.vllm"
_registered: set[type] = set()  # factories with which this module has registered


_FACTORIES: Final = (
    ("KVTierConnector", "vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory", "kv_connector"),
    ("KVTierECConnector", "vllm.distributed.ec_transfer.ec_connector.factory", "ECConnectorFactory", "ec_connector"),
)


def register() -> None:
    """Register the connectors with vLLM's factories. Idempotent. Raises nothing, since vLLM would not start then.

    Does nothing without vLLM. If another package registered a name, it stays, with a warning.
    """
    for name, module, attribute, option in _FACTORIES:
        try:
            factory = getattr(import_module(module), attribute)
        except (ImportError, AttributeError):  # no vLLM here, or its factory is elsewhere: users name the module's path
            continue
        if factory in _registered:
            continue
        try:
            factory.register_connector(name, _MODULE, name)
        except ValueError:  # the name is taken
            _log.warning(
                "vLLM's connector %s was registered by another package, and stays that one; for kvtier's, set "
                '%s_module_path to "%s"',
                *(name, option, _MODULE),
            )
        _registered.add(factory)
