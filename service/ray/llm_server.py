"""KVTierLLMServer: replicas of `ray.serve.llm` that KVTierRequestRouter ranks. It is for LLMConfig's `server_cls`.

The engine is vLLM in Ray's own server, which loads our connector by `kv_transfer_config`. What this adds is KV events
from a port of the replica's own, where routers find them, and the router as the deployment's default.
"""

from pathlib import Path
from typing import Any, Final

import ray
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import DefaultConnectorBackend
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.serve.config import RequestRouterConfig
from ray.serve.llm import LLMConfig, LLMServer

from kvtier.service.ray.child import held_ports
from kvtier.service.ray.options import ENDPOINTS, ROUTER, VLLM_BLOCK
from kvtier.service.ray.ranking import METADATA

_CONNECTOR: Final = "KVTierConnector"


class KVTierLLMServer(LLMServer):
    """Ray Serve calls every method. It runs wherever LLMServer does, with or without the connector."""

    async def start(self) -> None:
        """Start the engine, which then publishes KV events."""
        if not KVConnectorBackendFactory.is_registered(_CONNECTOR):  # it needs no set-up of Ray's
            KVConnectorBackendFactory.register_backend(_CONNECTOR, DefaultConnectorBackend)
        node = ray.util.get_node_ip_address()
        with held_ports(len(ENDPOINTS)) as ports:
            publish, replay = self._endpoints = [
                text.format(node=node, events=port, replay=port) for text, port in zip(ENDPOINTS, ports, strict=True)
            ]
            given = self._llm_config.engine_kwargs.get("kv_events_config") or {}
            ours = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": publish, "replay_endpoint": replay}
            self._llm_config.update_engine_kwargs(kv_events_config={**given, **ours})
            await super().start()

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """LLMServer's, with our request router unless the configuration names one."""
        options: dict[str, Any] = super().get_deployment_options(llm_config)
        source = llm_config.model_loading_config.model_source
        model = source if isinstance(source, str) and Path(source).is_dir() else None
        ours = RequestRouterConfig(request_router_class=ROUTER, request_router_kwargs={"model": model})
        return {"request_router_config": ours, **options}

    def record_replica_metadata(self) -> dict[str, Any]:
        """Where routers find this replica's events, and of how many tokens its blocks are."""
        return {
            METADATA: {
                "block_size": self._llm_config.engine_kwargs.get("block_size") or VLLM_BLOCK,
                "endpoints": self._endpoints,
            }
        }
