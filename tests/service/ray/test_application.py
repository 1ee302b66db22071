"""The application without Ray; `make test-ray` has the rest."""

import importlib
import sys

import pytest

from kvtier.tiers.errors import MissingPackages


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "kvtier.service.ray.application", raising=False)
    with pytest.raises(MissingPackages, match=r"^kvtier.service.ray needs ray: pip install 'ray\[serve\]>=2\.60'$"):
        importlib.import_module("kvtier.service.ray").build  # noqa: B018
