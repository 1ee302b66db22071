"""What a model computes without a cache: every answer of a random story, and every block it left, held to that."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mischief import DOCUMENTS, SALTS, Mischief
from tiny_models import plain

from kvtier.connector.models import returned_cache
from kvtier.connector.segments.unmarked import segments_in
from kvtier.engine.llm import Engine
from kvtier.engine.requests import SamplingParams
from kvtier.tiers.naming.chain import TokenChain, is_named_by, root_hash
from kvtier.tiers.tier import ChainHash


class Truth:
    """What a model without any cache computes."""

    def __init__(self) -> None:
        self._module: Any = plain("llama")
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.inference_mode()
    def of(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[tokens, vocab]` and KV `[layers, 2, tokens, heads, dim]`."""
        key = tuple(tokens)
        if key not in self._known:
            out = self._module(torch.tensor([list(tokens)]), use_cache=True)
            layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in returned_cache(out).layers]
            self._known[key] = out.logits[0].float(), torch.stack(layers).transpose(2, 3)
        return self._known[key]

    def check_answers(self, story: Mischief, cold: Engine | None) -> int:
        """Every exact answer is that of an engine without a cache, with all its bits if `cold` is exact."""
        num_checked = 0
        for asked in story.asked.values():
            assert asked.ended is not None
            if asked.reuses or not asked.logits:
                continue
            num_checked += 1
            tokens, num_prompt = asked.live.token_ids, asked.live.num_prompt_tokens
            rows = np.stack(asked.logits)
            assert rows.argmax(-1).tolist() == tokens[num_prompt:]
            if cold is not None:
                params = SamplingParams(max_tokens=len(rows), ignore_eos=True, keep_logits=True)
                [expected] = cold.generate([tokens[:num_prompt]], params)
                assert rows.tobytes() == np.stack(expected.logits).tobytes(), f"request {asked.live.request_id}"
            else:
                logits = self.of(tokens)[0][num_prompt - 1 : len(tokens) - 1].numpy()
                assert np.abs(rows - logits).max() <= 1e-3 * np.abs(logits).max(), f"request {asked.live.request_id}"
        return num_checked

    def check_blocks(self, story: Mischief) -> int:
        """Every block that can be found was computed exactly, and holds what its name says."""
        prefixes = self._named(story)
        num_checked = 0
        for where, record, kv in story.held():
            assert is_named_by(record), f"{where}: a name that its tokens do not make"
            before = prefixes.get(record.parent)
            assert before is not None, f"{where}: a block behind what nobody computed exactly"
            salt, tokens = before
            whole = (*tokens, *np.frombuffer(record.tokens, "<u4").tolist())
            text = self._text(story, salt, whole)
            assert text is not None, f"{where}: {len(whole)} tokens that nobody computed exactly"
            first, count = len(tokens), len(whole) - len(tokens)
            expected = self.of(text)[1][:, :, first : first + count]
            found = kv[:, :, :count]
            worst = float((found - expected).abs().max())
            assert worst <= 1e-3 * float(expected.abs().max()), f"{where}: KV of tokens {first} … is not theirs"
            num_checked += 1
        return num_checked

    def _exact_texts(self, story: Mischief) -> list[tuple[str | None, tuple[int, ...]]]:
        texts = [
            (asked.salt, tuple(asked.live.token_ids[: asked.exact_until]))
            for asked in story.asked.values()
            if asked.exact_until
        ]
        if not story.exact:  # a segment alone, and one token behind it that is nobody's
            for text in DOCUMENTS:
                full = len(text) // story.block_size * story.block_size
                alone = (*text[:full], text[min(full, len(text) - 1)])
                texts += [(salt, whole) for whole in (tuple(text), alone) for salt in SALTS]
        if not story.marks:  # what was found in a prompt, likewise
            for asked in story.asked.values():
                prompt = tuple(asked.live.token_ids[: asked.live.num_prompt_tokens])
                for segment in segments_in(prompt, story.block_size):
                    whole, size = prompt[segment.start :], story.block_size
                    full = min(-(-(segment.end - segment.start) // size), len(whole) // size) * size
                    texts += [(asked.salt, whole), (asked.salt, (*whole[:full], *whole[full - 1 : full]))]
        return texts

    def _named(self, story: Mischief) -> dict[ChainHash, tuple[str | None, tuple[int, ...]]]:
        named: dict[ChainHash, tuple[str | None, tuple[int, ...]]] = {}
        for salt, text in self._exact_texts(story):
            chain = TokenChain(root_hash(story.engine.identity.fingerprint(), cache_salt=salt), story.block_size)
            chain.extend(text)
            for block in range(len(chain.hashes) + 1):
                named[chain.parent(block)] = (salt, text[: block * story.block_size])
        return named

    def _text(self, story: Mischief, salt: str | None, tokens: tuple[int, ...]) -> tuple[int, ...] | None:
        texts = self._exact_texts(story)
        return next((text for of, text in texts if of == salt and text[: len(tokens)] == tokens), None)
