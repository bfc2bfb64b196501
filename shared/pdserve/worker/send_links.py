"""What everybody who sends KV needs of the hub of links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class SendLinks(Protocol):
    """See transfer.hub.LinkHub."""

    def start_send(
        self,
        ticket: str,
        attempt: int,
        peer: str,
        slots: torch.Tensor,
        num_tokens: int,
        tells_grant: bool = False,
        tells_landed: bool = False,
    ) -> None: ...
    def advance(self, tickets: Sequence[tuple[str, int]], layer: int) -> None: ...
    def finish_send(self, ticket: str, first_token: int) -> None: ...
