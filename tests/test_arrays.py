"""arrays.py: what is read from each kind of array, by stub producers whose memory layout follows dlpack.h by hand.

On the simulator the same stubs go through whole calls (REPORTS 13); on the real compiler their views are read with the
driver's two questions answered by the test.
"""

import ctypes
import struct

import numpy as np
import pytest
from numba import cuda
from support import (
    GUARD,
    InterfaceArray,
    Memory,
    Rows,
    expect_store,
    index_array,
    interface_of,
    make_rows,
    needs_compiler,
    needs_kernels,
    needs_no_gpu,
    needs_simulator,
    optional,
    synchronize,
)

from numba_kvcache import arrays, store_kvcache
from numba_kvcache.arrays import SIMULATED_DEVICE, ArrayView, array_facts, read_array, stream_finder, stream_handle
from numba_kvcache.settings import SIMULATED

# The device that a view says it is on; DLPack names its own.
DEVICE = SIMULATED_DEVICE if SIMULATED else 0
INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class DLPackArray:
    """A DLPack producer; `old` ones know neither max_version nor versioned capsules."""

    def __init__(
        self, address, shape, strides, dtype=(FLOAT, 16, 1), *, offset=0, flags=0, major=1, old=False,
        device=(1, 0) if SIMULATED else (2, 0),
    ):  # fmt: skip
        self.device, self.old, self.streams = device, old, []
        self.extents = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self.steps = None if strides is None else (ctypes.c_int64 * max(1, len(strides)))(*strides)
        steps = 0 if self.steps is None else ctypes.addressof(self.steps)
        # DLTensor: data, device (type, id), ndim, dtype (code, bits, lanes), shape, strides, byte_offset.
        tensor = struct.pack(
            "=QiiiBBHQQQ", address - offset, *device, len(shape), *dtype, ctypes.addressof(self.extents), steps, offset
        )
        # DLManagedTensor ends in manager and deleter; the versioned one starts with version, manager, deleter, flags.
        managed = tensor + struct.pack("=QQ", 0, 0) if old else struct.pack("=IIQQQ", major, 0, 0, 0, flags) + tensor
        self.managed = ctypes.create_string_buffer(managed, len(managed))
        if not old:
            self.__dlpack__ = self._export_versioned

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return new_capsule(ctypes.addressof(self.managed), b"dltensor", None)

    def _export_versioned(self, *, stream=None, max_version=None):
        assert max_version[0] == 1
        self.streams.append(stream)
        return new_capsule(ctypes.addressof(self.managed), b"dltensor_versioned", None)


