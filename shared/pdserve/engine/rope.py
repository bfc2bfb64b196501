"""Rotary position embedding. Frequencies follow transformers' modeling_rope_utils.py to the last bit of float32."""

from __future__ import annotations

import math

import torch

from pdserve.engine.config import RopeConfig


def rope_table(config: RopeConfig, head_size: int, max_positions: int, device: torch.device | str) -> torch.Tensor:
    """cos and sin of every position: float32 [max_positions, 2, head_size]; 512 bytes a position at head size 64.

    Both repeat their halves; the first half of the sines is negated, so that `apply_rope` has no sign to change.
    """
    frequencies, scale = inverse_frequencies(config, head_size)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1).to(device)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, head_size] by cos and sin [T, 1, head_size] of `rope_table`, all of one dtype, anew."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def inverse_frequencies(config: RopeConfig, head_size: int) -> tuple[torch.Tensor, float]:
    """float32 [head_size / 2], and the factor that cos and sin are multiplied by."""
    powers = config.theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    match config.kind:
        case "linear":
            return 1.0 / powers / config.factor, 1.0
        case "llama3":
            return _llama3(config, 1.0 / powers), 1.0
        case "yarn":
            return _yarn(config, powers, head_size), _yarn_scale(config)
        case _:
            return 1.0 / powers, 1.0


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones are kept, those between are blended (Llama 3.1)."""
    length, low, high = config.original_max_positions, config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > length / low, frequencies / config.factor, frequencies)
    smooth = (length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * stretched / config.factor + smooth * stretched
    between = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(between, blended, stretched)


def _yarn(config: RopeConfig, powers: torch.Tensor, head_size: int) -> torch.Tensor:
    """NTK by parts, https://arxiv.org/abs/2309.00071 section 3.2."""

    def dimension(rotations: float) -> float:
        waves = config.original_max_positions / (rotations * 2 * math.pi)
        return (head_size * math.log(waves)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_scale(config: RopeConfig) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return magnitude(1.0)
