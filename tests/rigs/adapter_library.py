"""What PEFT puts into a model, in few lines, for machines without it: its classes' names, and what is asked of them."""

import sys
from types import ModuleType
from typing import Any

import torch

PACKAGE = "peft.tuners.lora.layer"


class LoraLinear(torch.nn.Module):
    """A linear layer with low-rank adapters before it, as `peft.tuners.lora.Linear` has and applies them."""

    adapter_layer_names = ("lora_A", "lora_B")
    other_param_names = ("scaling",)
    __module__ = PACKAGE

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = torch.nn.ModuleDict(), torch.nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self._active_adapter: list[str] = []

    def add(self, name: str, seed: int, scaling: float = 2.0) -> None:
        """An adapter of rank 4; equal for equal seeds."""
        base: Any = self.base_layer
        made = torch.Generator().manual_seed(seed)
        down, up = torch.nn.Linear(base.in_features, 4, bias=False), torch.nn.Linear(4, base.out_features, bias=False)
        for linear in (down, up):
            linear.weight.data = 0.3 * torch.randn(linear.weight.shape, generator=made)
        self.lora_A[name], self.lora_B[name], self.scaling[name] = down, up, scaling

    def delta(self, name: str) -> torch.Tensor:
        up, down = self.lora_B[name], self.lora_A[name]
        product: torch.Tensor = self.scaling[name] * up.weight @ down.weight  # type: ignore[operator]
        return product.detach()

    def merge(self, name: str, sign: float = 1.0) -> None:
        """Past the version counters, as PEFT does."""
        base: Any = self.base_layer
        base.weight.data += sign * self.delta(name)
        (self.merged_adapters.append if sign > 0 else self.merged_adapters.remove)(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._disable_adapters:
            for name in list(self.merged_adapters):
                self.merge(name, -1.0)
        result: torch.Tensor = self.base_layer(x)
        if not (self._disable_adapters or self.merged_adapters):
            for name in self._active_adapter:
                if name in self.lora_A:
                    result = result + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return result


class Router(torch.nn.Module):
    """An adapter that chooses by the whole text, as X-LoRA's does."""

    __module__ = "peft.tuners.xlora.layer"


class _Wrapper(torch.nn.Module):
    """Has the attributes of what it wraps."""

    inner: str

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(self.inner), name)

    def forward(self, input_ids: torch.Tensor, cache: Any = None, **options: Any) -> Any:
        return self._modules[self.inner](input_ids, cache=cache, **options)  # type: ignore[misc]


class Tuner(_Wrapper):
    """What holds a model with adapters, as `peft.tuners.lora.LoraModel`."""

    inner = "model"
    __module__ = "peft.tuners.lora.model"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


class ForCausalLM(_Wrapper):
    """What users have, as `peft.PeftModelForCausalLM`: while it generates, its tuner has a method of its own."""

    inner = "base_model"
    __module__ = "peft.peft_model"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model: Any = Tuner(model)
        self.base_model_prepare_inputs_for_generation = model.prepare_inputs_for_generation

    def prepare_inputs_for_generation(self, *arguments: Any, **options: Any) -> Any:
        return self.base_model_prepare_inputs_for_generation(*arguments, **options)

    def generate(self, *arguments: Any, **options: Any) -> Any:
        self.base_model.prepare_inputs_for_generation = self.prepare_inputs_for_generation
        try:
            return self.base_model.generate(*arguments, **options)
        finally:
            self.base_model.prepare_inputs_for_generation = self.base_model_prepare_inputs_for_generation


def installed(monkeypatch: Any) -> None:
    """Have the classes' code count as PEFT's while a test runs."""
    for kind in (LoraLinear, Router, Tuner, ForCausalLM):
        monkeypatch.setitem(sys.modules, kind.__module__, ModuleType(kind.__module__))
    monkeypatch.setitem(globals(), "__name__", PACKAGE)


def with_adapters(model: Any, **seeds: int) -> list[LoraLinear]:
    """Put adapters of these names and seeds before q and v of every layer, the first one active. Returns the layers."""
    layers = []
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            wrapped = LoraLinear(getattr(layer.self_attn, name))
            for adapter, seed in seeds.items():
                wrapped.add(adapter, seed)
            wrapped._active_adapter = list(seeds)[:1]
            setattr(layer.self_attn, name, wrapped)
            layers.append(wrapped)
    model.eval()
    return layers


def each(layers: list[LoraLinear], **state: Any) -> None:
    """Set the adapters' state in all layers: `active`, `disabled`, or `scaling` by name."""
    for layer in layers:
        layer._active_adapter = state.get("active", layer._active_adapter)
        layer._disable_adapters = state.get("disabled", layer._disable_adapters)
        layer.scaling |= state.get("scaling", {})
