"""What dashboards and rules ask of Prometheus, and what real pages of metrics have."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from node_rig import ROOT
from prometheus_client.parser import text_string_to_metric_families

_ADDED: Final = {"job", "instance", "le"}  # by Prometheus, to every series
_NAME: Final = r"\b(?:(?:kvtier|vllm)[_:][\w:]+|up)\b"


def asked(dashboard: str) -> list[str]:
    """What a dashboard's panels ask, as Prometheus gets it from Grafana."""
    panels = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / f"{dashboard}.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [re.sub(r"\$\w+", ".*", each.replace("$__rate_interval", "1m")) for each in found]


def labels_of(pages: Iterable[str]) -> dict[str, set[str]]:
    """Labels by series."""
    found: dict[str, set[str]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found.setdefault(name, set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def words_in(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def strays_in(expression: str, known: Mapping[str, set[str]]) -> Iterator[str]:
    """Names and labels in an expression that nobody tells."""
    names = re.findall(_NAME, expression)
    assert names, expression
    yield from (name for name in names if name not in known)
    for name, selector in re.findall(rf"({_NAME})\{{([^}}]*)\}}", expression):
        wanted = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', selector)))
        yield from (f"{name}{{{label}}}" for label in wanted - known.get(name, set()) - _ADDED)
    here = set().union(*(known.get(name, set()) for name in names)) | _ADDED
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        yield from (f"by ({label})" for label in words_in(labels) if label not in here)
