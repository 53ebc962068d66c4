from nvidia.dali import fn, pipeline_def

import userstream as us


@pipeline_def(batch_size=4, num_threads=2, device_id=0)
def pipeline():
    return fn.random.uniform(range=[0.0, 1.0], shape=[64, 64], device="gpu")


built = pipeline()
built.build()
for _ in range(3):
    (batch,) = built.run()
    stream = us.get_stream(batch)
    info = us.describe(batch)
    assert (info.source, info.ordering) == ("dali TensorListGPU", "exact")

    # Your stream after DALI's, which the batch names; the host does not wait.
    stream.wait(us.Stream.from_handle(info.producer))

    # ... queue work on the batch here ...

    us.wait(batch, timeout=60)  # before DALI writes the next batch over this one
