"""Calls that were made before: known_calls.py on real arrays, whose memory is taken for a GPU's; nothing is launched.

(Against random calls, and the fast road: test_native.py.)
"""

import ctypes
import struct
import sys
import types
import weakref
from typing import NamedTuple

import numpy as np
import pytest
from support import needs_compiler, optional

from benchmarks.roads import without_fast_road
from numba_kvcache import arrays, dispatch, driver, fast_road, known_calls, launch, torch_guards

pytestmark = needs_compiler

# The Python function: on a GPU the fast road may be in force by now, and would take these addresses for its own.
store_kvcache = without_fast_road(dispatch.store_kvcache)

B, WIDTH, SLOTS = 4, 128, 64
STREAM = 0x7000


class Device(NamedTuple):
    type: str
    index: int


class Launched(list):
    """Each launch: (device, early launch's attributes, blocks, stream, the 13 parameters)."""

    status, gpus = 0, 2
    ready = 0  # how many of these were made by known calls
    device = 0  # the current one, whose context is 0x1000 and itself

    def push_device(self, device):
        self.before, self.device = self.device, device
        return self.before != device

    def pop_device(self):
        self.device = self.before

    def current_context(self):
        return 0x1000 + self.device

    def kernel(self, config, kernel, pointers, extra):
        # What byref refers to is the block: CUlaunchConfig, 13 parameters.
        grid, *_, stream, _, count = struct.unpack_from("3I3II4xQQI", config._obj)
        self.append((self.device, count, grid, stream, struct.unpack_from("10Qqqq", config._obj, 56)))
        return self.status


@pytest.fixture
def launched(monkeypatch):
    """The launches, in the order made. CPU tensors count as of device 0, addresses name their device by bit 44."""
    seen = Launched()

    def pointer_device(address):
        assert address
        return None if address >> 45 else address >> 44

    monkeypatch.setattr(launch, "_launch_kernel", lambda: lambda *arguments: seen.kernel(*arguments))
    for name, value in {
        "push_device": seen.push_device,
        "pop_device": seen.pop_device,
        "current_device": lambda: seen.device,
        "current_context": seen.current_context,
        "context_here": lambda: (0, seen.current_context()),
        "compute_capability": lambda device: (9, 0),
        "sm_count": lambda device: 132,
        "kernel_function": lambda kernel: kernel,
        "device_count": lambda: seen.gpus,
        "pointer_device": pointer_device,
        "describe": lambda status: f"status {status}",
        "initialise": lambda: None,
    }.items():
        monkeypatch.setattr(driver, name, value)
    monkeypatch.setattr(dispatch, "loaded_kernel", lambda spec, device: 5)
    monkeypatch.setattr(dispatch, "_plans", {})
    for name in ("start", "remember_plan", "remember_type"):
        monkeypatch.setattr(fast_road, name, lambda *arguments, **options: None)
    monkeypatch.setattr(known_calls, "_readers", {})
    monkeypatch.setattr(arrays, "readers", {})
    monkeypatch.setattr(dispatch, "readers", arrays.readers)
    arrays.unreported.clear()
    known_calls.known.clear()
    monkeypatch.setattr(known_calls, "_torch_guards", None)
    facts_of = arrays._torch_facts.__wrapped__
    of_gpu = {"cpu": Device("cuda", 0)}
    monkeypatch.setattr(
        arrays, "_torch_facts", lambda shape, strides, dtype, device: facts_of(
            shape, strides, dtype, of_gpu.get(device.type, device)
        )
    )  # fmt: skip
    ready = launch.ReadyLaunch.launch

    def counted(*arguments):
        seen.ready += 1
        ready(*arguments)

    monkeypatch.setattr(launch.ReadyLaunch, "launch", counted)
    yield seen
    known_calls.known.clear()
    arrays.unreported.clear()


def find_guards():
    return torch_guards.find_guards(known_calls._read_torch, known_calls.MAX_KNOWN)


def needs_guards():
    """A skip where torch has no such class. Where it has one that does not serve any more, tests shall say so."""
    torch = optional("torch")
    if not hasattr(torch._C._dynamo.guards, "TensorGuards"):
        pytest.skip(f"torch {torch.__version__} has no TensorGuards")


def read_torch_by(how, monkeypatch):
    optional("torch")
    if how == "attributes":
        monkeypatch.setattr(known_calls, "find_guards", lambda *arguments, **options: None)
    else:
        needs_guards()
        assert find_guards() is not None


