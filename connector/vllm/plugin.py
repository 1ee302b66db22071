"""vLLM's plugin entry point, in each of its processes: registers kvtier's connectors with the connector factories.

Every vLLM process imports and calls it if kvtier is installed, used or not. So it imports only what vLLM needs anyway.
A connector of kvtier's is imported when one is made.
"""

import functools
import logging
from importlib import import_module
from typing import Any, Final

_log = logging.getLogger(__name__)

_MODULE: Final = "kvtier.connector.vllm"
_registered: set[type] = set()  # factories with which this module has registered


_FACTORIES: Final = (
    ("KVTierConnector", "vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory", "kv_connector"),
    ("KVTierECConnector", "vllm.distributed.ec_transfer.ec_connector.factory", "ECConnectorFactory", "ec_connector"),
)


def register() -> None:
    """Register the connectors with vLLM's factories, and `mark_names`. Idempotent. Raises nothing, or vLLM would not
    start.

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
    mark_names()


def mark_names() -> None:
    """Have vLLM show which images a client named. Idempotent. Does nothing without vLLM.

    If a request has settings for its images, vLLM hashes a client's name (`uuid`) with them. That looks like a digest
    of the content, and is none.
    """
    try:
        kind: Any = import_module("vllm.multimodal.processing.inputs").ProcessorInputs
    except (ImportError, AttributeError):
        return
    original = kind.get_mm_hashes
    if getattr(original, "marks_names", False):
        return

    @functools.wraps(original)
    def get_mm_hashes(inputs: Any, *arguments: Any, **named: Any) -> Any:
        hashes: dict[str, list[str]] = original(inputs, *arguments, **named)
        for modality, names in (inputs.mm_uuid_items or {}).items():
            for number, digest in enumerate(hashes.get(modality, ())):
                if names[number] not in (None, digest):
                    hashes[modality][number] = f"{digest}-named"
        return hashes

    get_mm_hashes.marks_names = True  # type: ignore[attr-defined]
    kind.get_mm_hashes = get_mm_hashes
