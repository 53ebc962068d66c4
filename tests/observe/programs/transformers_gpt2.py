"""Training steps of a small GPT-2."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    tokens = torch.randint(0, 1000, (4, 64), device="cuda")
    optimizer.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
with torch.no_grad():
    model.generate(tokens[:1, :8], max_new_tokens=8, pad_token_id=0)
torch.cuda.synchronize()
