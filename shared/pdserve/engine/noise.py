"""Counter-based noise: an exact function of (seed, position, token id), the same on any device and in any batch.

Hash: murmur3's 32-bit finalizer (Appleby, public domain), chained. Two 32-bit keys come from seed and position; a
token's hash is mix(mix(token ^ key0) + key1), all modulo 2**32. The top 24 bits make u in (0, 1); Gumbel noise is
-log(-log(u)), computed in float64 and rounded to float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASK = 0xFFFFFFFF
_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
_STREAMS = (0x9E3779B9, 0x7F4A7C15)  # what sets the two keys apart


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """The two keys, each below 2**32, of a 64-bit seed and the absolute position of the token being chosen."""
    key0, key1 = (_mix(_mix(_mix(stream ^ seed & _MASK) ^ seed >> 32) ^ position & _MASK) for stream in _STREAMS)
    return key0, key1


def gumbel(keys: Sequence[tuple[int, int]], token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [R, n]: each row's noise, by its keys, for int token_ids [n] or [R, n]."""
    hashes = token_hashes(keys, token_ids)
    uniform = ((hashes >> 8) & 0xFFFFFF).double().add_(0.5).mul_(2.0**-24)
    return uniform.log_().neg_().log_().neg_().float()


def token_hashes(keys: Sequence[tuple[int, int]], token_ids: torch.Tensor) -> torch.Tensor:
    """int32 [R, n], the bits of the unsigned 32-bit hashes. int32 multiplication and addition wrap, as they must."""
    signed = torch.tensor([[_signed(key) for key in pair] for pair in keys], dtype=torch.int32)
    key0, key1 = signed.to(token_ids.device, non_blocking=True).unsqueeze(-1).unbind(1)
    return _mix_(_mix_(token_ids.to(torch.int32) ^ key0).add_(key1))


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * _FACTORS[0] & _MASK
    x ^= x >> 13
    x = x * _FACTORS[1] & _MASK
    return x ^ x >> 16


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """`_mix` in place; torch shifts int32 arithmetically, hence the masks."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _signed(_FACTORS[0])
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x *= _signed(_FACTORS[1])
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x
