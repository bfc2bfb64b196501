"""KV in one byte a number on the wire: a float32 scale for each block, head, and K or V travels in front of it.

int8: codes are round(x / s), s = max|x| / 127 over the block's part of the frame, so each number's error is at most
s / 2: 1/254 of the largest one in its block and head. fp8 (e4m3): x / s with s = max|x| / 448; three bits of mantissa
leave an error of at most 1/16 of the number itself. Both before rounding to the pages' own dtype.
"""

from __future__ import annotations

import torch

TINY = torch.finfo(torch.float32).tiny  # scales below it have no reciprocal; such numbers travel as zeros
CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


def quantize(data: torch.Tensor, kind: str, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `data`'s shape and float32 scales [layers, 2, blocks, heads] of data [layers, 2, tokens, heads, size].

    `blocks` is the block of each token, int64 [tokens], counted from 0 without gaps.
    """
    dtype, largest = CODES[kind]
    count, heads = int(blocks[-1]) + 1, data.shape[3]
    codes = torch.empty(data.shape, dtype=dtype, device=data.device)
    scales = torch.zeros((*data.shape[:2], count, heads), dtype=torch.float32, device=data.device)
    for plane, out, scale in zip(data.flatten(0, 1), codes.flatten(0, 1), scales.flatten(0, 1), strict=True):
        numbers = plane.to(torch.float32, copy=True)
        index = blocks.unsqueeze(1).expand(-1, heads)
        scale.scatter_reduce_(0, index, numbers.abs().amax(dim=-1), "amax").div_(largest)
        scale.masked_fill_(scale < TINY, 0.0)
        inverse = torch.where(scale > 0, scale.reciprocal(), scale)
        numbers.mul_(inverse[blocks].unsqueeze(-1))
        if dtype is torch.int8:
            numbers.round_()
        out.copy_(numbers.clamp_(-largest, largest))
    return codes, scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `quantize` was given, up to its error, as `dtype`."""
    data = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for plane, out, scale in zip(codes.flatten(0, 1), data.flatten(0, 1), scales.flatten(0, 1), strict=True):
        out.copy_(plane.float().mul_(scale[blocks].unsqueeze(-1)))
    return data


def error_bound(scales: torch.Tensor, kind: str) -> float:
    """The largest error that a number with one of `scales` may have."""
    return float(scales.max()) * (0.5 if kind == "int8" else CODES[kind][1] / 16)