def dlpack_of(rows, *, dtype=(FLOAT, 16, 1), **options):
    """The DLPack stub over Rows; strides are in elements."""
    itemsize = dtype[1] * dtype[2] // 8
    shape = (rows.count, rows.row_bytes // itemsize)
    options.setdefault("strides", (rows.pitch // itemsize, 1))
    return DLPackArray(rows.memory.address(rows.start), shape, dtype=dtype, **options)


@pytest.fixture
def _known_pointers(monkeypatch):
    """Answers for the driver's questions about an address, so that views can be read without a GPU."""
    monkeypatch.setattr(arrays.driver, "pointer_device", lambda address: 0 if address < 2**32 else None)
    monkeypatch.setattr(arrays.driver, "current_device", lambda: 0)


reading = pytest.mark.usefixtures("_known_pointers")


@reading
@pytest.mark.parametrize(
    ("entries", "strides"),
    [
        ({}, (256, 2)),
        ({"strides": None}, (256, 2)),
        ({"strides": (640, 2)}, (640, 2)),
        ({"strides": (-256, 2)}, (-256, 2)),
    ],
)
def test_array_interface(entries, strides):
    view = read_array("k", InterfaceArray(0x1000, (4, 128), "<f2", **entries), 0)
    assert view == ArrayView(0x1000, array_facts((4, 128), strides, "float16", 2, DEVICE, False))


@reading
def test_array_interface_read_only():
    array = InterfaceArray(0, (4, 128), "<f2", data=(0x1000, True))
    assert read_array("k", array, 0).readonly is True


@reading
def test_array_interface_masked():
    with pytest.raises(ValueError, match="k_cache is a masked array"):
        read_array("k_cache", InterfaceArray(0x1000, (4, 128), "<f2", mask=object()), 0)


@reading
@pytest.mark.parametrize("address", [0, None])
def test_array_interface_null_pointer_of_an_empty_array(address):
    assert read_array("k", InterfaceArray(address, (0, 128), "<f2"), 0).address == 0


@reading
def test_records_of_one_size_and_other_fields_differ():
    names = [
        read_array("k", InterfaceArray(0x1000, (4, 8), "|V4", descr=descr), 0).dtype
        for descr in ([("a", "<f2"), ("b", "<f2")], [("a", "<i4")], None)
    ]
    assert len(set(names)) == 3


@needs_compiler
@reading
def test_array_interface_over_host_memory():
    with pytest.raises(
        TypeError, match="v must be an array that a kernel can reach, but 0x100000000 is no CUDA address"
    ):
        read_array("v", InterfaceArray(2**32, (4, 128), "<f2"), 0)


@pytest.mark.parametrize("old", [False, True], ids=["versioned", "unversioned"])
@pytest.mark.parametrize(
    ("strides", "in_bytes"), [(None, (256, 2)), ((128, 1), (256, 2)), ((320, 1), (640, 2)), ((-128, 1), (-256, 2))]
)
@pytest.mark.parametrize("offset", [0, 0x800])
def test_dlpack(old, strides, in_bytes, offset):
    array = DLPackArray(0x1000, (4, 128), strides, offset=offset, old=old)
    assert read_array("k", array, 0) == ArrayView(0x1000, array_facts((4, 128), in_bytes, "float16", 2, DEVICE, False))


@pytest.mark.parametrize(("shape", "strides"), [((5,), (8,)), ((), ()), ((2, 3, 4), (96, 32, 8))])
def test_dlpack_null_strides_of_other_dimensions(shape, strides):
    array = DLPackArray(0x1000, shape, None, (INT, 64, 1))
    facts = read_array("indices", array, 0).facts
    assert (facts.shape, facts.strides) == (shape, strides)


def test_dlpack_read_only_flag():
    assert read_array("k", DLPackArray(0x1000, (4, 8), None, flags=1), 0).readonly is True
    assert read_array("k", DLPackArray(0x1000, (4, 8), None, flags=4), 0).readonly is False


def test_a_dlpack_export_that_is_a_copy_is_refused():
    """The store would go to the copy, which is freed."""
    with pytest.raises(ValueError, match="k_cache was exported as a copy"):
        read_array("k_cache", DLPackArray(0x1000, (4, 8), None, flags=2), 0)


# dlpack.h's type codes; the names are torch's and NumPy's, so that equal types of two libraries are equal.
@pytest.mark.parametrize(
    ("code", "bits", "lanes", "name", "itemsize"),
    [
        (INT, 8, 1, "int8", 1), (INT, 64, 1, "int64", 8), (UINT, 16, 1, "uint16", 2), (FLOAT, 16, 1, "float16", 2),
        (FLOAT, 64, 1, "float64", 8), (BFLOAT, 16, 1, "bfloat16", 2), (COMPLEX, 64, 1, "complex64", 8),
        (BOOL, 8, 1, "bool", 1), (10, 8, 1, "float8_e4m3fn", 1), (12, 8, 1, "float8_e5m2", 1),
        (11, 8, 1, "float8_e4m3fnuz", 1), (13, 8, 1, "float8_e5m2fnuz", 1), (14, 8, 1, "float8_e8m0fnu", 1),
        (17, 4, 2, "float4_e2m1fn_x2", 1), (FLOAT, 32, 4, "float32_x4", 16),
    ],
)  # fmt: skip
def test_dlpack_types(code, bits, lanes, name, itemsize):
    view = read_array("k", DLPackArray(0x1000, (4, 8), None, (code, bits, lanes)), 0)
    assert (view.dtype, view.itemsize, view.strides) == (name, itemsize, (8 * itemsize, itemsize))


@pytest.mark.parametrize(("code", "bits"), [(17, 4), (15, 6), (UINT, 1)])
def test_dlpack_types_below_a_byte(code, bits):
    with pytest.raises(TypeError, match=f"k has elements of {bits} bits"):
        read_array("k", DLPackArray(0x1000, (4, 8), None, (code, bits, 1)), 0)


def test_dlpack_of_a_later_major_version():
    with pytest.raises(TypeError, match=r"k speaks DLPack 2\.0; this package knows 1\.x"):
        read_array("k", DLPackArray(0x1000, (4, 8), None, major=2), 0)


def test_dlpack_refusal_becomes_a_value_error():
    array = DLPackArray(0x1000, (4, 8), None)

    def refuse(**options):
        raise BufferError("this one stays here")

    array.__dlpack__ = refuse
    with pytest.raises(ValueError, match="v cannot be exported through DLPack: this one stays here"):
        read_array("v", array, 0)


def test_dlpack_refusal_to_name_a_device_becomes_a_value_error():
    """As of an array that lies on several."""
    array = DLPackArray(0x1000, (4, 8), None)

    def refuse():
        raise BufferError("which of the two?")

    array.__dlpack_device__ = refuse
    with pytest.raises(ValueError, match="v cannot be exported through DLPack: which of the two"):
        read_array("v", array, 0)


@needs_simulator
@pytest.mark.parametrize("kind", [3, 13])
def test_dlpack_devices_that_the_simulator_reaches_too(kind):
    array = DLPackArray(0x1000, (4, 8), None, device=(kind, 3))
    assert read_array("k", array, 0).device == SIMULATED_DEVICE


@needs_simulator
@pytest.mark.parametrize("kind", [2, 10])
def test_dlpack_devices_that_the_simulator_does_not_reach(kind):
    """Once a segmentation fault: a GPU's address was taken for one of the host."""
    with pytest.raises(TypeError, match=rf"k must be an array .* on DLPack device \({kind}, 0\); the simulator takes"):
        read_array("k", DLPackArray(0x1000, (4, 8), None, device=(kind, 0)), 0)


@needs_compiler
@pytest.mark.parametrize(("stream", "told"), [(0, 1), (1, 1), (77, 77)])
def test_dlpack_is_told_the_stream(stream, told):
    """0 is ambiguous in the array API; the legacy default stream is 1."""
    array = DLPackArray(0x1000, (4, 8), None)
    read_array("k", array, stream)
    assert array.streams == [told]


@needs_compiler
@pytest.mark.parametrize(("kind", "device"), [(2, 3), (3, 1), (13, 2)])
def test_dlpack_devices_that_a_kernel_reaches(kind, device):
    assert read_array("k", DLPackArray(0x1000, (4, 8), None, device=(kind, device)), 0).device == device


@needs_compiler
@pytest.mark.parametrize(("kind", "where"), [(1, "in host memory;"), (10, r"on DLPack device \(10, 0\);")])
def test_dlpack_devices_that_it_does_not(kind, where):
    with pytest.raises(TypeError, match=rf"k must be an array that a kernel can reach, got .*DLPackArray {where}"):
        read_array("k", DLPackArray(0x1000, (4, 8), None, device=(kind, 0)), 0)


@needs_compiler
@pytest.mark.parametrize("array", [np.zeros((4, 128), np.float16), [[1.0]], 7, None, "text", memoryview(b"1234")])
def test_host_objects_are_refused(array):
    kind = type(array).__name__
    with pytest.raises(
        TypeError, match=rf"k must be an array that a kernel can reach, got .*{kind}.*copy it to the GPU"
    ):
        read_array("k", array, 0)


@needs_no_gpu
def test_without_a_gpu_host_arrays_are_shown_the_way_to_the_simulator():
    with pytest.raises(TypeError, match=r"in host memory; copy .* no usable CUDA GPU: .*NUMBA_ENABLE_CUDASIM=1"):
        read_array("k", np.zeros((4, 128), np.float16), 0)


@needs_simulator
@pytest.mark.parametrize("array", [[[1.0]], 7, None, memoryview(b"1234")])
def test_what_the_simulator_refuses(array):
    with pytest.raises(TypeError, match=r"v_cache must be an array .*the simulator takes"):
        read_array("v_cache", array, 0)


@needs_simulator
def test_simulated_arrays():
    host = np.arange(640, dtype=np.float16).reshape(5, 128)[::-2, 3:7]
    assert read_array("k", host, 0) == ArrayView(
        host.__array_interface__["data"][0], array_facts((3, 4), (-512, 2), "float16", 2, SIMULATED_DEVICE, False)
    )
    host.flags.writeable = False
    assert read_array("k", host, 0).readonly is True
    assert read_array("k", cuda.to_device(np.ones((4, 2), np.int8)), 0).facts == array_facts(
        (4, 2), (2, 1), "int8", 1, SIMULATED_DEVICE, False
    )
    with pytest.raises(ValueError, match="k is a masked array"):
        read_array("k", np.ma.masked_array(np.zeros((4, 4))), 0)


@needs_compiler
def test_host_tensors_are_refused():
    torch = optional("torch")
    with pytest.raises(TypeError, match=r"k must be an array that a kernel can reach, got torch\.Tensor on device cpu"):
        read_array("k", torch.zeros(4, 128), 0)


# Streams.


class StreamProtocol:
    def __cuda_stream__(self):
        return (0, 1234)


class StreamAttribute:
    def __init__(self, name):
        setattr(self, name, 4321)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0), (1, 1), (2**47, 2**47), (np.int64(5), 5), (np.uint64(6), 6), (StreamProtocol(), 1234),
        (StreamAttribute("cuda_stream"), 4321), (StreamAttribute("ptr"), 4321),
    ],
)  # fmt: skip
def test_stream_handles(stream, handle):
    result = stream_handle(stream)
    assert result == handle
    assert type(result) is int