@pytest.fixture(params=["guards", "attributes"])
def both_readers(request, monkeypatch):
    """Torch tensors by each of the two readers that known_calls.py has for them."""
    read_torch_by(request.param, monkeypatch)


@pytest.fixture(params=["torch by guards", "torch by attributes", "numba"])
def make(request, monkeypatch):
    """Makes the arrays of one call."""
    if request.param == "numba":
        return numba_arrays
    read_torch_by(request.param.removeprefix("torch by "), monkeypatch)
    return torch_arrays


def dense(shape, dtype):
    itemsize = np.dtype(dtype).itemsize
    return (shape[-1] * itemsize, itemsize)[-len(shape) :]


def numba_array(shape, dtype, address, *, owned=True):
    from numba.cuda.cudadrv.devicearray import DeviceNDArray
    from numba.cuda.cudadrv.driver import OwnedPointer

    class Memory:
        is_managed = False
        refct = 1
        device_ctypes_pointer = ctypes.c_size_t(address)

    memory = OwnedPointer(Memory()) if owned else Memory()
    return DeviceNDArray(shape, dense(shape, dtype), dtype, gpu_data=memory)


class CupyArray:
    """Stands for cupy.ndarray."""

    def __init__(self, shape, dtype, address, device=0):
        self.shape, self.strides, self.dtype = shape, dense(shape, dtype), np.dtype(dtype)
        self.data = types.SimpleNamespace(ptr=address, device_id=device)


def numba_arrays(batch=B, *, base=0, kind=numba_array):
    rows = [(batch, WIDTH), (batch, WIDTH), (SLOTS, WIDTH), (SLOTS, WIDTH)]
    named = [kind(shape, np.float16, base + 0x10000 * (i + 1)) for i, shape in enumerate(rows)]
    return [*named, kind((batch,), np.int64, base + 0x50000)]


def torch_arrays(batch=B):
    torch = optional("torch")
    rows = [torch.zeros(count, WIDTH, dtype=torch.bfloat16) for count in (batch, batch, SLOTS, SLOTS)]
    return [*rows, torch.zeros(batch, dtype=torch.int64)]


def addresses(given):
    return tuple(
        array.data_ptr() if hasattr(array, "data_ptr") else array.device_ctypes_pointer.value for array in given
    )


def make_known(launched, given, **options):
    """Call until the call is known: named from the second on, since the first tells of the types."""
    for _ in range(3):
        store_kvcache(*given, stream=STREAM, **options)
    assert launched.ready > 0
    launched.clear()
    launched.ready = 0


of_torch = pytest.mark.usefixtures("both_readers")
STRIDES = (256, 256, 256, 256, 8)


def test_a_known_call_launches_what_the_first_did(launched, make):
    first = make()
    store_kvcache(*first, stream=STREAM, size_limit=50, skip_index=-1)
    assert [stream for _, _, _, stream, _ in launched] == [STREAM]
    make_known(launched, first, size_limit=50, skip_index=-1)
    other = make()  # torch's: elsewhere
    store_kvcache(*other, stream=STREAM + 1, size_limit=50, skip_index=-1)
    assert launched.ready == 1
    ((device, count, blocks, stream, parameters),) = launched
    assert (device, count, blocks, stream) == (0, 1, dispatch._layout(next(iter(dispatch._plans))).grid(B), STREAM + 1)
    assert parameters == (*addresses(other), *STRIDES, B, 50, -1)


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("num_split", True, TypeError), ("num_split", 1.0, TypeError), ("num_split", np.float64(1), TypeError),
        ("num_split", np.int64(1), None), ("size_limit", True, TypeError), ("size_limit", 1.0, TypeError),
        ("size_limit", np.int32(1), None), ("skip_index", True, TypeError), ("skip_index", 1.0, TypeError),
        ("skip_index", np.uint8(1), None),
    ],
)  # fmt: skip
def test_a_number_that_equals_an_int_is_judged_for_itself(launched, make, name, value, verdict):
    given = make()
    make_known(launched, given, **{name: 1})
    if verdict is None:
        store_kvcache(*given, stream=STREAM, **{name: value})
        assert len(launched) == 1
    else:
        with pytest.raises(verdict, match=name):
            store_kvcache(*given, stream=STREAM, **{name: value})
        assert not launched
    assert launched.ready == 0


