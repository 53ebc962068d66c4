"""A training with many kinds of kernels, and batches that a side stream brings ahead."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

samples = TensorDataset(torch.randn(192, 3, 32, 32), torch.randint(0, 10, (192,)))


class Net(nn.Module):
    """Convolutions, attention, and indices of all kinds."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 5, padding=2)
        self.norm, self.conv = nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3, stride=2)
        self.emb, self.att = nn.Embedding(50, 32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.out = nn.Linear(32, 10)

    def forward(self, x):
        y = torch.cat([self.a(x), self.b(x.flip(-1))], 1)
        y = self.conv(torch.relu(self.norm(y)))
        y = y.flatten(2).transpose(1, 2)[:, ::3]
        y = y + self.emb((x[:, 0, 0, :1].abs() * 10).long().clamp(0, 49))
        y, _ = self.att(y, y, y)
        y = torch.nn.functional.dropout(y, 0.1).masked_fill(y > 4, 0)
        y = y[torch.randperm(y.shape[0], device=y.device)].sort(1)[0].permute(1, 0, 2).mean(0)
        return self.out(y)


model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
side = torch.cuda.Stream()


def ahead(batches):
    """Bring each batch to the GPU, and work on it there, while the one before it is used."""
    ready = None
    for inputs, labels in batches:
        with torch.cuda.stream(side):
            there = inputs.cuda(non_blocking=True).mul(2).sub(1)
            there = there.contiguous(memory_format=torch.channels_last)
            coming = there, labels.cuda(non_blocking=True)
        if ready is not None:
            yield ready
        torch.cuda.current_stream().wait_stream(side)
        for tensor in coming:
            tensor.record_stream(torch.cuda.current_stream())
        ready = coming
    yield ready


for _ in range(3):
    for inputs, labels in ahead(DataLoader(samples, batch_size=24, shuffle=True, pin_memory=True)):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(inputs), labels, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
torch.cuda.synchronize()
