"""A pipeline on two streams: one transforms while the other one brings the next signal."""

import cupy
import numpy

signals = [numpy.random.default_rng(seed).random(1 << 16) for seed in range(6)]
bring, work = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
here = [cupy.empty(1 << 16), cupy.empty(1 << 16)]
spectra = []
cupy.cuda.get_current_stream().synchronize()
free = [cupy.cuda.Event(), cupy.cuda.Event()]
for number, signal in enumerate(signals):
    slot = number % 2
    bring.wait_event(free[slot])
    here[slot].set(signal, stream=bring)
    arrived = bring.record()
    work.wait_event(arrived)
    with work:
        spectra.append(cupy.abs(cupy.fft.rfft(here[slot])).sum())
    free[slot].record(work)
work.synchronize()
print([float(each) for each in spectra])
