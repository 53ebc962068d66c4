"""Work of a known length for a GPU, and an array that names its producer's stream."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import userstream as us


def external(torch: Any, stream: us.Stream, device: int = 0) -> Any:
    """Return a stream of ours as one of PyTorch's."""
    return torch.cuda.ExternalStream(int(stream.handle), device=device)


class Spinner:
    """A kernel that keeps streams of one GPU busy for so long, by the GPU's own clock."""

    def __init__(self, torch: Any, device: int = 0) -> None:
        self._torch, self._device = torch, device
        cycles = 20_000_000  # some 10 ms
        self._spin(20 * cycles)  # loads the kernel, and lets the clock rise, which takes a while
        self._cycles_a_second = cycles / statistics.median(self._took(cycles) for _ in range(5))

    def _spin(self, cycles: int) -> None:
        with self._torch.cuda.device(self._device):
            self._torch.cuda._sleep(cycles)

    def _took(self, cycles: int) -> float:
        torch = self._torch
        with torch.cuda.device(self._device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

    def cycles(self, seconds: float) -> int:
        """Return how many cycles of the GPU's clock last so long."""
        return round(seconds * self._cycles_a_second)

    def on(self, stream: us.Stream, seconds: float) -> Callable[[], None]:
        """Return what queues such work on a stream, when it has nothing else to do."""
        torch, theirs = self._torch, external(self._torch, stream, self._device)
        cycles = self.cycles(seconds)

        def queue() -> None:
            torch.cuda.synchronize(self._device)
            with torch.cuda.stream(theirs):
                torch.cuda._sleep(cycles)

        return queue


class Interface:
    """An array with nothing but ``__cuda_array_interface__``, which names its producer's stream."""

    def __init__(self, address: int, nbytes: int, stream: Any) -> None:
        self._interface = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "stream": int(stream.handle),
        }

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface
