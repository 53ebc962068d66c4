"""Load batches from NumPy arrays on a stream of their own, in order with the training."""

import numpy as np
import torch

import userstream as us

batches = [np.full((1024, 1024), number, np.float32) for number in range(20)]
io = us.get_stream(0, name="io")
buffers = [torch.empty(1024, 1024, device="cuda") for _ in range(2)]
total = torch.zeros((), device="cuda")
for number, batch in enumerate(batches):
    buffer = buffers[number % 2]
    us.copyto(buffer, batch, stream=io)  # after the step that read it, before the next one
    batch[:] = -1  # it has been read
    total += (buffer @ buffer.T).mean() / 1024
expected = sum(number**2 for number in range(20))
assert abs(total.item() - expected) < 1e-3 * expected
