"""Payloads between the stages of vLLM-Omni. Needs vllm_omni 0.30 and what that brings: torch, numpy, msgspec, Pillow."""
