"""What only a GPU can show: `make test-gpu`, which fails where there is none.

The shared tests run there, too, with `triton@cuda`, `cuda@cuda` and `eager@cuda` in the place of a
backend.
"""

import gc
import math
from contextlib import nullcontext

import pytest
import torch

from padam_ext import FusedPadam, backward, native, step_during_backward
from test_cuda import native_table

pytestmark = pytest.mark.gpu
OPTIONS = {"weight_decay": 0.1, "lr": 0.01}
SIZES = (1, 1000, 1024, 100_003)
SCALE = 1024.0  # of losses; multiplying by a power of two rounds nothing
each_kernel = pytest.mark.parametrize("kernel", ["triton", "cuda"])
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)


def make_params(device="cuda", dtype=torch.float32, sizes=SIZES):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator) for size in sizes]
    return [torch.nn.Parameter(value.to(device, dtype)) for value in values]


def set_grads(params, seed, scale=1.0):
    """New tensors each time, as zero_grad(set_to_none=True) makes them."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param)


def make_scaler(enabled=True):
    scaler = torch.amp.GradScaler("cuda", init_scale=SCALE, enabled=enabled)
    scaler.scale(torch.ones((), device="cuda"))  # makes its tensors
    return scaler


def step_scaled(scaler, optimizer):
    scaler.step(optimizer)
    scaler.update()


def contents(optimizer):
    params = optimizer.param_groups[0]["params"]
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
    states = [optimizer.state[param][name] for param in params for name in names]
    return [tensor.detach().cpu().clone() for tensor in (*params, *states)]


def same_bits(these, those):
    return all(torch.equal(one, other) for one, other in zip(these, those, strict=True))


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
@each_dtype
def test_agrees_with_another_kernel(dtype, partial, kernel, other):
    # One step may round to either of two neighbours, which are a unit apart.
    unit = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(dtype)
    steps = 3 if unit is None else 1
    for ours, theirs in zip(
        run(kernel, "cuda", partial, dtype, steps), run(*other, partial, dtype, steps), strict=True
    ):
        bound = 1.01 * unit if unit and ours.dtype == dtype else 2e-6
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@each_kernel
def test_bitwise_the_same_from_run_to_run(kernel):
    assert same_bits(run(kernel, "cuda"), run(kernel, "cuda"))


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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": 1.0}, {"skip_nonfinite": True}, {"bias_correction": "adam"}],
    ids=lambda options: "".join(options) or "plain",
)
@each_kernel
def test_no_step_waits_for_the_device(kernel, options, scaled):
    params = make_params()
    optimizer = FusedPadam(params, **options, backend=kernel)
    scaler = make_scaler(scaled)
    grads = [[torch.randn_like(p) for p in params] for _ in range(8)]

    def step(i):
        for param, grad in zip(params, grads[i], strict=True):
            param.grad = grad
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + i)
        step_scaled(scaler, optimizer)

    step(0)
    step(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(2, len(grads)):
            step(i)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@each_kernel
def test_scaled_gradients_make_the_same_step_to_the_bit(kernel, max_grad_norm):
    plain, scaled = (
        FusedPadam(make_params("cuda:0"), **OPTIONS, max_grad_norm=max_grad_norm, backend=kernel)
        for _ in range(2)
    )
    scaler = make_scaler()
    for seed in range(3):
        set_grads(plain.param_groups[0]["params"], seed)
        set_grads(scaled.param_groups[0]["params"], seed, SCALE)
        plain.step()
        step_scaled(scaler, scaled)
        assert plain.grad_norm == scaled.grad_norm
    assert same_bits(contents(plain), contents(scaled))
    assert scaled.skipped_steps == 0


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bias_correction", ["none", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # GradScaler's
@each_kernel
def test_a_step_with_an_infinite_gradient_changes_nothing(kernel, dtype, bias_correction, scaled):
    params = make_params("cuda:0", dtype)
    optimizer = FusedPadam(
        params, **OPTIONS, bias_correction=bias_correction, max_grad_norm=1.0,
        skip_nonfinite=not scaled, backend=kernel,
    )  # fmt: skip
    scaler = make_scaler(scaled)
    set_grads(params, 0)
    step_scaled(scaler, optimizer)
    for seed, poison in enumerate((math.inf, 0.0, math.nan, -math.inf, 0.0)):
        before = contents(optimizer)
        set_grads(params, seed)
        params[2].grad[1023] += poison
        step_scaled(scaler, optimizer)
        assert same_bits(before, contents(optimizer)) == (poison != 0)
    assert optimizer.skipped_steps == 3
    assert all(optimizer.state[param]["step"] == 3 for param in params)
    if scaled:
        assert scaler.get_scale() == SCALE / 8


@each_dtype
@each_kernel
def test_the_norm_is_torchs_and_the_same_from_run_to_run(kernel, dtype):
    norms = set()
    for _ in range(3):
        # The last one's programs have several blocks each.
        params = make_params(dtype=dtype, sizes=(*SIZES, 10_000_001))
        set_grads(params, 0)
        grad = params[3].grad
        params[3].grad = torch.cat([grad[:1], grad])[1:]  # where no 16 bytes can be read at once
        optimizer = FusedPadam(params, max_grad_norm=1.0, backend=kernel)
        for _ in range(3):
            optimizer.step()
            norms.add(optimizer.grad_norm.item())
    [norm] = norms
    expected = torch.nn.utils.get_total_norm([param.grad.double() for param in params])
    rounding = 1e-12 if dtype == torch.float64 else 1e-6
    assert norm == pytest.approx(expected.item(), rel=rounding)


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


def make_grads(params, count):
    """On the device beforehand: a copy from the host would wait for what is queued."""
    return [[torch.randn_like(param) for param in params] for _ in range(count)]


def step_with(optimizer, grads):
    params = optimizer.param_groups[0]["params"]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.param_groups[0]["lr"] *= 0.9  # so that the table changes each time
    optimizer.step()


A_WHILE = 300_000_000  # of a GPU's cycles, a tenth of a second or more


@each_kernel
def test_the_host_runs_ahead_of_the_device(kernel):
    """Thirty steps, whose tables are copied from pinned memory, wait behind other work."""
    expected, ahead = (FusedPadam(make_params(), **OPTIONS, backend=kernel) for _ in range(2))
    grads = make_grads(make_params(), 31)
    for one in grads:
        step_with(expected, one)
        torch.cuda.synchronize()
    step_with(ahead, grads[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(A_WHILE)
    behind = torch.cuda.Event()
    behind.record()
    for one in grads[1:]:
        step_with(ahead, one)
    assert not behind.query()  # else nothing was shown
    assert same_bits(contents(expected), contents(ahead))


@each_kernel
def test_steps_on_changing_streams(kernel):
    """Each behind the one before, as torch's own operations are, while work is still queued."""
    expected, changing = (FusedPadam(make_params(), **OPTIONS, backend=kernel) for _ in range(2))
    grads = make_grads(make_params(), 7)
    for one in grads:
        step_with(expected, one)
    step_with(changing, grads[0])
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    last = torch.cuda.current_stream()
    for i, one in enumerate(grads[1:]):
        stream = streams[i % 2]
        stream.wait_stream(last)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(A_WHILE // 6)
            step_with(changing, one)
        last = stream
    assert not last.query()  # else nothing was shown
    torch.cuda.current_stream().wait_stream(last)
    assert same_bits(contents(expected), contents(changing))


@each_kernel
def test_a_table_is_kept_while_another_stream_uses_it(kernel):
    """Even if the optimizer is dropped, and others ask for memory of that size."""
    params, grads = make_params(), make_grads(make_params(), 2)
    expected = FusedPadam(make_params(), **OPTIONS, backend=kernel)
    optimizer = FusedPadam(params, **OPTIONS, backend=kernel)
    for one in grads:
        step_with(expected, one)
    step_with(optimizer, grads[0])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(A_WHILE)
        step_with(optimizer, grads[1])
    states = [optimizer.state[param] for param in params]
    del optimizer
    gc.collect()
    spoiled = [torch.full((words,), -1, device="cuda") for words in range(8, 4096, 8)]
    assert not side.query()  # else nothing was shown
    torch.cuda.synchronize()
    moved = [state["exp_avg"].cpu() for state in states] + [p.detach().cpu() for p in params]
    others = expected.param_groups[0]["params"]
    wanted = [expected.state[p]["exp_avg"].cpu() for p in others]
    wanted += [p.detach().cpu() for p in others]
    assert same_bits(moved, wanted)
    del spoiled


@each_kernel
def test_stepping_during_a_backward_of_several_streams(kernel, monkeypatch):
    """A gradient is used on the stream that made it, or behind the end of backward."""
    monkeypatch.setattr(backward, "BATCH_BYTES", 1)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    found = []
    for in_backward in (False, True):
        params = make_params(sizes=[4096] * 6)
        optimizer = FusedPadam(params, **OPTIONS, backend=kernel)
        with step_during_backward(optimizer) if in_backward else nullcontext():
            for _ in range(3):
                losses = []
                for i, param in enumerate(params):
                    streams[i % 2].wait_stream(streams[1 - i % 2])
                    with torch.cuda.stream(streams[i % 2]):
                        losses.append((param.square() * (i + 1)).sum())
                streams[0].wait_stream(streams[1])
                torch.stack(losses).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.synchronize()
        found.append(contents(optimizer))
    assert same_bits(*found)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e9}], ids=["plain", "with_norm"])
