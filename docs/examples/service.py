import asyncio

import numpy
from cuda.core import Device, LegacyPinnedMemoryResource

import userstream as us

SLOTS, SIZE = 4, 1024


def make_slot(number):
    stream = us.get_stream(0, name=f"request-{number}")
    buffer = Device(0).allocate(SIZE, stream=stream)
    return stream, buffer, LegacyPinnedMemoryResource().allocate(SIZE)


async def answer(request, slots):
    slot = stream, buffer, host = await slots.get()  # at most SLOTS at once
    try:
        buffer.fill(request, stream=stream)  # your work
        buffer.copy_to(host, stream=stream)
        await us.wait_async(stream, timeout=10)  # the event loop runs on meanwhile
        return numpy.from_dlpack(host).copy()
    finally:
        slots.put_nowait(slot)


async def main():
    Device(0).set_current()
    slots = asyncio.Queue()
    for number in range(SLOTS):
        slots.put_nowait(make_slot(number))
    answers = await asyncio.gather(*(answer(request, slots) for request in range(100)))
    assert [int(given[0]) for given in answers] == list(range(100))
    await us.wait_all_async(timeout=10)  # at the end of the service


asyncio.run(main())