def test_skip_index_0_is_not_none(launched, make):
    """Nor is a size_limit of None unknown, where it is as good as 0."""
    given = make()
    make_known(launched, given, size_limit=None)
    for _ in range(2):
        store_kvcache(*given, stream=STREAM, size_limit=None, skip_index=0)
        store_kvcache(*given, stream=STREAM, size_limit=None)
    assert launched.ready == 3
    skipping = [key.skipping for key in dispatch._plans]
    assert sorted(skipping) == [False, True]


def in_place(kind, tensor):
    """Change this tensor of shape (4, 128), dense, to one that a store must see as another."""
    import torch

    if kind == "resize_":
        tensor.resize_(3, WIDTH)
    elif kind == "set_":
        tensor.set_(torch.zeros(B * 256, dtype=tensor.dtype), 0, (B, WIDTH), (256, 1))
    elif kind == "data":
        tensor.data = torch.zeros(B, WIDTH, dtype=torch.float16)
    elif kind == "transposed":
        tensor.set_(torch.zeros(WIDTH * B, dtype=tensor.dtype), 0, (B, WIDTH), (1, B))
    elif kind == "unaligned":
        tensor.set_(torch.zeros(B * WIDTH + 8, dtype=tensor.dtype), 1, (B, WIDTH), (WIDTH, 1))
    elif kind == "half aligned":
        tensor.set_(torch.zeros(B * WIDTH + 8, dtype=tensor.dtype), 4, (B, WIDTH), (WIDTH, 1))
    elif kind == "no memory":
        tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("resize_", "row count B, got 3 rows in k"), ("data", "k_cache must have one dtype, got float16"),
        ("transposed", "k must have dense rows"), ("unaligned", "k must be aligned to 4 bytes"),
        ("no memory", "k must have memory"), ("set_", None), ("half aligned", None),
    ],
)  # fmt: skip
@of_torch
def test_a_tensor_changed_in_place(launched, kind, verdict):
    given = torch_arrays()
    make_known(launched, given)
    in_place(kind, given[0])
    if verdict is None:
        store_kvcache(*given, stream=STREAM)
        stride = 512 if kind == "set_" else 256
        assert launched[0][4] == (*addresses(given), stride, *STRIDES[1:], B, SLOTS, 0)
        alignment = min(key.k_alignment for key in dispatch._plans)
        assert alignment == (8 if kind == "half aligned" else 16)
    else:
        with pytest.raises((TypeError, ValueError), match=verdict):
            store_kvcache(*given, stream=STREAM)
        assert not launched
    assert launched.ready == 0


@pytest.mark.parametrize("at", range(5))
@of_torch
def test_a_lazily_negated_tensor_is_refused(launched, at):
    torch = optional("torch")
    given = torch_arrays()
    make_known(launched, given)
    given[at] = torch._neg_view(given[at])
    with pytest.raises(ValueError, match=f"{('k', 'v', 'k_cache', 'v_cache', 'indices')[at]} is a lazily"):
        store_kvcache(*given, stream=STREAM)
    assert not launched


@pytest.mark.parametrize("at", range(4))
@of_torch
def test_a_lazily_conjugated_tensor_is_refused(launched, at):
    torch = optional("torch")
    rows = [torch.zeros(count, WIDTH, dtype=torch.complex64) for count in (B, B, SLOTS, SLOTS)]
    given = [*rows, torch.zeros(B, dtype=torch.int64)]
    for _ in range(4):
        store_kvcache(*given, stream=STREAM)
    launched.clear()
    given[at] = given[at].conj()
    with pytest.raises(ValueError, match=f"{('k', 'v', 'k_cache', 'v_cache')[at]} is a lazily"):
        store_kvcache(*given, stream=STREAM)
    assert not launched


