import torch

import userstream as us

tensor = torch.ones(1 << 20, device="cuda:0")
stream = us.get_stream(tensor)

# Your stream after PyTorch's work on the tensor; the host does not wait.
stream.wait(torch.cuda.current_stream(tensor.device))

# Work of PyTorch's on your stream.
external = torch.cuda.ExternalStream(int(stream.handle), device=tensor.device)
with torch.cuda.stream(external):
    doubled = tensor * 2

us.wait(tensor, timeout=60)  # for that work, and not for the device
assert us.describe(tensor).source == "torch.Tensor"
assert doubled.sum().item() == 2 << 20
