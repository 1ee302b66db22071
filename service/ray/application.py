"""`build`: the application for Ray Serve, for `serve run kvtier.service.ray:build model=…` and `serve.run`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvtier.tiers import ConfigError, require_extra

try:
    from ray import serve
    from ray.serve import Application
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.request_router import RequestRouter
except ImportError:
    require_extra("kvtier.service.ray", "ray")
    raise

from kvtier.service.ray.ingress import Ingress
from kvtier.service.ray.options import ROUTER, RayOptions
from kvtier.service.ray.replica import EngineReplica

_MOST: Final = 4096  # requests at one ingress at once
_HEALTH: Final = 5.0  # seconds between two health checks of a replica
_GRACE: Final = 15.0  # seconds more than the engine has to end
_OURS: Final = ("max_blocks", "model", "weights")  # options of our request router


def build(options: RayOptions) -> Application:
    """Engines as replicas behind an ingress. ConfigError names the field of a wrong option."""
    engines = serve.deployment(EngineReplica).options(
        name="engines",
        num_replicas=options.replicas,
        max_ongoing_requests=options.max_requests,
        max_queued_requests=options.max_queued,
        request_router_config=_routing(options),
        health_check_period_s=_HEALTH,
        graceful_shutdown_timeout_s=options.stop_timeout + _GRACE,
    )
    with _named("resources", options.resources):
        engines = engines.options(ray_actor_options=dict(options.resources))
    if options.autoscaling is not None:
        given = dict(options.autoscaling)
        if unknown := sorted(given.keys() - AutoscalingConfig.model_fields.keys()):
            raise ConfigError(f"autoscaling: unknown {', '.join(unknown)}; Ray Serve's AutoscalingConfig lacks it")
        with _named("autoscaling", given):
            engines = engines.options(num_replicas=None, autoscaling_config=AutoscalingConfig(**given))
    ingress = serve.deployment(Ingress).options(
        name="ingress", num_replicas=options.ingresses, max_ongoing_requests=_MOST, ray_actor_options={"num_cpus": 0}
    )
    bound: Application = ingress.bind(engines.bind(options), options)
    return bound


def _routing(options: RayOptions) -> RequestRouterConfig:
    given = dict(options.router_options or {})
    if options.router.replace(":", ".") == ROUTER:
        if unknown := sorted(given.keys() - set(_OURS)):
            raise ConfigError(f"router_options: unknown {', '.join(unknown)}; known are {', '.join(_OURS)}")
        given = {"model": options.model, "max_blocks": options.max_blocks, **given}
    with _named("router", options.router):
        config = RequestRouterConfig(request_router_class=options.router, request_router_kwargs=given)
        chosen = config.get_request_router_class()
    if not (isinstance(chosen, type) and issubclass(chosen, RequestRouter)):
        raise ConfigError(f'router "{options.router}": not a class of request routers; write MODULE:CLASS')
    return config


@contextmanager
def _named(field: str, value: object) -> Iterator[None]:
    try:
        yield
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"{field} {value!r:.200}: {error}") from None