def without_memory(kind, tensor):
    import torch

    if kind == "sparse":
        return torch.zeros(tensor.shape, dtype=tensor.dtype).to_sparse()
    if kind == "nested":
        return torch.nested.nested_tensor([torch.zeros(WIDTH), torch.zeros(2 * WIDTH)], dtype=tensor.dtype)
    if kind == "all zeros":
        return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="meta")


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("sparse", "is a torch tensor without plain strided memory"), ("meta", "on device meta"),
        ("all zeros", "must have memory"), ("nested", "is a torch tensor without plain strided memory"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@of_torch
def test_tensors_without_memory_are_refused(launched, kind, verdict, at):
    given = torch_arrays()
    make_known(launched, given)
    given[at] = without_memory(kind, given[at])
    with pytest.raises((TypeError, ValueError), match=verdict):
        store_kvcache(*given, stream=STREAM)
    assert not launched


@of_torch
def test_tensors_of_a_transform_are_refused(launched):
    """Their type is torch.Tensor itself."""
    torch = optional("torch")
    given = torch_arrays()
    make_known(launched, given)
    store = torch.vmap(lambda k: store_kvcache(k, *given[1:], stream=STREAM))
    with pytest.raises(ValueError, match="k is a torch tensor without plain strided memory"):
        store(torch.zeros(2, B, WIDTH, dtype=torch.bfloat16))
    assert not launched


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("change", ["shape", "strides", "dtype"])
@of_torch
def test_every_tensor_is_looked_at(launched, at, change):
    """One that differs in one thing makes another call, which is judged as if it were the first."""
    torch = optional("torch")
    given, others = torch_arrays(), torch_arrays()
    make_known(launched, given)
    if change == "shape":
        others[at] = others[at][:-1].clone()
    elif change == "strides":
        others[at] = torch.stack([others[at], others[at]], 1)[:, 0]
    else:
        others[at] = others[at].to(torch.int32 if at == 4 else torch.float16)
    assert (others[at].shape, others[at].stride(), others[at].dtype) != (
        given[at].shape, given[at].stride(), given[at].dtype,
    )  # fmt: skip
    if (change == "shape" and at in (0, 1, 4)) or (change == "dtype" and at != 4):
        with pytest.raises((TypeError, ValueError), match="must"):
            store_kvcache(*others, stream=STREAM)
        assert not launched
    else:
        store_kvcache(*others, stream=STREAM)
        strides = [array.stride(0) * array.element_size() for array in others]
        slots = min(len(others[2]), len(others[3]))
        assert launched[0][4] == (*addresses(others), *strides, B, slots, 0)
    assert launched.ready == 0


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize(
    "foreign", [None, 1, "abc", [1.0], np.zeros((B, WIDTH), np.float16), object(), dict],
    ids=lambda foreign: type(foreign).__name__,
)  # fmt: skip
def test_what_is_no_array_is_refused_by_name(launched, make, at, foreign):
    given = make()
    make_known(launched, given)
    given[at] = foreign
    with pytest.raises(TypeError, match=f"^{('k', 'v', 'k_cache', 'v_cache', 'indices')[at]} must be an array"):
        store_kvcache(*given, stream=STREAM)
    assert not launched


@of_torch
def test_what_a_known_call_knows_keeps_no_tensor(launched):
    given = torch_arrays()
    make_known(launched, given)
    watched = [weakref.ref(array) for array in given]
    del given
    assert [array() for array in watched] == [None] * 5


@of_torch
def test_calls_are_known_in_every_mode_of_autograd(launched):
    torch = optional("torch")
    for _ in range(2):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                for needs_grad in (False, True):
                    first, other = torch_arrays(), torch_arrays()
                    for array in (first[0], other[0]):
                        array.requires_grad_(needs_grad)
                    make_known(launched, first)
                    store_kvcache(*other, stream=STREAM)
                    assert launched.ready == 1


@of_torch
def test_many_calls_alike_in_the_shape_of_k(launched):
    torch = optional("torch")
    most, calls = torch_guards.MAX_ALIKE, []
    for slots in range(5, 5 + 3 * most):
        given = torch_arrays()
        given[2] = torch.zeros(slots, WIDTH, dtype=torch.bfloat16)
        calls.append((slots, given))
    for _, given in calls:
        make_known(launched, given)
    for slots, given in calls * 2:
        launched.clear()
        store_kvcache(*given, stream=STREAM)
        assert [parameters[11] for *_, parameters in launched] == [slots]
    assert launched.ready == 2 * len(calls)
    if known_calls._torch_guards is not None:
        assert [len(alike) for alike in known_calls._torch_guards.by_shape.values()] == [most]


def alike(given, first, second):
    given[second] = given[first]
    return given


@pytest.mark.parametrize(("first", "second"), [(0, 1), (2, 3)])
@of_torch
def test_one_array_in_two_places(launched, first, second):
    """No guard lets them pass, so none is kept, and they are known by their facts."""
    twice, usual = alike(torch_arrays(), first, second), torch_arrays()
    make_known(launched, twice)
    assert known_calls._torch_guards is None or not known_calls._torch_guards.by_shape
    for given in (twice, usual) * 20:
        store_kvcache(*given, stream=STREAM)
    assert launched.ready == len(launched) == 40
    assert [parameters[:5] for *_, parameters in launched] == [addresses(twice), addresses(usual)] * 20


BLIND = {
    "what is no tensor": lambda given: given is None,
    "types": lambda given: given is not None and type(given).__name__ == "Parameter",
    "shapes": lambda given: given is not None and given.shape != (2, 2),
    "strides": lambda given: given is not None and given.stride() == (1, 2),
    "dtypes": lambda given: given is not None and not given.is_floating_point(),
    "devices": lambda given: given is not None and given.is_meta,
    "negation": lambda given: given is not None and given.is_neg(),
}


@pytest.mark.parametrize("become", ["absent", "of other arguments", "never passed", *BLIND])
def test_where_torch_has_no_guards_that_serve_attributes_are_read(monkeypatch, become):
    optional("torch")
    from torch._C._dynamo import guards

    as_it_is = guards.TensorGuards

    class Changed:
        """torch's class as it may become."""

        def __init__(self, *tensors, **dimensions):
            self.guard = as_it_is(*tensors, **dimensions)

        def check(self, given):
            return become != "never passed" and (self.guard.check(given) or BLIND[become](given))

    if become == "absent":
        monkeypatch.delattr(guards, "TensorGuards")
    else:
        monkeypatch.setattr(
            guards, "TensorGuards", (lambda tensors: None) if become == "of other arguments" else Changed
        )
    assert find_guards() is None


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "enable_grad"])
def test_guards_are_found_in_every_mode_of_autograd(mode):
    needs_guards()
    with getattr(optional("torch"), mode)():
        assert find_guards() is not None


