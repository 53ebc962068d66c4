from nvidia.dali import fn, pipeline_def

import userstream as us


@pipeline_def(batch_size=4, num_threads=2, device_id=0)
def pipeline():
    return fn.random.uniform(range=[0.0, 1.0], shape=[64, 64], device="gpu")


built = pipeline()
built.build()
for _ in range(3):
    (batch,) = built.run()
    with us.borrow(batch) as stream:  # after DALI's work on the batch; the host does not wait
        pass  # ... queue work on the batch here, on `stream`: the next run does not touch it ...
us.wait(batch, timeout=60)

info = us.describe(batch)
assert (info.source, info.ordering) == ("dali TensorListGPU", "exact")
