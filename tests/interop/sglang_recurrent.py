"""What SGLang's recurrent models lack on a CPU, in a few lines of torch each: short convolutions, gated delta rule.

SGLang's own kernels for a CPU are in its package sgl_kernel, which comes for CUDA. Nothing here is fast.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import torch
from torch.nn import functional

Tensor = torch.Tensor


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    conv_states: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """Sequences back to back, `x` `[channels, tokens]`: each starts from its state and leaves its last tokens there."""
    assert query_start_loc is not None
    assert cache_indices is not None
    assert has_initial_state is not None
    assert conv_states is not None
    output, width = torch.empty_like(x), weight.shape[1]
    bounds = query_start_loc.tolist()
    for i, (start, stop) in enumerate(pairwise(bounds)):
        slot = int(cache_indices[i])
        before = conv_states[slot] if bool(has_initial_state[i]) else torch.zeros_like(conv_states[slot])
        joined = torch.cat([before.to(x.dtype), x[:, start:stop]], 1)
        output[:, start:stop] = _convolved(joined, weight, bias, activation)
        conv_states[slot] = joined[:, joined.shape[1] - (width - 1) :]
    return output


def convolve_one(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **_: object,
) -> Tensor:
    """One token of each sequence, `x` `[sequences, channels]`."""
    output = torch.empty_like(x)
    for i, slot in enumerate(conv_state_indices.tolist()):
        joined = torch.cat([conv_state[slot].to(x.dtype), x[i, :, None]], 1)
        output[i] = _convolved(joined, weight, bias, activation)[:, -1]
        conv_state[slot] = joined[:, 1:]
    return output


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decay (in logarithms) and strength of each token's update, `[1, tokens, heads]`."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.sigmoid()[None]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    initial_state_indices: Tensor,
    **_: object,
) -> tuple[Tensor, None, None]:
    """Sequences back to back, `[1, tokens, heads, elements]`; each one's state is read and written in place."""
    output = torch.empty_like(v)
    bounds = cu_seqlens.tolist()
    repeat = v.shape[2] // q.shape[2]
    queries, keys = (
        functional.normalize(each[0].float(), dim=-1, eps=1e-6).repeat_interleave(repeat, 1) for each in (q, k)
    )
    queries = queries * q.shape[-1] ** -0.5
    for i, (start, stop) in enumerate(pairwise(bounds)):
        slot = int(initial_state_indices[i])
        state = initial_state[slot].float()  # [heads, keys, values]
        for token in range(start, stop):
            state = state * g[0, token].exp()[:, None, None]
            key, query = keys[token], queries[token]
            change = (v[0, token].float() - (state * key[:, :, None]).sum(1)) * beta[0, token].float()[:, None]
            state = state + key[:, :, None] * change[:, None, :]
            output[0, token] = (state * query[:, :, None]).sum(1).to(output.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return output, None, None


def delta_rule_one(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: object,
) -> Tensor:
    """One token of each sequence, `[1, sequences, heads, elements]`."""
    decay, strength = gates(A_log, a, b, dt_bias)
    return delta_rule(
        q,
        k,
        v,
        decay,
        strength,
        initial_state=initial_state_source,
        cu_seqlens=cu_seqlens,
        initial_state_indices=initial_state_indices,
    )[0]


def gated_norm(x: Tensor, g: Tensor, weight: Tensor, bias: None, activation: str, *, eps: float, **_: object) -> Tensor:
    """RMS norm of `x`, times its gate."""
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    gate = g.reshape(x.shape).float()
    gate = gate.sigmoid() if activation == "sigmoid" else functional.silu(gate)
    return (x.float() * scale * weight.float() * gate).to(x.dtype)


def use_gated_norm(module: Any) -> None:
    module.rms_norm_gated = gated_norm


def add_gated(hidden: Tensor, gate: Tensor, shared: Tensor, output: Tensor, *, do_add: bool) -> None:
    """A shared expert's part, gated, into `output`."""
    part = (hidden @ gate).sigmoid()[:, None] * shared
    output.copy_(output + part if do_add else part)


def use_gated_experts(module: Any) -> None:
    module._launch_fused_gate_sigmoid_mul = add_gated


def _convolved(joined: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    output = functional.conv1d(joined[None], weight[:, None].to(joined.dtype), bias, groups=len(joined))[0]
    return functional.silu(output) if activation in ("silu", "swish") else output


def use_convolutions(module: Any) -> None:
    module.causal_conv1d_fn, module.causal_conv1d_update = convolve, convolve_one


# Of sgl_kernel.mamba and of torch.ops.sgl_kernel.
KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "causal_conv1d_fn_cpu": convolve,
    "causal_conv1d_update_cpu": convolve_one,
    "chunk_gated_delta_rule_cpu": delta_rule,
}
OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "fused_gdn_gating_cpu": gates,
    "fused_sigmoid_gating_delta_rule_update_cpu": delta_rule_one,
}
