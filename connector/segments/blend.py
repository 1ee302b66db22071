"""Blends segments into requests: copies their KV to its place, and computes anew what is missing or deviates most.

The layers run over ever fewer rows. Before the check layer a request computes all of its tokens; there it compares its
K and V with the copied ones, keeps the rows that differ most, and those that were not copied, and goes on with these.
"""

from collections import abc
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from kvtier.connector.segments.blend_attention import BlendAttention, BlendSpan
from kvtier.connector.segments.paged_attention import PagedKV
from kvtier.connector.segments.rope import PIECE, rotated
from kvtier.connector.segments.segment import Repair, ReusedPart
from kvtier.connector.segments.selection import Positions, borders_of, drawn, first_of, highest

_TINY: Final = 1e-20  # keeps a division by nothing from raising


@dataclass(frozen=True, slots=True)
class BlendRequest:
    """One request to be blended: all of its KV but the last token's is to be in the blocks of `block_table`."""

    token_ids: abc.Sequence[int]
    block_table: list[int]
    num_computed: int  # leading tokens whose KV is there already
    parts: abc.Sequence[ReusedPart]
    repair: Repair


@dataclass(frozen=True, slots=True)
class BlendResult:
    """What one request's blend came to. `deviation` is of what was left unrepaired, None where nobody measured it."""

    num_reused: int
    num_repaired: int  # of the reused
    num_computed: int  # rows that went through all layers, the repaired ones among them
    deviation: float | None = None
    fell_back: bool = False  # it was too large: everything was computed


@dataclass(slots=True)
class _BlendRows:
    """Rows of one request on their way through the layers; at most as many as a step computes."""

    positions: Positions
    span: BlendSpan
    states: torch.Tensor  # [rows, hidden], before `layer`
    turns: tuple[torch.Tensor, torch.Tensor]  # cos and sin of their positions, [1, rows, rotated dimensions]
    layer: int
    until: int


class _BlendJob:
    """One request of a blend."""

    def __init__(self, request: BlendRequest) -> None:
        self.request = request
        self.repair = request.repair
        self.parts = request.parts
        self.first, self.end = request.num_computed, len(request.token_ids) - 1  # the last token is the next step's
        reused = np.zeros(len(request.token_ids), bool)
        for part in self.parts:
            reused[part.start : part.end] = True
        self.candidates: Positions = np.flatnonzero(reused)
        missing = np.flatnonzero(~reused[: self.end])
        self.missing: Positions = missing[missing >= self.first]
        self.repaired: Positions = self.candidates[:0]
        self.deviation: float | None = None
        self.fell_back = False
        self.attended: torch.Tensor | None = None  # what each key gets of the question's attention
        self.rows: list[_BlendRows] | None = None  # behind the check, if there was one

    @property
    def is_checked(self) -> bool:
        """Whether K and V are compared before anything is chosen."""
        return self.repair.rule == "deviation" and 0 < self.repair.share < 1

    def result(self) -> BlendResult:
        num_computed = len(self.missing) + len(self.repaired)
        return BlendResult(len(self.candidates), len(self.repaired), num_computed, self.deviation, self.fell_back)