def test_stream_protocol_as_an_attribute():
    stream = StreamAttribute("name")
    stream.__cuda_stream__ = (0, 99)
    assert stream_handle(stream) == 99


@pytest.mark.parametrize("stream", ["0", 1.0, True, False, object(), [1]])
def test_not_a_stream(stream):
    with pytest.raises(
        TypeError, match=f"stream must be a CUDA stream or an integer handle, got {type(stream).__name__}"
    ):
        stream_handle(stream)


def test_negative_stream():
    with pytest.raises(ValueError, match=r"stream must be a handle.* got -1"):
        stream_handle(-1)


@pytest.mark.parametrize(
    ("entries", "handle"), [({}, 0), ({"stream": None}, 0), ({"stream": 1}, 1), ({"stream": 55}, 55)]
)
def test_the_exported_stream(entries, handle):
    assert stream_finder(InterfaceArray(0x1000, (4, 4), "<f4", **entries))() == handle


def test_no_stream_at_all():
    assert stream_finder(object())() == 0


# Whole calls through the stubs: each must give the bytes that the plain loop gives (REPORTS 13).


@needs_kernels
@pytest.mark.parametrize("wrap", [
    lambda rows: interface_of(rows, "<f2"),
    lambda rows: interface_of(rows, "<f2", strides=None),
    lambda rows: dlpack_of(rows),
    lambda rows: dlpack_of(rows, strides=None),
    lambda rows: dlpack_of(rows, offset=GUARD),
    lambda rows: dlpack_of(rows, offset=GUARD, strides=None, old=True),
    lambda rows: dlpack_of(rows, dtype=(BFLOAT, 16, 1)),
    lambda rows: dlpack_of(rows, dtype=(10, 8, 1)),
], ids=["interface", "strides None", "dlpack", "null strides", "offset", "old", "bf16", "fp8"])  # fmt: skip
def test_stubs_store_the_same_bytes(wrap):
    slots = [6, 0, 3]
    k, v, k_cache, v_cache = make_rows(3, 7, 256)
    index_memory, indices = index_array(slots)
    expect_store(k, k_cache, slots)
    expect_store(v, v_cache, slots)
    store_kvcache(wrap(k), wrap(v), wrap(k_cache), wrap(v_cache), indices)
    synchronize()
    for memory in (k.memory, v.memory, k_cache.memory, v_cache.memory, index_memory):
        memory.check()


