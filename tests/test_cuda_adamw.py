"""AdamW on an NVIDIA GPU: the CPU's bits, by the kernel and by the optimizer of pydet.torch."""

import itertools

import numpy as np
import pytest

import pydet
import reference_adamw as reference
import test_adamw as adamws
from cases import DTYPES, assert_same_bits, data
from test_cuda import device, each, torch  # noqa: F401

GUARD = 64  # bytes before and behind each tensor, which stay as they were
# One less, equal, one more: vectors of 4, a warp's, those of a block's 256 threads, its piece of 2048; the CPU's piece.
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 127, 128, 129, 1023, 1024, 1025, 1028, 2044, 2047, 2048, 2049, 2052, 4095, 4096, 4097]
SIZES += [8191, 8192, 8193, 20_003]


class Moved:
    """Arrays as tensors on the GPU, each as far behind a multiple of 64 bytes as it is on the CPU, between guards."""

    def __init__(self, torch):
        self.torch, self.held = torch, []

    def bring(self, array):
        torch, offset = self.torch, array.ctypes.data % 64 if array.size else 0
        memory = torch.full((offset + array.nbytes + 2 * GUARD,), 0xA5, dtype=torch.uint8, device="cuda")
        assert memory.data_ptr() % 64 == 0
        words = memory[GUARD + offset :][: array.nbytes]
        words.copy_(torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
        self.held.append((memory, offset, array.nbytes))
        dtype = {4: torch.float32, 2: torch.bfloat16 if array.dtype.name == "bfloat16" else torch.float16}
        return words.view(dtype[array.itemsize]).view(array.shape)

    def back(self, tensor):
        size = 4 if tensor.dtype == self.torch.float32 else 2
        words = tensor.contiguous().view(self.torch.int32 if size == 4 else self.torch.int16).cpu().numpy()
        names = {self.torch.float32: "fp32", self.torch.bfloat16: "bf16", self.torch.float16: "fp16"}
        return words.view(DTYPES[names[tensor.dtype]])

    def check_guards(self):
        for memory, offset, size in self.held:
            words = memory.cpu().numpy()
            assert (words[: GUARD + offset] == 0xA5).all() and (words[GUARD + offset + size :] == 0xA5).all()
        assert self.held
        self.held = []


def forced(kernel):
    def adamw(*lists, **how):
        pydet.adamw(*lists, **how, kernel=kernel.name)
        assert pydet.last_kernel() in (kernel.name, "")

    return adamw


def check_lists(torch, adamw, tensors, how, what):
    want, moved = adamws.copied(tensors), Moved(torch)
    reference.adamw(*adamws.lists_of(want), **how)
    ours = [[x if x is None else moved.bring(x) for x in one] for one in tensors]
    adamw(*adamws.lists_of(ours), **how)
    for i, (own, theirs) in enumerate(zip(ours, want, strict=True)):
        for name, x, y in zip(adamws.NAMES, own, theirs, strict=True):
            if x is not None:
                assert_same_bits(moved.back(x), y, f"{name}[{i}] of {what}")
    moved.check_guards()


@each("adamw")
def test_adamw_equals_the_reference(device, kernel, dtype):
    moved = Moved(device.torch)
    adamws.check(forced(kernel), dtype, SIZES, bring=moved.bring, back=moved.back)
    moved.check_guards()


@each("adamw")
def test_lists(device, kernel, dtype):
    """One tensor, two, one less than a call takes and as many: small ones, ones of several pieces, of all types."""
    dtypes = [DTYPES[dtype], *DTYPES.values()]
    for count, sizes in itertools.product(
        (1, 2, 3, 31, 32, 33, 63, 64), ((1, 5, 0, 3), (2047, 4097, 1, 2048, 2049, 10_000))
    ):
        tensors = adamws.many(count, dtypes, sizes)
        check_lists(device.torch, forced(kernel), tensors, adamws.HOW, f"{count} of {sizes}")


@each("adamw")
def test_each_operand_by_itself_out_of_line(device, kernel, dtype):
    """Where one tensor of five is not aligned for vectors, elements are taken one by one."""
    for odd, size in itertools.product(range(5), (2051, 4100)):
        tensors = adamws.tensors_of(1, (size,), DTYPES[dtype], with_master=True)
        tensors = [x if x is None else adamws.placed(x, int(i == odd)) for i, x in enumerate(tensors)]
        check_lists(device.torch, forced(kernel), [tensors], adamws.HOW, f"{size}, {adamws.NAMES[odd]} out of line")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_large_tensors_equal_the_cpu(torch, dtype):
    """Many waves of blocks, by the CPU's own kernel."""
    for size in (12_345_679, 1 << 24):
        tensors = adamws.tensors_of(2, (size,), DTYPES[dtype], "wide", grad_dtype=DTYPES[dtype], with_master=True)
        moved = Moved(torch)
        ours = [x if x is None else moved.bring(x) for x in tensors]
        pydet.adamw(*adamws.lists_of([ours]), **adamws.HOW)
        assert pydet.last_kernel() == "cuda_adamw"
        pydet.adamw(*adamws.lists_of([tensors]), **adamws.HOW)
        assert pydet.last_kernel().startswith("cpu_adamw")
        for name, x, y in zip(adamws.NAMES, ours, tensors, strict=True):
            if x is not None:
                assert_same_bits(moved.back(x), y, f"{name} of {size}")
        moved.check_guards()


def test_a_captured_step_repeats_its_numbers(torch):
    tensors = adamws.tensors_of(1, (5000,), DTYPES["bf16"], with_master=True)
    moved = Moved(torch)
    ours = [moved.bring(x) for x in tensors]
    lists, graph = adamws.lists_of([ours]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pydet.adamw(*lists, **adamws.HOW)
    for _ in range(3):
        graph.replay()
        pydet.adamw(*adamws.lists_of([tensors]), **adamws.HOW)
    for x, y in zip(ours, tensors, strict=True):
        assert_same_bits(moved.back(x), y)


def test_streams_that_run_beside_each_other(torch):
    """Each with tensors of its own, again and again, while the other computes."""
    streams, want, ours = [torch.cuda.Stream() for _ in range(2)], [], []
    moved = Moved(torch)
    for number in range(2):
        want.append(adamws.many(20, list(DTYPES.values()), (70_000, 3, 2049), first=50 * number))
        ours.append([[x if x is None else moved.bring(x) for x in one] for one in want[-1]])
    torch.cuda.synchronize()
    for _ in range(5):
        for number, stream in enumerate(streams):
            if number == 0:
                with torch.cuda.stream(stream):
                    pydet.adamw(*adamws.lists_of(ours[number]), **adamws.HOW)
            else:
                pydet.adamw(*adamws.lists_of(ours[number]), **adamws.HOW, stream=stream.cuda_stream)
            pydet.adamw(*adamws.lists_of(want[number]), **adamws.HOW)
    torch.cuda.synchronize()
    for x, y in zip(itertools.chain(*ours), itertools.chain(*want), strict=True):
        for own, theirs in zip(x, y, strict=True):
            if own is not None:
                assert_same_bits(moved.back(own), theirs)
    moved.check_guards()


# ---- The optimizer ---------------------------------------------------------------------------------------------------


def test_the_optimizer_has_the_bits_of_the_cpu(torch):
    """Of more tensors than two launches take."""
    from test_torch_optimizer import same_tensors, trained

    want = trained("cpu")
    same_tensors(trained("cuda"), want)
    assert pydet.last_kernel() == "cuda_adamw"
    same_tensors(trained("cuda", composed=True), want)
    same_tensors(trained("cuda", compiled=True), want)


def test_the_optimizer_is_not_captured(torch):
    import pydet.torch as pt

    p = torch.nn.Parameter(torch.ones(300, device="cuda"))
    p.grad = torch.ones_like(p)
    adam, graph = pt.AdamW([p]), torch.cuda.CUDAGraph()
    adam.step()
    before = p.detach().clone()
    words = r"^AdamW: a CUDA graph captures the step, want it outside"
    with pytest.raises(pydet.Error, match=words), torch.cuda.graph(graph):
        adam.step()
    torch.cuda.synchronize()
    assert p.detach().equal(before) and adam.state[p]["step"] == 1


def test_where_tensors_lie_differently(torch):
    """A gradient in another order than its parameter, a parameter with gaps, one of a transposed matrix."""
    import pydet.torch as pt
    from test_torch_optimizer import same_tensors

    found = []
    for where in ("cpu", "cuda"):
        base = torch.from_numpy(data("normal", (40, 24), np.dtype(np.float32), 1)).to(where)
        for x in (base.clone(), base.clone().t(), base.clone()[:, ::2]):
            p = torch.nn.Parameter(x)
            adam = pt.AdamW([p], lr=0.1)
            for number in range(2):
                g = torch.from_numpy(data("normal", (p.shape[1], p.shape[0]), np.dtype(np.float32), number)).to(where)
                p.main_grad = g.t()
                adam.step()
            found.append(p.detach().cpu())
    same_tensors(found[:3], found[3:])


def test_the_optimizer_steps_on_the_current_stream(torch):
    """Behind what makes its gradients there, which takes long; the default stream is not waited for."""
    import pydet.torch as pt
    from test_torch_optimizer import same_tensors

    found = []
    for where in ("cpu", "cuda"):
        parameters = [torch.nn.Parameter(torch.ones(1 + i, device=where)) for i in range(70)]
        adam, stream = pt.AdamW(parameters, lr=0.1), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step in range(3):
                if where == "cuda":
                    torch.cuda._sleep(20_000_000)
                for i, p in enumerate(parameters):
                    p.grad = torch.full_like(p, 0.1 * step + i)
                adam.step()
        stream.synchronize()
        found.append([p.detach().cpu() for p in parameters])
    same_tensors(*found)


def test_parameters_that_move_between_devices(torch):
    """Without their state they are refused; with it, loaded anew, they go on with the same bits."""
    import pydet.torch as pt
    from test_torch_optimizer import same_tensors

    found = []
    for moves in (False, True):
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 5 + i).bfloat16()) for i in range(70)]
        adam = pt.AdamW(parameters, lr=0.1)
        for step in range(3):
            for p in parameters:
                p.grad = None
                if moves and step == 1:
                    p.data = p.data.cuda()
                p.grad = torch.full_like(p, 0.1 * step + len(p))
            if moves and step == 1:
                with pytest.raises(pydet.Error, match=r"^adamw: exp_avgs\[0\] is on the CPU, want CUDA device 0"):
                    adam.step()
                for state in adam.state.values():  # which the refused step has counted
                    state["step"] = 1
                    state["beta1_power"], state["beta2_power"] = 0.9, 0.999
                adam.load_state_dict(adam.state_dict())
            adam.step()
        found.append([x.cpu() for p in parameters for x in (p.detach(), adam.state[p]["master"])])
    same_tensors(*found)


def test_parameters_on_two_devices(torch):
    """Those of the CPU and of a GPU in one optimizer, and in one group."""
    import pydet.torch as pt
    from test_torch_optimizer import same_tensors

    found = []
    for where in (("cpu", "cpu"), ("cpu", "cuda")):
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 5 + i).to(where[i % 2])) for i in range(9)]
        adam = pt.AdamW(parameters, lr=0.1)
        for step in range(3):
            for p in parameters:
                p.grad = torch.full_like(p, 0.1 * step + len(p))
            adam.step()
        found.append([p.detach().cpu() for p in parameters])
    same_tensors(*found)
