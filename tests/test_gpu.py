"""What only a GPU can show: `make test-gpu`, which fails where there is none.

The shared tests run there, too, with `triton@cuda`, `cuda@cuda` and `eager@cuda` in the place of a
backend.
"""

import pytest
import torch

from padam_ext import FusedPadam, native

pytestmark = pytest.mark.gpu
OPTIONS = {"weight_decay": 0.1, "lr": 0.01}
SIZES = (1, 1000, 1024, 100_003)
each_kernel = pytest.mark.parametrize("kernel", ["triton", "cuda"])


def make_params(device="cuda", dtype=torch.float32, sizes=SIZES):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator) for size in sizes]
    return [torch.nn.Parameter(value.to(device, dtype)) for value in values]


def set_grads(params, seed):
    """New tensors each time, as zero_grad(set_to_none=True) makes them."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param)


def run(backend, device, partial=1 / 8, dtype=torch.float32, steps=3):
    params = make_params(device, dtype)
    optimizer = FusedPadam(params, **OPTIONS, partial=partial, backend=backend)
    for seed in range(steps):
        set_grads(params, seed)
        optimizer.step()
    states = [optimizer.state[p][key] for p in params for key in ("exp_avg", "max_exp_avg_sq")]
    return [t.detach().cpu() for t in (*params, *states)]


def test_this_machine_has_a_gpu():
    assert torch.cuda.is_available()


def test_auto_takes_triton():
    params = make_params()
    optimizer = FusedPadam(params)
    set_grads(params, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    assert any("multi_tensor_padam" in event.key for event in profile.key_averages())


@pytest.mark.parametrize(
    ("kernel", "other"),
    [("triton", ("cpu", "cpu")), ("cuda", ("cpu", "cpu")), ("cuda", ("triton", "cuda"))],
)
@pytest.mark.parametrize("partial", [0.0, 1 / 16, 1 / 8, 0.3, 1 / 4, 1 / 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_agrees_with_another_kernel(dtype, partial, kernel, other):
    tolerance = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(dtype, 2e-6)
    for ours, theirs in zip(
        run(kernel, "cuda", partial, dtype), run(*other, partial, dtype), strict=True
    ):
        bound = tolerance if ours.dtype == dtype else 2e-6
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@each_kernel
def test_bitwise_the_same_from_run_to_run(kernel):
    for one, other in zip(run(kernel, "cuda"), run(kernel, "cuda"), strict=True):
        assert torch.equal(one, other)


@each_kernel
def test_one_kernel_for_each_step_and_no_copy_in_the_steady_state(kernel):
    params = make_params()
    groups = [{"params": [p], "lr": 0.1 * i, "partial": 0.1 * i} for i, p in enumerate(params)]
    optimizer = FusedPadam(groups, backend=kernel)
    set_grads(params, 0)
    optimizer.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            optimizer.step()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 5, [event.name for event in on_device]


@each_kernel
def test_no_step_waits_for_the_device(kernel):
    params = make_params()
    optimizer = FusedPadam(params, backend=kernel)
    set_grads(params, 0)
    optimizer.step()
    grads = [[torch.randn_like(p) for p in params] for _ in range(6)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i, moved in enumerate(grads):
            for param, grad in zip(params, moved, strict=True):
                param.grad = grad
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + i)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_kernel
def test_memory_is_stable(kernel):
    params = make_params()
    optimizer = FusedPadam(params, backend=kernel)
    used = []
    for seed in range(1000):
        for param in params:
            param.grad = None if seed % 7 == 3 and param is params[1] else torch.ones_like(param)
        optimizer.step()
        used.append(torch.cuda.memory_allocated())
    assert max(used[500:]) <= max(used[100:500])


@each_kernel
def test_streams(kernel):
    """Steps on changing streams, each behind the one before as torch's own operations are."""
    expected = run(kernel, "cuda", steps=6)
    params = make_params()
    optimizer = FusedPadam(params, **OPTIONS, backend=kernel)
    streams = [torch.cuda.Stream() for _ in range(2)]
    last = torch.cuda.current_stream()
    for seed in range(6):
        stream = streams[seed % 2]
        stream.wait_stream(last)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            set_grads(params, seed)
            optimizer.step()
        last = stream
    torch.cuda.current_stream().wait_stream(last)
    torch.cuda.synchronize()
    for param, want in zip(params, expected, strict=False):
        assert torch.equal(param.cpu(), want)


@each_kernel
def test_several_devices_and_one_that_is_not_current(kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    expected = run(kernel, "cuda:0")
    params = make_params("cuda:0") + make_params("cuda:1")
    optimizer = FusedPadam(params, **OPTIONS, backend=kernel)
    for seed in range(3):
        set_grads(params[: len(SIZES)], seed)
        set_grads(params[len(SIZES) :], seed)
        optimizer.step()
    assert torch.cuda.current_device() == 0
    for param, want in zip(params, expected[: len(SIZES)] * 2, strict=True):
        assert torch.equal(param.cpu(), want)


def test_an_error_of_cuda_is_told_and_leaves_the_device_usable():
    table = native.module.DeviceTable(
        addresses=0, numels=0, rows=0, constants=0, chunk_tensors=0, chunk_first_blocks=0,
        num_tensors=3, num_chunks=1, blocks_per_chunk=1, param_dtype=0, grad_dtype=0,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"for 3 tensors on cuda:99: invalid device ordinal"):
        native.module.step_cuda(table, 99, 0)
    run("cuda", "cuda")


def test_nothing_is_compiled_for_a_new_lr_partial_list_or_size():
    from padam_ext.kernels.multi_tensor_padam import multi_tensor_padam

    def step(sizes, **options):
        params = make_params(sizes=sizes)
        optimizer = FusedPadam(params, **options)
        set_grads(params, 0)
        optimizer.step()

    step((5,), partial=0.3)
    compiled = multi_tensor_padam.device_caches[torch.cuda.current_device()][0]
    before = len(compiled)
    for sizes in ((1,), (16, 1), (1024,) * 16, (5_000_001,)):
        for options in ({"partial": 0.2}, {"partial": 0.4, "lr": 1.0}, {"partial": 0.0, "eps": 1}):
            step(sizes, **options, amsgrad=len(sizes) > 1)
    assert len(compiled) == before


@each_kernel
def test_more_than_two_to_the_31_elements(kernel):
    numel = 2**31 + 5
    needed = numel * 17
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free memory")
    param = torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16, device="cuda"))
    param.grad = torch.zeros_like(param)
    for part in (slice(0, 3), slice(2**31 - 2, 2**31 + 2), slice(numel - 3, numel)):
        param.grad[part] = 1.0
    expected = -0.1 * 0.1 / (0.001**0.5 + 1e-8) ** 0.25
    FusedPadam([param], backend=kernel).step()
    moved = param.detach() != 0
    assert int(moved.sum()) == 10
    values = param.detach()[moved].double()
    torch.testing.assert_close(values, torch.full_like(values, expected), rtol=2.0**-8, atol=0)