@needs_kernels
@pytest.mark.parametrize("way", ["interface", "dlpack"])
def test_one_layer_of_a_pool(way):
    """REPORTS 13: layer 2 of a pool (4, 64, 128) of fp16 starts 32,768 bytes into it."""
    layer = 64 * 256
    pools = [Memory(2 * GUARD + 4 * layer, seed) for seed in (11, 12)]
    caches = [Rows(64, 256, seed=0, shift=2 * layer, memory=pool) for pool in pools]
    sources = [Rows(2, 256, seed=seed) for seed in (1, 2)]
    for source, cache in zip(sources, caches, strict=True):
        expect_store(source, cache, [0, 63])
    wrap = (lambda r: interface_of(r, "<f2")) if way == "interface" else (lambda r: dlpack_of(r, offset=2 * layer))
    store_kvcache(*map(wrap, sources), *map(wrap, caches), index_array([0, 63])[1])
    synchronize()
    for memory in pools:
        memory.check()


@needs_kernels
def test_read_only_stub_is_refused_as_a_cache_and_served_as_a_source():
    k, v, k_cache, v_cache = make_rows(2, 4, 128)
    _, indices = index_array([3, 1])

    def locked(rows):
        return dlpack_of(rows, flags=1)

    with pytest.raises(ValueError, match="k_cache must be writable"):
        store_kvcache(dlpack_of(k), dlpack_of(v), locked(k_cache), dlpack_of(v_cache), indices)
    synchronize()
    k_cache.memory.check()
    v_cache.memory.check()
    expect_store(k, k_cache, [3, 1])
    expect_store(v, v_cache, [3, 1])
    store_kvcache(locked(k), locked(v), dlpack_of(k_cache), dlpack_of(v_cache), indices)
    synchronize()
    k_cache.memory.check()
    v_cache.memory.check()


