"""Mixed precision, a loader with pinned memory, and batches that a side stream brings ahead."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

samples = TensorDataset(torch.randn(256, 64), torch.randint(0, 10, (256,)))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.LayerNorm(256), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
side = torch.cuda.Stream()


def ahead(batches):
    """Bring each batch to the GPU while the one before it is worked on."""
    ready = None
    for inputs, labels in batches:
        with torch.cuda.stream(side):
            coming = inputs.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        if ready is not None:
            yield ready
        torch.cuda.current_stream().wait_stream(side)
        for tensor in coming:
            tensor.record_stream(torch.cuda.current_stream())
        ready = coming
    yield ready


for _ in range(4):
    for inputs, labels in ahead(DataLoader(samples, batch_size=32, shuffle=True, pin_memory=True)):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
torch.cuda.synchronize()
