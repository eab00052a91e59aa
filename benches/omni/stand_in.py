"""What vLLM-Omni 0.30.0's connectors ask of a machine with a GPU, on one that has none."""


def unpinned() -> None:
    """Pinning fails without a driver, and does nothing for a pool that no GPU reads."""
    import torch

    torch.Tensor.pin_memory = lambda tensor, *_: tensor