@needs_simulator
def test_torch_tensors_on_the_simulator():
    torch = optional("torch")
    k, v = (torch.arange(i, i + 256).reshape(2, 128).to(torch.bfloat16).requires_grad_() for i in (0, 500))
    caches = [torch.zeros(4, 128, dtype=torch.bfloat16) for _ in range(2)]
    store_kvcache(k, v, *caches, torch.tensor([3, 1]))
    for source, cache in zip((k, v), caches, strict=True):
        assert torch.equal(cache[[3, 1]], source.detach())
        assert not cache[[0, 2]].any()


@needs_simulator
@pytest.mark.parametrize("lazily", ["conj", "neg"])
def test_lazy_torch_views_are_refused(lazily):
    """Their bytes are not their values; the same memory without the view is stored."""
    torch = optional("torch")
    rows = torch.arange(256).reshape(2, 128).to(torch.complex64 if lazily == "conj" else torch.float32)
    caches, slots = [torch.zeros(4, 128, dtype=rows.dtype) for _ in range(2)], torch.tensor([3, 1])
    view = rows.conj() if lazily == "conj" else torch._neg_view(rows)
    for at in range(2):
        sources = [view if i == at else rows for i in range(2)]
        with pytest.raises(ValueError, match=rf"{'kv'[at]} is a lazily conjugated or negated view"):
            store_kvcache(*sources, *caches, slots)
    assert not any(cache.any() for cache in caches)
    store_kvcache(rows, rows, *caches, slots)
    assert all(torch.equal(cache[[3, 1]], rows) for cache in caches)


