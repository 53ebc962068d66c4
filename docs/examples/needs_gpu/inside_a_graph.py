import torch

import userstream as us

x = torch.zeros(1 << 20, device="cuda:0")
y = torch.zeros_like(x)
x += 0  # loads the kernels before the capture
y *= 2
mine = us.Stream.create(0)  # of your own: the shared user stream does not join a capture

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x += 1
    with us.borrow(x, y, stream=mine) as stream:  # `mine` joins the capture, and leads back
        stream.memcpy_dtod(y.data_ptr(), x.data_ptr(), x.nbytes)
    y *= 2

for _ in range(3):
    graph.replay()
assert (x[0].item(), y[0].item()) == (3, 6)
