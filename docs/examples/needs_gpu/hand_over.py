from concurrent.futures import ThreadPoolExecutor

import torch

import userstream as us

tensor = torch.ones(1 << 20, device="cuda:0")
side = torch.cuda.Stream(0)


def use(result):
    with torch.cuda.stream(side):
        us.hand_over(result)  # `side` waits for the user stream, and the allocator is told
        return result.sum().item()


with us.borrow(tensor, activate=True), ThreadPoolExecutor(1) as pool:
    doubled = tensor * 2  # on the user stream
    assert pool.submit(use, doubled).result(60) == 2 << 20
