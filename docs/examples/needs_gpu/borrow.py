import torch

import userstream as us

x = torch.ones(1 << 20, device="cuda")
y = torch.empty_like(x)
with us.borrow(x, y, activate=True):  # a stream of your own, after PyTorch's work on x and y
    y.copy_(x)  # queued there: the host does not wait
x.zero_()  # on PyTorch's stream again, after your copy
assert us.asnumpy(y).min() == 1  # waits for this copy alone
