import torch

import userstream as us

tensor = torch.ones(1 << 20, device="cuda:0")

# After PyTorch's work on the tensor; PyTorch continues after yours.
# The host does not wait.
with us.borrow(tensor, activate=True) as stream:
    current = torch.cuda.current_stream(tensor.device)
    assert current.cuda_stream == int(stream.handle)
    doubled = tensor * 2  # on the user stream

assert doubled.sum().item() == 2 << 20  # on PyTorch's own stream again

us.wait(tensor, timeout=60)  # for your work, and not for the device
info = us.describe(tensor)
assert (info.source, info.ordering) == ("torch.Tensor", "current")
