"""Four threads with a stream each, whose results one more stream adds."""

import threading

import torch

source = torch.randn(1 << 18, device="cuda")
streams = [torch.cuda.Stream() for _ in range(4)]
results = [None] * len(streams)
done = [torch.cuda.Event() for _ in streams]
begun = torch.cuda.Event()
begun.record()


def work(number):
    with torch.cuda.stream(streams[number]):
        begun.wait()
        for _ in range(10):
            results[number] = source * number + 1
        results[number].record_stream(torch.cuda.default_stream())
        done[number].record()


threads = [threading.Thread(target=work, args=(number,)) for number in range(len(streams))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for event in done:
    event.wait()
print(sum(results).sum().item())
