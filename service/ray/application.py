"""build: the application for Ray Serve, as `serve run kvtier.service.ray:build model=…` and `serve.run` want it."""

from typing import Any, Final

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from kvtier.service.ray.ingress import Ingress
from kvtier.service.ray.options import RayOptions
from kvtier.service.ray.replica import EngineReplica

_MOST: Final = 4096  # requests at one ingress at a time
_HEALTH: Final = 5.0  # seconds between two looks at a replica
_GRACE: Final = 15.0  # seconds more than the engine has to end


def build(options: RayOptions) -> Application:
    """Engines as replicas behind an ingress. ValueError (pydantic's) for options that cannot be meant."""
    number: dict[str, Any] = {"num_replicas": options.replicas}
    if options.autoscaling is not None:
        number = {"autoscaling_config": dict(options.autoscaling)}
    ours = {"model": options.model, "max_blocks": options.max_blocks}
    engines = serve.deployment(EngineReplica).options(
        name="engines",
        max_ongoing_requests=options.max_requests,
        max_queued_requests=options.max_queued,
        ray_actor_options=dict(options.resources),
        request_router_config=RequestRouterConfig(
            request_router_class=options.router,
            request_router_kwargs=ours if options.router_options is None else dict(options.router_options),
        ),
        health_check_period_s=_HEALTH,
        graceful_shutdown_timeout_s=options.stop_timeout + _GRACE,
        **number,
    )
    ingress = serve.deployment(Ingress).options(
        name="ingress", num_replicas=options.ingresses, max_ongoing_requests=_MOST, ray_actor_options={"num_cpus": 0}
    )
    bound: Application = ingress.bind(engines.bind(options), options)
    return bound
