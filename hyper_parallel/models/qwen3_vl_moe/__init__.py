"""Qwen3-VL-MoE for the Trainer: the one place that knows both the run and the functional model."""

from .adapter import Qwen3VLMoeAdapter

build = Qwen3VLMoeAdapter

__all__ = ["Qwen3VLMoeAdapter", "build"]
