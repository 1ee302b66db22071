"""What is told and kept of a server's requests that ended: a line of the request log, and their prompts."""

import time
from array import array
from dataclasses import dataclass

from kvtier.engine import Engine, Sequence
from kvtier.service.why import UNSALTED, EndedRequest, Recent, RequestLog, client_of, tenant_of
from kvtier.tiers import TIERS, ChainHash


@dataclass(frozen=True, slots=True)
class EndedPrompt:
    """A prompt that was asked for."""

    tokens: "array[int]"
    root: ChainHash  # of its tenant's chains

    @property
    def num_items(self) -> int:
        return len(self.tokens)


class EndedSequences:
    """Notes each sequence that ended. `note` on the engine's thread, the rest on any."""

    def __init__(self, engine: Engine, log: RequestLog | None) -> None:
        self.recent: Recent[EndedPrompt] = Recent()
        self.log = log
        self._names_blocks = engine.config.enable_prefix_caching
        self._engine = engine

    def note(self, sequence: Sequence, end: str) -> None:
        """`end`: how it ended."""
        client = None
        if self._names_blocks:
            root = sequence.chain.root
            client = client_of(root)
            prompt = array("I", sequence.token_ids[: sequence.num_prompt_tokens])
            self.recent.note(client, sequence.request_id, EndedPrompt(prompt, root))
        if self.log is not None:
            self.log.write(
                EndedRequest(
                    id=sequence.request_id,
                    tenant=UNSALTED if client is None else tenant_of(client, self._engine.identity.fingerprint()),
                    prompt_tokens=sequence.num_prompt_tokens,
                    tokens={name: sequence.cached_tokens[kind.label] for name, kind in TIERS.items()},
                    missed=sequence.causes,
                    output_tokens=sequence.num_generated,
                    ttft=sequence.ttft,
                    seconds=time.monotonic() - sequence.arrived,
                    end=str(end),
                )
            )
