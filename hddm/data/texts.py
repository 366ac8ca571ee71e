"""Tokens of the captions of an encoded shard, mapped from its files."""

from dataclasses import dataclass

from torch import Tensor

from hddm.data.latents import Rows


@dataclass(frozen=True)
class TokenStore:
    """Tokens (N, tokens, width) of captions, and those of the empty prompt (tokens, width) in float32."""

    tokens: Rows
    null: Tensor

    def take(self, rows: Tensor) -> Tensor:
        """Tokens (n, tokens, width) in float32."""
        return self.tokens.take(rows).float()