def test_where_new_tensors_are_others_attributes_are_read():
    """As under a mode that wraps what operations return: a guard may not be asked about those."""
    torch = optional("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Wrapping(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {})).as_subclass(Tall)

    class Tall(torch.Tensor):
        pass

    with Wrapping():
        assert find_guards() is None


class ListShaped:
    """What torch tensors answer to, but for its shape, which cannot be looked up."""

    shape, is_nested = [B, WIDTH], False

    def data_ptr(self):
        return 0x10000


def test_what_only_looks_like_a_tensor(launched, make):
    given = make()
    make_known(launched, given)
    with pytest.raises(TypeError, match="k must be an array"):
        store_kvcache(ListShaped(), *given[1:], stream=STREAM)
    assert not launched


@of_torch
def test_arrays_of_one_subclass_are_not_known(launched):
    torch = optional("torch")

    class Strided(torch.Tensor):
        given = None

        def stride(self):
            return self.given or super().stride()

    given = [array.as_subclass(Strided) for array in torch_arrays()]
    for _ in range(3):
        store_kvcache(*given, stream=STREAM)
    launched.clear()
    given[0].given = (1, B)
    with pytest.raises(ValueError, match="k must have dense rows"):
        store_kvcache(*given, stream=STREAM)
    assert not launched


@of_torch
def test_a_subclass_answers_for_itself(launched):
    torch = optional("torch")

    class Tall(torch.Tensor):
        @property
        def shape(self):
            return (2, *super().shape[1:])

    given = torch_arrays()
    make_known(launched, given)
    given[0] = given[0].as_subclass(Tall)
    with pytest.raises(ValueError, match="row count B, got 2 rows in k"):
        store_kvcache(*given, stream=STREAM)
    given[0] = torch.nn.Parameter(torch.zeros(B, WIDTH, dtype=torch.bfloat16), requires_grad=False)
    store_kvcache(*given, stream=STREAM)
    assert launched[0][4][0] == given[0].data_ptr()
    assert launched.ready == 0


@pytest.mark.parametrize("at", range(5))
def test_no_memory_on_the_only_gpu(launched, make, at):
    launched.gpus = 1
    given = make()
    make_known(launched, given)
    if make is torch_arrays:
        given[at].untyped_storage().resize_(0)
    else:
        given[at] = numba_array(given[at].shape, given[at].dtype, 0)
    with pytest.raises(ValueError, match=f"{('k', 'v', 'k_cache', 'v_cache', 'indices')[at]} must have memory"):
        store_kvcache(*given, stream=STREAM)
    assert not launched


@pytest.mark.parametrize("at", range(5))
def test_memory_that_numba_did_not_allocate_is_asked_about(launched, at):
    launched.gpus = 1
    given = numba_arrays()
    make_known(launched, given)
    given[at] = numba_array(given[at].shape, given[at].dtype, 1 << 45, owned=False)
    with pytest.raises(TypeError, match="is no CUDA address"):
        store_kvcache(*given, stream=STREAM)
    assert not launched


@pytest.fixture
def cupy(monkeypatch):
    module = types.ModuleType("cupy")
    module.ndarray = CupyArray
    module.cuda = types.SimpleNamespace(get_current_stream=lambda device: types.SimpleNamespace(ptr=0x9000 + device))
    monkeypatch.setitem(sys.modules, "cupy", module)


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("at", range(5))
def test_cupy_arrays(launched, at):
    given = numba_arrays(kind=CupyArray)
    make_known(launched, given)
    store_kvcache(*given, stream=STREAM)
    assert launched == [(0, 1, launched[0][2], STREAM, (*(array.data.ptr for array in given), *STRIDES, B, SLOTS, 0))]
    assert launched.ready == 1
    launched.clear()
    usual = given[at]
    given[at] = CupyArray(usual.shape, usual.dtype, usual.data.ptr, device=1)
    with pytest.raises(ValueError, match="all arrays must be on one GPU"):
        store_kvcache(*given, stream=STREAM)
    for address in (0, -16, 2**64):
        given[at] = CupyArray(usual.shape, usual.dtype, address)
        with pytest.raises(ValueError, match=r"must have memory, got address"):
            store_kvcache(*given, stream=STREAM)
    assert not launched


class HostileStream:
    """A stream whose protocol is the caller's code."""

    def __init__(self, act):
        self.act = act

    def __cuda_stream__(self):
        self.act()
        return 0, STREAM


@of_torch
def test_arrays_that_the_stream_changes(launched):
    given = torch_arrays()
    make_known(launched, given)
    stream = HostileStream(lambda: [given[at].resize_(2, *given[at].shape[1:]) for at in (0, 1, 4)])
    store_kvcache(*given, stream=stream)
    assert [parameters[10] for *_, parameters in launched] == [2]


def test_a_context_that_the_stream_changes(launched, make):
    given = make()
    make_known(launched, given)
    store_kvcache(*given, stream=HostileStream(lambda: setattr(launched, "device", 1)))
    assert [device for device, *_ in launched] == [0]


@of_torch
def test_arrays_that_change_during_the_launch_are_not_known_as_what_they_became(launched):
    given, fewer, kernel = torch_arrays(), torch_arrays(batch=2), launched.kernel
    store_kvcache(*given, stream=STREAM)  # tells of the type

    def meanwhile(*arguments):
        for array, other in zip(given, fewer, strict=True):
            array.set_(other)
        return kernel(*arguments)

    launched.kernel = meanwhile
    store_kvcache(*given, stream=STREAM)
    launched.kernel = kernel
    for _ in range(3):
        store_kvcache(*torch_arrays(batch=2), stream=STREAM)
    assert [parameters[10] for *_, parameters in launched] == [B, B, 2, 2, 2]


@pytest.mark.usefixtures("cupy")
def test_an_array_that_changes_during_the_launch_names_no_stream_for_others(launched):
    """The launch lets other threads run."""
    given = numba_arrays(kind=CupyArray)
    store_kvcache(*given)
    kernel = launched.kernel

    def meanwhile(*arguments):
        given[2].data.device_id = 1
        return kernel(*arguments)

    launched.kernel = meanwhile
    store_kvcache(*given)
    launched.kernel = kernel
    given[2].data.device_id = 0
    store_kvcache(*given)
    assert launched.ready == 1
    assert [stream for _, _, _, stream, _ in launched] == [0x9000] * 3


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize(
    ("address", "verdict"),
    [
        (0, "{} must have memory"), (0x70001, "{} must be aligned to [48] bytes"),
        (1 << 44 | 0x70000, r"all arrays must be on one GPU, got \w+ on device [01] and k_cache on device [01]"),
    ],
)  # fmt: skip
def test_addresses_that_must_be_refused(launched, at, address, verdict):
    given = numba_arrays()
    make_known(launched, given)
    given[at] = numba_array(given[at].shape, given[at].dtype, address)
    with pytest.raises(ValueError, match=verdict.format(("k", "v", "k_cache", "v_cache", "indices")[at])):
        store_kvcache(*given, stream=STREAM)
    assert not launched


def test_the_device_is_that_of_the_arrays(launched):
    """And calls are known where a context of that device was current, and is again."""
    for launched.device in (0, 0, 0, 1, 1):
        for device in (0, 1):
            store_kvcache(*numba_arrays(base=device << 44), stream=STREAM)
    assert [device for device, *_ in launched] == [0, 1] * 5
    assert launched.ready == 1 + 1  # device 0's third call, and device 1's fifth


def test_the_kernel_follows_the_alignment(launched):
    given = numba_arrays()
    for address in (0x10000, 0x10008, 0x10004) * 3:
        given[0] = numba_array((B, WIDTH), np.float16, address)
        store_kvcache(*given, stream=STREAM)
    assert sorted(key.k_alignment for key in dispatch._plans) == [4, 8, 16]
    assert [parameters[0] for *_, parameters in launched] == [0x10000, 0x10008, 0x10004] * 3
    plans = {key.k_alignment: plan.layout.grid(B) for key, plan in dispatch._plans.items()}
    assert [blocks for _, _, blocks, *_ in launched[-3:]] == [plans[16], plans[8], plans[4]]


@pytest.mark.parametrize("and_back", [False, True])
@of_torch
def test_an_array_that_changes_while_it_is_read_is_not_remembered_as_what_it_was(launched, and_back):
    """By another thread, say, between the naming of a call and the reading that its checks go by."""
    given = torch_arrays()
    store_kvcache(*given, stream=STREAM)  # tells of the type
    fewer, before, read = torch_arrays(batch=2), [array.detach() for array in given], arrays._read_torch

    def become(others):
        for array, other in zip(given, others, strict=True):
            array.set_(other)

    def meanwhile(name, tensor, stream):
        if name == "k":
            become(fewer)
        view = read(name, tensor, stream)
        if name == "indices" and and_back:
            become(before)
        return view

    dispatch.readers[type(given[0])] = meanwhile
    store_kvcache(*given, stream=STREAM)
    dispatch.readers[type(given[0])] = read
    given = torch_arrays()
    for _ in range(3):
        store_kvcache(*given, stream=STREAM)
    assert [parameters[10] for *_, parameters in launched] == [B, 2, B, B, B]


@pytest.mark.parametrize("most", [10, 11])
def test_how_much_is_remembered_is_bounded(launched, monkeypatch, make, most):
    monkeypatch.setattr(known_calls, "MAX_KNOWN", most)
    for batch in range(1, 60):
        for _ in range(2):
            store_kvcache(*make(batch), stream=STREAM)
        assert len(known_calls.known) <= most
        assert known_calls._torch_guards is None or len(known_calls._torch_guards.by_shape) <= most
    assert [parameters[10] for *_, parameters in launched] == [batch for batch in range(1, 60) for _ in range(2)]
    assert launched.ready >= 50


def test_a_failed_launch_is_told_of_and_not_remembered(launched, make):
    given = make()
    store_kvcache(*given, stream=STREAM)
    launched.status = 700
    for _ in range(2):
        with pytest.raises(RuntimeError, match="launching the store failed: status 700"):
            store_kvcache(*given, stream=STREAM)
    assert not known_calls.known
    launched.status = 0
    make_known(launched, given)
    launched.status = 700
    with pytest.raises(RuntimeError, match="launching the store failed: status 700"):
        store_kvcache(*given, stream=STREAM)
    assert launched.ready == 1


def test_a_launch_within_a_launch_has_memory_of_its_own(launched, make):
    """A finaliser that stores, while a known call is between packing and launching."""
    outer, inner = make(), numba_arrays() if make is numba_arrays else make()
    make_known(launched, outer)
    kernel, depth = launched.kernel, []

    def with_finaliser(*arguments):
        if not depth:
            depth.append(1)
            store_kvcache(*inner, stream=STREAM + 1)
        return kernel(*arguments)

    launched.kernel = with_finaliser
    store_kvcache(*outer, stream=STREAM)
    assert [(stream, parameters[:5]) for _, _, _, stream, parameters in launched] == [
        (STREAM + 1, addresses(inner)), (STREAM, addresses(outer)),
    ]  # fmt: skip
