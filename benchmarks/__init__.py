"""userstream beside what its users would call instead, measured in turns: ``python -m benchmarks``.

A case is a generator of comparisons, in the module of its subject (`SUBJECTS` of ``__main__.py``)::

    @case
    def device_of_a_tensor(run: Run) -> Comparisons:
        x = run.need("torch").zeros(16, device="cuda")
        calls = {"us.device_of(x)": lambda: us.device_of(x), "x.device": lambda: x.device}
        yield Comparison("device_of a tensor", calls, (at_most(2, "x.device"),))
"""
