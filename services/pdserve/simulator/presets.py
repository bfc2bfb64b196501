"""Accelerators and models by name."""

from __future__ import annotations

from pdserve.simulator.costs import Hardware, ModelShape

# By the makers' data sheets: dense 16-bit FLOPs and memory bandwidth of one accelerator.
HARDWARE = {
    "a10": Hardware(125e12, 0.6e12),
    "a100": Hardware(312e12, 2.039e12),
    "a800": Hardware(312e12, 2.039e12),
    "b200": Hardware(2250e12, 8e12),
    "h100": Hardware(989e12, 3.35e12),
    "h200": Hardware(989e12, 4.8e12),
    "h800": Hardware(989e12, 3.35e12),
    "l4": Hardware(121e12, 0.3e12),
    "l40s": Hardware(362e12, 0.864e12),
    "mi300x": Hardware(1307e12, 5.3e12),
}
# By their config.json: parameters, layers, hidden size, KV heads times head size.
MODELS = {
    "bloom-176b": ModelShape(176e9, 70, 14336, 14336),
    "llama2-70b": ModelShape(69.0e9, 80, 8192, 1024),
    "llama3-8b": ModelShape(8.0e9, 32, 4096, 1024),
    "llama3-70b": ModelShape(70.6e9, 80, 8192, 1024),
    "opt-13b": ModelShape(13.0e9, 40, 5120, 5120),
    "opt-66b": ModelShape(65.7e9, 64, 9216, 9216),
    "opt-175b": ModelShape(175e9, 96, 12288, 12288),
    "qwen2.5-7b": ModelShape(7.6e9, 28, 3584, 512),
    "qwen2.5-32b": ModelShape(32.8e9, 64, 5120, 1024),
    "smollm2-135m-instruct": ModelShape(0.135e9, 30, 576, 192),
}
