"""Lines of the connector among vLLM's, in their form."""

import logging


def logger_of(module: str) -> logging.Logger:
    """Below vLLM's logger, whose handlers write time, level and process."""
    return logging.getLogger(f"vllm.{module}")