class Blender:
    """Blends over one model, whose attention is `PAGED_ATTENTION`, and a paged tensor, as `PagedKV` takes it.

    Writes the requests' own blocks alone.
    """

    def __init__(self, module: PreTrainedModel, tensor: torch.Tensor, inv_freq: torch.Tensor, max_rows: int) -> None:
        """`max_rows` go through a layer at once: that bounds the memory a long prompt takes."""
        decoder: Any = module.model
        self._decoder = decoder
        self._device = module.device
        self._tensor = tensor
        self._kv = PagedKV(tensor)
        self._num_layers = self._kv.num_layers
        self._block_size = self._kv.block_size
        self._inv_freq = inv_freq
        self._max_rows = max_rows

    @torch.inference_mode()
    def blend(self, requests: abc.Sequence[BlendRequest]) -> list[BlendResult]:
        """Fill the KV of all their tokens but the last, all of them in the same passes."""
        jobs = [_BlendJob(request) for request in requests]
        for job in jobs:
            for part in job.parts:
                self._copy(part, job.request.block_table)
        self._check([job for job in jobs if job.is_checked])
        self._question([job for job in jobs if job.repair.rule == "question" and 0 < job.repair.share < 1])
        rows = []
        for job in jobs:
            if job.rows is None:
                if job.repair.rule != "question" or job.repair.share in (0, 1):
                    job.repaired = _chosen(job)
                job.rows = self._rows(job, np.union1d(job.missing, job.repaired), self._num_layers)
            rows += job.rows
        self._run(rows)
        return [job.result() for job in jobs]

    def _copy(self, part: ReusedPart, table: list[int]) -> None:
        """A part's KV into the request's own blocks, its keys rotated from the segment's places to the request's."""
        blocks = torch.tensor(part.blocks, device=self._device)
        own = torch.tensor(table, device=self._device)
        size = self._block_size
        for start in range(part.start, part.end, PIECE):
            there = torch.arange(start, min(start + PIECE, part.end), device=self._device)
            here = there - part.origin
            block, offset, own_block, own_offset = blocks[here // size], here % size, own[there // size], there % size
            keys = self._tensor[block, :, 0, offset]
            self._tensor[own_block, :, 0, own_offset] = rotated(keys, part.origin, self._inv_freq)
            self._tensor[own_block, :, 1, own_offset] = self._tensor[block, :, 1, offset]

    def _check(self, jobs: list[_BlendJob]) -> None:
        """Compute all rows up to the check layer, compare there, and keep those that go on."""
        for job in jobs:
            job.rows = self._rows(job, np.arange(job.first, job.end), job.repair.check_layer)
        self._run([rows for job in jobs for rows in job.rows or ()])
        for job in jobs:
            squares = self._deviations(job)
            job.repaired = highest(job.candidates, squares, job.repair.share)
            left = squares[~np.isin(job.candidates, job.repaired)]
            job.deviation = float(np.sqrt(left.mean())) if len(left) else 0.0
            if job.deviation > job.repair.max_deviation:
                job.repaired, job.fell_back = job.candidates, True
            job.rows = self._narrowed(job, np.union1d(job.missing, job.repaired))

    def _deviations(self, job: _BlendJob) -> NDArray[np.float64]:
        """How far each reused token's K and V are from computed ones, squared, relative to the reused ones' mean."""
        layer = job.repair.check_layer
        candidates = torch.from_numpy(job.candidates).to(self._device)
        rows = job.rows or []
        parts = [_keys_and_values(self._decoder.layers[layer], each.states, each.turns) for each in rows]
        computed = [torch.cat(states) for states in zip(*parts, strict=True)]
        copied = self._kv.gather(layer, rows[-1].span.blocks, job.end)
        total = torch.zeros(len(candidates), device=self._device)
        for new, old in zip(computed, copied, strict=True):
            kept = old[candidates].float()
            apart = (new[candidates - job.first].float() - kept).square().sum((1, 2))
            total += apart / (kept.square().sum((1, 2)).mean() + _TINY)
        squares: NDArray[np.float64] = (total / 2).double().cpu().numpy()
        return squares

    def _narrowed(self, job: _BlendJob, chosen: Positions) -> list[_BlendRows]:
        """Only the chosen positions, from the check layer on."""
        narrowed = []
        for rows in job.rows or ():
            places = np.flatnonzero(np.isin(rows.positions, chosen))
            if not len(places):
                continue
            kept, positions = torch.from_numpy(places).to(self._device), rows.positions[places]
            cos, sin = (each[:, kept] for each in rows.turns)
            span = self._span(job, positions)
            narrowed.append(_BlendRows(positions, span, rows.states[kept], (cos, sin), rows.layer, self._num_layers))
        return narrowed

    def _question(self, jobs: list[_BlendJob]) -> None:
        """Let what stands behind the last segment look at the copied KV; what it attends to most is computed anew.

        What was not copied is computed for it, too, once over the copies, and once more when they are repaired.
        """
        asking = []
        for job in jobs:
            attended = torch.zeros(job.end + 1, device=self._device)
            rows = self._rows(job, np.append(job.missing, job.end), self._num_layers)
            for each in rows:
                each.span.attended, each.span.asking_from = attended, job.parts[-1].end
            asking += rows
            job.attended = attended
        self._run(asking)
        for job in jobs:
            assert job.attended is not None
            scores = job.attended.double().cpu().numpy()
            job.repaired = highest(job.candidates, scores[job.candidates], job.repair.share)

    def _rows(self, job: _BlendJob, positions: Positions, until: int) -> list[_BlendRows]:
        """These positions before the first layer, on their way to `until`."""
        rows = []
        for start in range(0, len(positions), self._max_rows):
            some = positions[start : start + self._max_rows]
            span = self._span(job, some)
            token_ids = torch.tensor([job.request.token_ids[place] for place in some.tolist()], device=self._device)
            states = self._decoder.embed_tokens(token_ids)
            turns = self._decoder.rotary_emb(states[None], span.positions[None])
            rows.append(_BlendRows(some, span, states, turns, 0, until))
        return rows

    def _span(self, job: _BlendJob, positions: Positions) -> BlendSpan:
        table = job.request.block_table
        slots = self._kv.slots(table, 0, len(job.request.token_ids))[positions]
        num_blocks = int(positions[-1]) // self._block_size + 1
        blocks = torch.tensor(table[:num_blocks], dtype=torch.int64, device=self._device)
        return BlendSpan(torch.from_numpy(positions).to(self._device), torch.from_numpy(slots).to(self._device), blocks)

    def _run(self, rows: list[_BlendRows]) -> None:
        """Take all rows from their layer to where each of them stops, packed; a request's own in order."""
        for number in range(self._num_layers):
            pack: list[_BlendRows] = []
            for each in rows:
                if not each.layer == number < each.until:
                    continue
                if pack and sum(len(other.positions) for other in pack) + len(each.positions) > self._max_rows:
                    self._run_layer(number, pack)
                    pack = []
                pack.append(each)
            if pack:
                self._run_layer(number, pack)

    def _run_layer(self, number: int, pack: list[_BlendRows]) -> None:
        spans = [each.span for each in pack]
        states = self._decoder.layers[number](
            torch.cat([each.states for each in pack])[None],
            attention_mask=None,
            position_ids=torch.cat([span.positions for span in spans])[None],
            past_key_values=None,
            use_cache=False,
            position_embeddings=tuple(
                torch.cat(turns, 1) for turns in zip(*(each.turns for each in pack), strict=True)
            ),
            paged=BlendAttention(self._kv, spans),
        )
        parts = states[0].split([len(each.positions) for each in pack])
        for each, part in zip(pack, parts, strict=True):
            each.states, each.layer = part, number + 1


def _chosen(job: _BlendJob) -> Positions:
    """What rules choose that look at no KV; nothing and everything are such rules, too."""
    share = job.repair.share
    if share in (0, 1):
        return job.candidates if share else job.candidates[:0]
    if job.repair.rule == "random":
        return drawn(job.candidates, share)
    choose = first_of if job.repair.rule == "first" else borders_of
    return choose([np.arange(part.start, part.end) for part in job.parts], share)


def _keys_and_values(
    layer: Any, states: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a decoder layer, [rows, kv heads, head dim], without its attention and what follows."""
    attention = layer.self_attn
    normed = layer.input_layernorm(states)
    shape = (len(states), -1, attention.head_dim)
    keys, values = attention.k_proj(normed).view(shape), attention.v_proj(normed).view(shape)
    if hasattr(attention, "k_norm"):
        keys = attention.k_norm(keys)
    cos, sin = turns[0][0, :, None], turns[1][0, :, None]
    half = keys.shape[-1] // 2
    turned = torch.cat([-keys[..., half:], keys[..., :half]], -1)
    return keys * cos + turned * sin, values
