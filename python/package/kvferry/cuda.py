"""What connectors for MoRI call of PyTorch also where there is no CUDA device."""


class Stream:
    """A stream in which everything has happened already."""

    def synchronize(self) -> None:
        pass


class Event:
    """An event that has happened once it is recorded: CPU kernels return when they are done."""

    def __init__(self, *_args, **_kwargs):
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def stand_in(torch) -> None:
    """Replaces `torch.cuda.Event` and `torch.cuda.current_stream` unless there is a device."""
    if torch.cuda.is_available():
        return
    torch.cuda.Event = Event
    torch.cuda.current_stream = lambda device=None: Stream()


def unpinned(torch) -> None:
    """Has `Tensor.pin_memory` return the tensor itself, unless there is a device: no driver could pin
    it, and none reads it."""
    if not torch.cuda.is_available():
        torch.Tensor.pin_memory = lambda tensor, *_args, **_kwargs: tensor
