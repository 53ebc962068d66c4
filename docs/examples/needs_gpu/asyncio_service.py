import asyncio

import torch

import userstream as us

weights = torch.full((1024, 1024), 2.0, device="cuda:0")


async def answer(request):
    x = torch.full((1024, 1024), float(request), device="cuda:0")
    with us.borrow(x, weights, activate=True) as stream:
        result = x @ weights  # queued on the user stream
    await us.wait_async(stream, timeout=60)  # the event loop serves other requests meanwhile
    return result[0, 0].item()


async def main():
    answers = await asyncio.gather(*map(answer, range(8)))
    assert answers == [2048.0 * request for request in range(8)]


asyncio.run(main())
