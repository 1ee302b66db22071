"""What Ray Serve says of an application's options before anything starts: `make test-ray`."""

import re
from typing import Any

import pytest
from node_rig import ROOT

pytest.importorskip("ray", reason="needs Ray Serve; run `make test-ray`")

from kvtier.service.ray import RayOptions, build
from kvtier.tiers import ConfigError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"resources": {"cpus": 1}}, r"^resources \{'cpus': 1\}: .*'cpus'"),
        ({"resources": {"num_cpus": "many"}}, r"^resources .*num_cpus"),
        ({"resources": {"num_gpus": -1}}, r"^resources .*num_gpus cannot be negative"),
        ({"autoscaling": {"max": 4}}, "^autoscaling: unknown max"),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 1}}, r"^autoscaling (.|\n)*max_replicas \(1\)"),
        ({"router": "nonsense"}, "^router 'nonsense': No module"),
        ({"router": "kvtier.service.ray.request_router:Other"}, "^router .*has no attribute 'Other'"),
        ({"router": "os.path"}, '^router "os.path": not a class of request routers'),
        ({"router_options": {"tokenizer": "x"}}, "^router_options: unknown tokenizer; known are max_blocks, mo"),
    ],
)
def test_an_option_that_ray_serve_cannot_take_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(RayOptions(model="m", **options))


@pytest.mark.parametrize("number", [{"replicas": 3}, {"autoscaling": {"min_replicas": 0, "max_replicas": 4}}])
def test_what_can_be_meant_is_taken_and_our_router_has_what_it_needs(number: dict[str, Any]) -> None:
    router = "kvtier.service.ray.request_router:KVTierRequestRouter"
    for given in ({}, {"router": router}, {"router_options": {"weights": {"GPU": 1.0}}}):
        options: dict[str, Any] = {**number, **given}
        engines = build(RayOptions(model="m", **options))._bound_deployment.init_args[0]._bound_deployment
        routing = engines._deployment_config.request_router_config
        assert routing.get_request_router_class().__name__ == "KVTierRequestRouter"
        assert routing.request_router_kwargs["model"] == "m"
        assert ("weights" in routing.request_router_kwargs) == ("router_options" in given)
        scaling = engines._deployment_config.autoscaling_config
        assert (scaling is None) == ("replicas" in number)
        assert scaling is None or (scaling.min_replicas, scaling.max_replicas) == (0, 4)


def test_the_routers_that_the_page_names_are_there() -> None:
    page = (ROOT / "docs" / "ray.md").read_text()
    named = re.findall(r'router="([\w.:]+)"', page)
    assert len(named) == 2
    for router in named:
        build(RayOptions(model="m", router=router))