# ----------------------------------------------------------------------------------------------------------------------
# What hostile or odd producers once broke: look-alike numbers left in caches, missing memory, references as data.


class Interface:
    def __init__(self, interface):
        self.__cuda_array_interface__ = interface


@needs_simulator
@pytest.mark.parametrize(
    "interface",
    [
        {}, None, {"shape": (4, 8), "typestr": "<f2"}, {"shape": 4, "typestr": "<f2", "data": (0x1000, False)},
        {"shape": (4.0, 8), "typestr": "<f2", "data": (0x1000, False)},
        {"shape": (4, 8), "typestr": "<f2", "data": (0x1000, False), "strides": (16.0, 2)},
        {"shape": (4, 8), "typestr": "<f2", "data": 0x1000},
        {"shape": (4, 8), "typestr": "<f2", "data": (0x1000, False, 0)},
    ],
)  # fmt: skip
def test_malformed_interfaces(interface):
    read_array("k", Interface({"shape": (4, 8), "typestr": "<f2", "data": (0, False)}), 0)  # the type is known now
    with pytest.raises(TypeError, match="k has a malformed __cuda_array_interface__"):
        read_array("k", Interface(interface), 0)


@needs_simulator
def test_an_array_without_the_interface_that_others_of_its_type_have():
    class OnDeviceOrHost:
        @property
        def __cuda_array_interface__(self):
            return self.interface

    array = OnDeviceOrHost()
    array.interface = {"shape": (4, 8), "typestr": "<f2", "data": (0x1000, False)}
    read_array("k", array, 0)
    del array.interface
    with pytest.raises(TypeError, match=r"k must be an array that a kernel can reach, got .*OnDeviceOrHost; "):
        read_array("k", array, 0)


@pytest.mark.parametrize("interface", [5, None, {}])
def test_the_stream_of_a_malformed_interface(interface):
    """Reading the array explains."""
    assert stream_finder(Interface(interface))() == 0


@pytest.mark.parametrize(("stream", "error"), [(-1, ValueError), (2**64, ValueError), ("1", TypeError)])
def test_an_exported_stream_is_checked_as_a_given_one(stream, error):
    with pytest.raises(error, match="stream must be a"):
        stream_finder(Interface({"stream": stream}))()


@needs_simulator
def test_interface_numbers_become_plain():
    shape, data = (np.int32(0), np.int64(8)), (np.uint64(0x1000), 0)
    address, facts = read_array("k", Interface({"shape": shape, "typestr": "<f2", "data": data}), 0)
    assert {type(x) for x in (address, *facts.shape, *facts.strides)} == {int}
    assert type(facts.readonly) is bool


@needs_simulator
def test_a_stride_per_dimension():
    short = Interface({"shape": (0, 8), "typestr": "<f2", "data": (0x1000, False), "strides": (2,)})
    with pytest.raises(ValueError, match="k must have a stride per dimension"):
        read_array("k", short, 0)


@needs_simulator
def test_references_are_no_data():
    with pytest.raises(TypeError, match="k must hold plain data, got dtype object"):
        read_array("k", np.array([["a"]], object), 0)


@pytest.mark.parametrize("stream", [-1, 2**64])
def test_stream_numbers_have_64_bits(stream):
    with pytest.raises(ValueError, match="stream must be a handle"):
        stream_handle(stream)


def test_malformed_stream_protocol():
    class Short:
        def __cuda_stream__(self):
            return (0,)

    with pytest.raises(TypeError, match="stream has a malformed __cuda_stream__"):
        stream_handle(Short())