@each_kernel
def test_several_devices_and_one_that_is_not_current(kernel, options):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    expected = run(kernel, "cuda:0")
    params = make_params("cuda:0") + make_params("cuda:1")
    optimizer = FusedPadam(params, **OPTIONS, **options, backend=kernel)
    for seed in range(3):
        set_grads(params[: len(SIZES)], seed)
        set_grads(params[len(SIZES) :], seed)
        optimizer.step()
    assert torch.cuda.current_device() == 0
    for param, want in zip(params, expected[: len(SIZES)] * 2, strict=True):
        assert torch.equal(param.cpu(), want)


def test_an_error_of_cuda_is_told_and_leaves_the_device_usable():
    table = native_table(num_tensors=3, num_chunks=1, blocks_per_chunk=1)
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

    for partial in (0.3, 0.0):  # two kernels, and with amsgrad two others
        step((5,), partial=partial, amsgrad=True)
        step((5,), partial=partial, amsgrad=False)
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


@each_kernel
def test_a_cuda_graph_replays_steps_with_another_learning_rate(kernel):
    plain, graphed = make_params(), make_params()
    options = {"weight_decay": 0.1, "max_grad_norm": 1.0, "bias_correction": "adam"}
    rates = [0.1, 0.05, 0.025]
    expected = FusedPadam(plain, **options, backend=kernel)
    lr = torch.tensor(0.1, device="cuda")
    optimizer = FusedPadam(graphed, lr=lr, **options, capturable=True, backend=kernel)
    for params in (plain, graphed):
        set_grads(params, 0)
    for step in (expected.step, optimizer.step):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for rate in rates:
        expected.param_groups[0]["lr"] = rate
        expected.step()
        lr.fill_(rate)
        graph.replay()
    for one, other in zip(contents(expected), contents(optimizer), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
