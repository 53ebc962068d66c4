import torch

import userstream as us

tensor = torch.zeros(1 << 20, device="cuda:0")
stream = us.get_stream(tensor)  # of the tensor's device, made by the first call
assert stream is us.get_stream(0) is us.get_stream(tensor.device)

theirs = torch.cuda.ExternalStream(int(stream.handle), device=tensor.device)
with us.borrow(tensor), torch.cuda.stream(theirs):  # after PyTorch's work on the tensor
    tensor += 1  # on the user stream
us.wait(tensor, timeout=60)  # for that work, and nothing else of PyTorch's

assert tensor.sum().item() == 1 << 20
