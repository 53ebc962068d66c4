import torch

import userstream as us

x, early, right = torch.zeros(3, 1 << 26, device="cuda")
side = torch.cuda.Stream()
for _ in range(100):
    x += 1  # queued: the GPU is busy with it for some milliseconds

with torch.cuda.stream(side):  # a stream of your own, in no order with PyTorch's
    early.copy_(x)  # a race
with us.borrow(x, right, activate=True):  # the user stream, after PyTorch's work on x
    right.copy_(x)
x.zero_()  # after your copy, on the GPU: the host has not waited once

print(early[0].item())  # some number below 100
assert right[0].item() == 100
