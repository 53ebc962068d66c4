import torch

import userstream as us

first, second = (torch.ones(1 << 20, device=f"cuda:{ordinal}") for ordinal in (0, 1))
for tensor in (first, second):
    with us.borrow(tensor, activate=True):  # the user stream of the tensor's own device
        tensor.mul_(3)
us.copyto(second, first)  # from one device to the other, in order with both
us.wait([first, second], timeout=60)  # both user streams, one deadline

assert second.sum().item() == 3 << 20
