"""Copy the next batch to the GPU while the model works on this one, in order."""

from itertools import cycle

import numpy as np
from model import SIZE, train

import userstream as us


class Prefetcher:
    def __init__(self, batches, compute):
        self.batches, self.compute = iter(batches), compute
        self.side = compute.device.create_stream()
        buffers = [compute.device.allocate(4 * SIZE, stream=self.side) for _ in range(2)]
        self.buffers = cycle(buffers)
        self.copy_ahead()

    def next_batch(self):
        self.compute.wait(self.side)  # the model runs when its batch is there
        batch = self.ahead
        self.copy_ahead()  # and while it runs, the next one is copied
        return batch

    def copy_ahead(self):
        data = next(self.batches, None)
        if data is not None:
            self.ahead = next(self.buffers)
            self.side.wait(self.compute)  # after the step that read this buffer
            us.copyto(self.ahead, data, stream=self.side, producer=None)


if __name__ == "__main__":
    batches = [np.full(SIZE, number, np.float32) for number in range(10)]
    print(f"loss {train(batches, Prefetcher):.2f}, expected {np.mean(batches):.2f}")
