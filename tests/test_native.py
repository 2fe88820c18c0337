"""The fast road against the Python road, without a GPU: both against one faked driver (native_fakes.py).

What is compiled finds the driver and its table by name, once per process; so the tests run in a child of their own. On
Python 3.10 and 3.11, where the road cannot be in force, its code is called by address.
"""

import copy
import ctypes
import functools
import gc
import inspect
import itertools
import math
import os
import pickle
import pydoc
import random
import re
import subprocess
import sys
import threading
import types
from collections import Counter
from unittest.mock import ANY

import numpy as np
import pytest
from support import SIMULATED, TESTS, child_environment, needs_compiler

from numba_kvcache import dispatch, fast_road, known_calls, native, settings, store_kvcache
from numba_kvcache import launch as launch_module
from numba_kvcache.layout import plan_store

IN_CHILD = os.environ.get("NUMBA_KVCACHE_TEST_FAKES") == "1" and not SIMULATED
# Fewer passes would mean that tests were lost or skipped.
AT_LEAST = 360

if IN_CHILD:
    import native_fakes as fakes
    from native_fakes import CONTEXTS, CupyArray, Parameter, Tensor, control, last_launch, numba_array

    fakes.install()
    python_road = fakes.python_road()

faked = pytest.mark.skipif(not IN_CHILD, reason="runs in the child process of test_in_a_child")
needs_vectorcall = pytest.mark.skipif(
    not IN_CHILD or sys.version_info < (3, 12), reason="needs PyFunction_SetVectorcall (Python 3.12), in the child"
)

LARGEST = 2**31 - 1
PYTHON_ROAD = native.STORE + native.FUNCTION_ROAD
FAST = 1_000_000  # the fakes' CUfunctions start here; the Python road launches CUkernels, below


@needs_compiler
@pytest.mark.skipif(IN_CHILD, reason="this is the child")
def test_in_a_child():
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_native.py"],
        cwd=TESTS, env=child_environment(NUMBA_KVCACHE_TEST_FAKES="1"), capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed, output
    assert int(passed[1]) >= AT_LEAST, output


@pytest.fixture(scope="module")
def compiled():
    return fakes.FastRoad()


@pytest.fixture
def road(compiled):
    """The compiled entry; what it does not serve is counted."""
    fakes.reset()
    fast_road.remember_type(Tensor, writable=True)
    yield compiled
    fakes.reset()


def make_arrays(batch=4, slots=64, row_bytes=256, v_row_bytes=None, index_dtype="int64", at=0x10000):
    """k, v, k_cache, v_cache, indices, all dense."""
    widths = (row_bytes // 2, (v_row_bytes or row_bytes) // 2) * 2
    rows = (batch, batch, slots, slots)
    return [
        *(
            Tensor((count, width), (width, 1), "float16", at * (i + 1))
            for i, (count, width) in enumerate(zip(rows, widths, strict=True))
        ),
        Tensor((batch,), (1,), index_dtype, at * 5),
    ]


def know(row_bytes=256, v_row_bytes=None, k_align=16, v_align=16, split=0, bits=64, device=0, **options):
    """Remember a plan by hand; the kernels of its bands are 11, 12 and 13."""
    v_row_bytes = v_row_bytes or row_bytes
    layout = plan_store(row_bytes, v_row_bytes, split, k_align, v_align)
    bands = options.get("bands", ((2, 11), (40, 12), (LARGEST, 13)))
    key = (row_bytes, v_row_bytes, k_align, v_align, split, bits, device, options.get("skipping", False))
    fast_road.remember_plan(key, options.get("context", CONTEXTS[device]), bands, layout, options.get("early", True))
    return layout


# ----------------------------------------------------------------------------------------------------------------------
# Launches, against expectations by hand


@faked
@pytest.mark.parametrize("early", [True, False])
def test_every_word_of_a_launch(road, early):
    layout = know(256, 128, bits=32, early=early)
    k = Tensor((3, 128), (384, 1), "float16", 0x10000, offset=256)
    v = Tensor((3, 64), (-64, 1), "float16", 0x20000)
    k_cache = Tensor((64, 128), (256, 1), "float16", 0x30000)
    v_cache = Tensor((50, 64), (64, 1), "float16", 0x40000)
    indices = Tensor((3,), (2,), "int32", 0x50004, offset=4)
    assert road(k, v, k_cache, v_cache, indices)
    assert last_launch() == {
        "grid": (-(-3 * layout.parts // layout.groups), 1, 1),
        "block": (layout.block, 1, 1),
        "shared": 0,
        "stream": 0x7000,
        # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed
        "attributes": np.array([6, 0, 1, *[0] * 15], np.int32).tobytes() if early else b"",
        "count": int(early),
        "kernel": 12,
        "parameters": [0x10100, 0x20000, 0x30000, 0x40000, 0x50008, 768, -128, 512, 128, 8, 3, 50, 0],
        "extra": 0,
    }


@faked
def test_one_row_has_stride_zero(road):
    """Whatever stride is given: it means nothing, and does not narrow the vectors."""
    know()
    k, v = (Tensor((1, 128), (stride, 1), "float16", at) for stride, at in ((3, 0x10000), (2**62, 0x20000)))
    caches = [Tensor((1, 128), (stride, 1), "float16", at) for stride, at in ((1, 0x30000), (0, 0x40000))]
    assert road(k, v, *caches, Tensor((1,), (7,), "int64", 0x50000))
    assert last_launch()["parameters"][5:] == [0, 0, 0, 0, 0, 1, 1, 0]


@faked
@pytest.mark.parametrize("batch", [1, 2, 3, 40, 41, 100_000])
@pytest.mark.parametrize("split", [0, 1, 2, 4])
def test_band_and_grid(road, batch, split):
    layout = know(512, split=split)
    assert road(*make_arrays(batch, row_bytes=512), split)
    launch = last_launch()
    assert launch["kernel"] == (11 if batch <= 2 else 12 if batch <= 40 else 13)
    assert launch["grid"] == (layout.grid(batch), 1, 1)
    assert launch["block"] == (layout.block, 1, 1)


@faked
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_index_types_have_their_plans(road, index_dtype):
    know(bits=32, bands=((LARGEST, 32),))
    know(bits=64, bands=((LARGEST, 64),))
    assert road(*make_arrays(index_dtype=index_dtype))
    assert last_launch()["kernel"] == int(index_dtype[3:])
    assert last_launch()["parameters"][9] == int(index_dtype[3:]) // 8


@faked
@pytest.mark.parametrize(("given", "limit"), [((), 64), ((0,), 64), ((None,), 64), ((1,), 1), ((64,), 64)])
def test_size_limit(road, given, limit):
    know()
    assert road(*make_arrays(), 0, *given)
    assert last_launch()["parameters"][11] == limit


@faked
def test_current_stream_is_asked_for_only_if_needed(road):
    know()
    arrays = make_arrays()
    for stream, handle in ((0, 0), (5, 5), (2**63 - 1, 2**63 - 1)):
        assert road(*arrays, stream=stream)
        assert last_launch()["stream"] == handle
    assert control[fakes.STREAM_CALLS] == 0
    assert road(*arrays, stream=None)
    assert road(*arrays)
    assert last_launch()["stream"] == 0x7000
    assert control[fakes.STREAM_CALLS] == 2


# ----------------------------------------------------------------------------------------------------------------------
# Arguments

REQUIRED = ("k", "v", "k_cache", "v_cache", "indices")
OPTIONAL = {"num_split": 1, "size_limit": 7, "stream": 9}


@faked
def test_every_mix_of_positions_and_keywords(road):
    know(split=0, bands=((LARGEST, 20),))
    know(split=1, bands=((LARGEST, 21),))
    values = {**dict(zip(REQUIRED, make_arrays(), strict=True)), **OPTIONAL}
    order = random.Random(1)
    calls = 0
    for positional in range(8):
        first = list(values)[:positional]
        optional = [name for name in OPTIONAL if name not in first]
        for some in itertools.chain(*(itertools.combinations(optional, n) for n in range(len(optional) + 1))):
            names = [name for name in REQUIRED if name not in first] + list(some)
            for _ in range(3):
                order.shuffle(names)
                assert road(*(values[name] for name in first), **{name: values[name] for name in names})
                launch, given = last_launch(), {*first, *names}
                assert launch["parameters"][:5] == [0x10000 * i for i in range(1, 6)]
                assert launch["kernel"] == (21 if "num_split" in given else 20)
                assert launch["parameters"][11] == (7 if "size_limit" in given else 64)
                assert launch["stream"] == (9 if "stream" in given else 0x7000)
                calls += 1
    assert calls > 100


def malformed(arrays):
    """Calls that do not fit the signature, as (positional, keyword) arguments."""
    named = dict(zip(REQUIRED, arrays, strict=True))
    yield from (((), {name: named[name] for name in REQUIRED if name != gone}) for gone in REQUIRED)
    yield from ((arrays[:n], {}) for n in range(5))
    yield (*arrays, 0, 0, 0), {}
    yield (*arrays, 0, 0, 0, 0), {}
    yield arrays, {"slots": 1}
    yield arrays, {"k": arrays[0]}
    yield (*arrays, 0), {"num_split": 0}
    yield (*arrays, 0, 0), {"size_limit": 0}
    yield arrays[:4], {"indices": arrays[4], "k": arrays[0]}
    yield arrays[:4], {"value": arrays[4]}  # in the table of names, but no parameter


@faked
def test_malformed_calls_are_given_back(road):
    know()
    for positional, keywords in malformed(make_arrays()):
        assert not road(*positional, **keywords)
    assert control[fakes.LAUNCHES] == 0


@faked
def test_names_that_are_not_interned_are_given_back(road):
    know()
    k, v, *rest = make_arrays()
    name = "".join(["k_", "cache"])
    assert not road.call((k, v, *rest), 2, (name, "v_cache", "indices"))
    assert road.call((k, v, *rest), 2, (sys.intern(name), "v_cache", "indices"))


@faked
@pytest.mark.parametrize(
    "options",
    [
        {"num_split": None}, {"num_split": True}, {"num_split": 3}, {"num_split": -1}, {"num_split": 8},
        {"num_split": 2**64}, {"num_split": 0.0}, {"num_split": np.int64(0)}, {"num_split": 64 << 8},
        {"size_limit": -1}, {"size_limit": 65}, {"size_limit": 2**64}, {"size_limit": True},
        {"size_limit": np.int64(3)}, {"size_limit": 2.0},
        {"stream": -1}, {"stream": 2**63}, {"stream": True}, {"stream": np.int64(3)}, {"stream": "5"},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_are_given_back(road, options):
    """(64 << 8 would be the bits of the index type in the plan's key.)"""
    for split in (0, 1):
        know(split=split)
    assert not road(*make_arrays(), **options)
    assert control[fakes.LAUNCHES] == 0


# ----------------------------------------------------------------------------------------------------------------------
# What the road has not seen, or cannot read


@faked
def test_unknown_plans_are_given_back(road):
    know(256, split=0)
    assert road(*make_arrays())
    narrow = make_arrays()
    narrow[1].data += 4
    others = (make_arrays(row_bytes=128), make_arrays(v_row_bytes=512), make_arrays(index_dtype="int32"), narrow)
    for arrays in others:
        assert not road(*arrays)
    assert not road(*make_arrays(), 1)
    on_another = make_arrays()
    for array in on_another:
        array.ordinal = 1
    assert not road(*on_another)
    assert control[fakes.LAUNCHES] == 1


@faked
def test_another_context_is_given_back(road):
    know()
    for context, status in ((CONTEXTS[1], 0), (0, 0), (CONTEXTS[0], 201)):
        control[fakes.CONTEXT], control[fakes.CONTEXT_STATUS] = context, status
        assert not road(*make_arrays())
    assert control[fakes.LAUNCHES] == 0


@faked
@pytest.mark.parametrize("at", range(5))
def test_unknown_types_are_given_back(road, at):
    know()
    arrays = make_arrays()
    arrays[at].__class__ = Parameter
    assert not road(*arrays)
    fast_road.remember_type(Parameter, writable=True)
    assert road(*arrays)
    arrays[at] = object()
    assert not road(*arrays)


@faked
@pytest.mark.parametrize("at", range(5))
def test_types_that_may_be_readonly_are_no_caches(road, at):
    know()
    fast_road.remember_type(Parameter, writable=False)
    arrays = make_arrays()
    arrays[at].__class__ = Parameter
    assert road(*arrays) is (at not in (2, 3))
    # Its library may be any, so on another stream than that library's own it must be waited for.
    assert not road(*arrays, stream=5)


@faked
@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("fails", [1, 2], ids=["with an exception", "without"])
def test_arrays_that_cannot_be_read_are_given_back(road, at, fails):
    """FastRoad raises if an exception is left set."""
    know()
    arrays = make_arrays()
    arrays[at].fails = fails
    assert not road(*arrays)
    assert control[fakes.LAUNCHES] == 0


@faked
@pytest.mark.parametrize("at", range(5))
def test_an_interrupt_is_passed_on(road, at):
    """Ctrl-C while an array is read is the caller's to see: the Python road is not asked to do it all again."""
    know()
    control[fakes.ERROR] = id(KeyboardInterrupt)
    arrays = make_arrays()
    arrays[at].fails = 1
    with pytest.raises(KeyboardInterrupt):
        road(*arrays)
    assert control[fakes.LAUNCHES] == control[fakes.ROAD_CALLS] == 0


@faked
@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize(
    "change",
    [
        {"strides_at": 0}, {"ndim": 0}, {"ndim": 3}, {"ndim": -1}, {"device_kind": 1}, {"device_kind": 13},
        {"code": 5}, {"bits": 4}, {"ordinal": 1},
    ],
    ids=str,
)  # fmt: skip
def test_tensors_that_are_given_back(road, at, change):
    know()
    arrays = make_arrays()
    for name, value in change.items():
        setattr(arrays[at], name, value)
    assert not road(*arrays)
    assert control[fakes.LAUNCHES] == 0


@faked
def test_a_failing_current_stream_is_given_back(road):
    know()
    control[fakes.STREAM_STATUS] = -1
    assert not road(*make_arrays())
    assert control[fakes.LAUNCHES] == 0
    assert road(*make_arrays(), stream=3)


@faked
def test_a_failing_launch_is_given_back(road):
    know()
    control[fakes.LAUNCH_STATUS] = 700
    assert not road(*make_arrays())


# ----------------------------------------------------------------------------------------------------------------------
# Random calls: one question to both roads. The Python road, whole and against the same driver, is the truth.

ROW_BYTES = (4, 8, 12, 64, 128, 256, 512, 516, 1024, 4096)
ALIKE = (("float16", "bfloat16", "int16"), ("float32", "int32", "uint32"), ("float64", "int64", "uint64"),
         ("bool", "uint8", "float8_e4m3fn", "float4_e2m1fn_x2"))  # fmt: skip
FOUR = REQUIRED[:4]


class Call:
    """The arguments of one call, in plain values that a mutation can change."""

    def __init__(self, rng):
        self.rng, self.options = rng, {}
        self.family = rng.choice(ALIKE)
        self.dtype = rng.choice(self.family)
        self.itemsize = fakes.dtypes[self.dtype].itemsize
        widths = [width for width in ROW_BYTES if width % self.itemsize == 0]
        k_bytes = rng.choice(widths)
        v_bytes = k_bytes if rng.random() < 0.7 else rng.choice(widths)
        batch, self.slots = rng.choice((1, 1, 2, 3, 7, 64, 300, 4000)), rng.choice((1, 2, 5, 64, 1000))
        self.numba = rng.random() < 0.3
        self.arrays = {}
        for name, rows, width in zip(
            FOUR, (batch, batch, self.slots, self.slots + rng.choice((0, 0, 3))), (k_bytes, v_bytes) * 2, strict=True
        ):
            pad = rng.choice([pad for pad in (0, 0, 4, 8, 16, 32) if pad % self.itemsize == 0])
            stride = (width + pad) * rng.choice((1, 1, 1, -1))
            if name in ("k", "v") and rng.random() < 0.1:
                stride = 0  # one row for all
            self.add(name, (rows, width // self.itemsize), (stride // self.itemsize, 1), self.dtype)
        self.add("indices", (batch,), (rng.choice((1, 1, 2, -1, 0)),), rng.choice(("int32", "int64")))
        splits = [0, 1] + [s for s in (2, 4) if k_bytes % (128 * s) == 0 and v_bytes % (128 * s) == 0]
        if rng.random() < 0.5:
            self.options["num_split"] = rng.choice(splits)
        if rng.random() < 0.4:
            self.options["size_limit"] = rng.choice((0, None, 1, self.slots))
        if rng.random() < 0.4:
            self.options["stream"] = rng.choice((None, 0, 77, 2**40))

    def add(self, name, shape, strides, dtype):
        shift = self.rng.choice((0, 0, 0, 8, 4)) if name != "indices" else 0
        address = (len(self.arrays) + 1) << 36 | self.rng.randrange(2**20) << 4 | shift
        self.arrays[name] = {"shape": shape, "strides": strides, "dtype": dtype, "address": address}

    def build(self):
        """The arguments, made of Numba arrays where those can express them."""
        numba = self.numba and all(self.numba_can(**array) for array in self.arrays.values())
        return [self.make(numba, **self.arrays[name]) for name in REQUIRED]

    @staticmethod
    def numba_can(shape, strides, dtype, **others):
        plain = not {"device_kind", "conj", "neg", "offset"} & set(others) and len(shape) == len(strides)
        return plain and 0 not in shape and hasattr(np, dtype)

    @staticmethod
    def make(numba, shape, strides, dtype, address, ordinal=0, **others):
        address |= ordinal << 44
        if numba:
            itemsize = np.dtype(dtype).itemsize
            return numba_array(shape, tuple(stride * itemsize for stride in strides), dtype, address)
        kind = Parameter if address & 0x1C0 == 0x40 else Tensor  # one in eight: calls are known that have none
        return kind(shape, strides, dtype, address, ordinal=ordinal, **others)

    def must_be_served(self):
        """Whether a call that the Python road launches is of the kinds that the fast road takes."""
        values = self.options.values()
        plain = all(value is None or (type(value) is int and -(2**63) <= value < 2**63) for value in values)
        complex_ = any(array["dtype"].startswith("complex") for array in self.arrays.values())
        elsewhere = any(array.get("ordinal") for array in self.arrays.values())
        # A row of one element may be a lazily negated view.
        narrow = any(math.prod(self.arrays[name]["shape"][1:]) == 1 for name in ("k", "v"))
        if complex_ or elsewhere or narrow:
            return False
        return plain


def change(array, **values):
    array.update(values)


def other_dtype(call):
    name = call.rng.choice(REQUIRED)
    family = ("int32", "int64", "uint32", "uint64", "float64") if name == "indices" else call.family
    change(call.arrays[name], dtype=call.rng.choice(family))


def other_width_of_dtype(call):
    for name in call.rng.choice((("k", "v"), ("k_cache",), FOUR)):
        change(call.arrays[name], dtype=call.rng.choice(("uint8", "float16", "float32", "float64", "complex64")))


def columns(call):
    for name in call.rng.choice((("k",), ("v",), ("k_cache",), ("v_cache",), ("k", "k_cache"), ("v", "v_cache"))):
        array = call.arrays[name]
        change(array, shape=(array["shape"][0], max(0, array["shape"][1] + call.rng.choice((-1, 1, 2)))))


def zero_width(call):
    for side in call.rng.choice((("k",), ("v",), ("k", "v"))):
        for name in (side, f"{side}_cache"):
            change(call.arrays[name], shape=(call.arrays[name]["shape"][0], 0))


def rows(call):
    array = call.arrays[call.rng.choice(REQUIRED)]
    change(array, shape=(max(0, array["shape"][0] + call.rng.choice((-1, 1))), *array["shape"][1:]))


def batch(call):
    count = call.rng.choice((0, 0, 1, 2, 15, 16, 17, 2**29, LARGEST, LARGEST + 1))
    for name in ("k", "v", "indices"):
        array = call.arrays[name]
        change(array, shape=(count, *array["shape"][1:]), strides=(0, *array["strides"][1:]))


def empty_cache(call):
    name = call.rng.choice(("k_cache", "v_cache"))
    change(call.arrays[name], shape=(0, call.arrays[name]["shape"][1]))


def inner_stride(call):
    array = call.arrays[call.rng.choice(FOUR)]
    change(array, strides=(array["strides"][0], call.rng.choice((0, 2, -1, 2**33))))


def row_stride(call):
    array = call.arrays[call.rng.choice(REQUIRED)]
    width = (*array["shape"], 1)[1]
    stride = call.rng.choice((0, 1, -1, width - 1, width, -width, width + 1, width + 2, -width - 1, 2**40, width // 2))
    change(array, strides=(stride, *array["strides"][1:]))


def overlap(call):
    name = call.rng.choice(("k_cache", "v_cache"))
    array = call.arrays[name]
    words = max(1, 4 // call.itemsize)  # as close as alignment lets it be
    stride = call.rng.choice((array["shape"][1] - words, words - array["shape"][1], 0, words))
    change(array, shape=(64, array["shape"][1]), strides=(stride, 1))
    call.options.pop("size_limit", None)


def address(call):
    array = call.arrays[call.rng.choice(REQUIRED)]
    change(array, address=array["address"] + call.rng.choice((1, 2, 3, 4, 6, 8, 16)))


def offset(call):
    change(call.arrays[call.rng.choice(REQUIRED)], offset=call.rng.choice((2, 4, 8, 16, 2**40)))


def ordinal(call):
    change(call.arrays[call.rng.choice(REQUIRED)], ordinal=1)


def all_ordinals(call):
    for array in call.arrays.values():
        change(array, ordinal=1)


def device_kind(call):
    change(call.arrays[call.rng.choice(REQUIRED)], device_kind=1)


def conjugated(call):
    for array in (call.arrays[name] for name in FOUR):
        change(array, dtype="complex64")
    change(call.arrays[call.rng.choice(FOUR)], conj=call.rng.choice((True, False)))


def dimensions(call):
    array = call.arrays[call.rng.choice(REQUIRED)]
    count = call.rng.choice((0, 1, 2, 3))
    change(array, shape=(*array["shape"], 1, 1)[:count], strides=(*array["strides"], 1, 1)[:count])


def num_split(call):
    values = (0, 1, 2, 4, 3, 5, -1, 8, 2**16, 2**70, None, True, np.int64(0), np.int32(1), 1.0, "1")
    call.options["num_split"] = call.rng.choice(values)


def size_limit(call):
    slots = call.slots
    values = (0, 1, slots - 1, slots, slots + 1, slots + 9, -1, 2**70, -(2**70), True, np.int32(1), 1.0, "1", None)
    call.options["size_limit"] = call.rng.choice(values)


def stream(call):
    values = (0, 1, 2**62, 2**63, 2**64 - 1, -1, True, np.int64(7), 1.0, object(), None)
    call.options["stream"] = call.rng.choice(values)


def skip_index(call):
    values = (-1, 0, 3, 2**40, 2**63 - 1, -(2**63), np.int64(-1), None, 2**63, -(2**63) - 1, True, 1.0, "1")
    call.options["skip_index"] = call.rng.choice(values)


def split_evenly(call, count):
    """`count` as (groups, size of a group)."""
    size = call.rng.choice([size for size in (1, 2, 3, 4, 8, 16, count) if count % size == 0])
    return count // size, size


def give_heads(call, side):
    """Rows of heads, of one number in source and cache; the same memory."""
    width = call.arrays[side]["shape"][1]
    heads, size = split_evenly(call, width)
    for name in (side, f"{side}_cache"):
        array = call.arrays[name]
        change(array, shape=(array["shape"][0], heads, size), strides=(array["strides"][0], size, 1))


def give_pages(call, cache):
    """Pages that one stride leads through; the same memory."""
    array = call.arrays[cache]
    (slots, *row), (stride, *row_strides) = array["shape"], array["strides"]
    pages, size = split_evenly(call, slots)
    change(array, shape=(pages, size, *row), strides=(size * stride, stride, *row_strides))


def heads_and_pages(call):
    """The same rows in more dimensions, so that the call stays valid."""
    wanted = call.rng.choice(((1, 0), (0, 1), (1, 1)))
    for side in call.rng.choice((("k",), ("v",), ("k", "v"))):
        if wanted[0]:
            give_heads(call, side)
        if wanted[1]:
            give_pages(call, f"{side}_cache")


def spoilt_heads_and_pages(call):
    heads_and_pages(call)
    array = call.rng.choice([array for array in call.arrays.values() if len(array["shape"]) > 2])
    shape, strides = list(array["shape"]), list(array["strides"])
    at = call.rng.randrange(len(shape))
    if call.rng.random() < 0.5:
        shape[at] += call.rng.choice((1, -1))
    else:
        strides[at] += call.rng.choice((1, -1, 4, 32))
    change(array, shape=tuple(shape), strides=tuple(strides))


def negated(call):
    """Lazily. (Not in MUTATIONS: the fast road cannot see it.)"""
    change(call.arrays[call.rng.choice(REQUIRED)], neg=True)


def look_alike(call):
    name = call.rng.choice(("num_split", "size_limit", "skip_index"))
    value = call.options.get(name, call.rng.choice((0, 1)))
    if value is not None:
        kinds = (float, np.int64, np.float32, bool) if value in (0, 1) else (float, np.int64)
        call.options[name] = call.rng.choice(kinds)(value)


MUTATIONS = (
    other_dtype, other_width_of_dtype, columns, zero_width, rows, batch, empty_cache, inner_stride, row_stride, overlap,
    address, offset, ordinal, all_ordinals, device_kind, conjugated, dimensions, num_split, size_limit, stream,
    skip_index, heads_and_pages, spoilt_heads_and_pages,
)  # fmt: skip


def ask_python(arguments, options, function=None):
    """('launched', launch), ('nothing',) or ('refused', error)."""
    launches = int(control[fakes.LAUNCHES])
    try:
        (function or python_road)(*arguments, **options)
    except (TypeError, ValueError) as error:
        assert control[fakes.LAUNCHES] == launches
        return "refused", error
    if control[fakes.LAUNCHES] == launches:
        return ("nothing",)
    return "launched", last_launch()


def ask_both(road, call, function=None):
    """The Python road's verdict, and whether the fast road served. Asserts that they agree."""
    arguments = call.build()
    fields = [bytes(array) for array in arguments if isinstance(array, Tensor)]
    verdict = ask_python(arguments, call.options, function)
    launches = int(control[fakes.LAUNCHES])
    served = road(*arguments, **call.options)
    where = (call.arrays, call.options, verdict)
    assert control[fakes.LAUNCHES] == launches + served, where
    assert [bytes(array) for array in arguments if isinstance(array, Tensor)] == fields, where
    if served:
        assert verdict[0] == "launched", where
        launch = last_launch()
        launch["kernel"] -= FAST
        assert launch == verdict[1], where
    elif verdict[0] == "launched":
        assert not call.must_be_served(), where
    return verdict[0], served


@faked
@pytest.mark.parametrize("seed", range(4))
def test_random_calls(road, seed):
    """Each valid call, then the same with one aspect changed. The plan is known, so no check can hide behind it."""
    rng = random.Random(seed)
    seen = Counter()
    for _ in range(2500):
        if len(dispatch._plans) > 200:
            fakes.forget_plans()
        call = Call(rng)
        assert ask_both(road, call) == ("launched", call.must_be_served())
        mutation = rng.choice(MUTATIONS)
        mutation(call)
        seen[(mutation.__name__, *ask_both(road, call))] += 1
    refused, served = Counter(), Counter()
    for (name, verdict, was_served), count in seen.items():
        (served if was_served else refused)[name] += count if was_served or verdict != "launched" else 0
    # Each mutation made calls that must be refused, but these; and each of those that can leave a call valid, did.
    harmless = {"all_ordinals", "heads_and_pages"}
    assert {m.__name__ for m in MUTATIONS} - {name for name in refused if refused[name]} == harmless
    never_valid = {"zero_width", "empty_cache", "ordinal", "device_kind", "conjugated", "all_ordinals"}
    never_valid.add("inner_stride")  # but for rows of one element, which the Python road takes
    assert {m.__name__ for m in MUTATIONS} - set(served) <= never_valid
    assert seen["all_ordinals", "launched", False] > 0
    assert seen["conjugated", "launched", False] > 0
    assert seen["batch", "nothing", False] > 0


def ask_without_knowledge(call):
    """ask_python, as if no call had been made before."""
    known = dict(known_calls.known)
    known_calls.known.clear()
    verdict = ask_python(call.build(), call.options)
    known_calls.known.update(known)
    return verdict


@faked
@pytest.mark.parametrize("seed", range(4))
def test_known_calls_change_no_verdict(road, seed, monkeypatch):
    """Nor of the random valid calls, nor of the same with one aspect changed."""
    rng, hits = random.Random(seed), Counter()
    launch = launch_module.ReadyLaunch.launch
    monkeypatch.setattr(
        launch_module.ReadyLaunch, "launch", lambda *arguments: (hits.update([mutation]), launch(*arguments))
    )
    refused = Counter()
    for _ in range(1500):
        fakes.forget_plans()
        call = Call(rng)
        if rng.random() < 0.8:
            call.numba = False
        valid = copy.deepcopy((call.arrays, call.options))
        mutation = "none"
        for _ in range(3):
            assert ask_python(call.build(), call.options) == ask_without_knowledge(call)
        mutation = rng.choice((*MUTATIONS, negated, look_alike))
        mutation(call)
        for _ in range(3):
            verdict, truth = ask_python(call.build(), call.options), ask_without_knowledge(call)
            assert (verdict[0], *map(str, verdict[1:])) == (truth[0], *map(str, truth[1:])), (valid, call.arrays)
            refused[mutation] += truth[0] == "refused"
    assert hits["none"] > 500
    assert len(hits) > 10  # of the mutations that leave some calls valid
    assert not hits[negated]
    assert refused[negated] > 20
    assert refused[look_alike] > 20


@faked
def test_heads_and_pages_are_launched_as_the_rows_that_they_are(road):
    """The Python road's launch of the same memory in more dimensions is the fast road's launch of its rows."""
    rng, shapes = random.Random(2), set()
    for _ in range(1500):
        if len(dispatch._plans) > 200:
            fakes.forget_plans()
        call = Call(rng)
        plain = call.build()
        ask_python(plain, call.options)
        served = road(*plain, **call.options)
        launch = last_launch()
        launch["kernel"] -= FAST * served
        heads_and_pages(call)
        shaped = call.build()
        assert ask_python(shaped, call.options) == ("launched", launch), call.arrays
        assert road(*shaped, **call.options) is served
        shapes |= {(len(call.arrays[name]["shape"]), len(call.arrays[f"{name}_cache"]["shape"])) for name in "kv"}
    assert shapes == {(2, 2), (2, 3), (3, 3), (3, 4)}


@faked
def test_an_index_to_skip_is_the_last_word_and_has_kernels_of_its_own(road):
    arrays = make_arrays()
    kernels = {}
    for options in ({}, {"skip_index": None}, {"skip_index": -1}, {"skip_index": 7}):
        assert ask_python(arrays, options)[0] == "launched"
        launch = last_launch()
        assert launch["parameters"][12] == (options.get("skip_index") or 0)
        kernels[str(options)] = launch["kernel"]
        assert road(*arrays, **options)
        assert last_launch() == {**launch, "kernel": FAST + launch["kernel"]}
    assert kernels["{}"] == kernels["{'skip_index': None}"]
    assert kernels["{'skip_index': -1}"] == kernels["{'skip_index': 7}"] != kernels["{}"]
    assert road(*arrays)
    assert last_launch()["kernel"] == FAST + kernels["{}"]
    assert last_launch()["parameters"][12] == 0


@faked
def test_plans_that_skip_are_not_found_by_calls_that_do_not(road):
    know(skipping=True)
    assert not road(*make_arrays())
    know()
    assert road(*make_arrays())


# ----------------------------------------------------------------------------------------------------------------------
# SGLang's store_cache, which asks for the same in other words


@pytest.fixture
def drop_in(road):
    """(the compiled entry as the vectorcall of `store_cache`, the Python function)."""
    function = fakes.store_cache()
    rest = fast_road._state[native.STORE_CACHE // 8 : native.STORE_CACHE // 8 + 3].copy()
    fast_road._write(native.STORE_CACHE, id(function), fakes._road.address, 5)
    yield fakes.FastRoad(function), function
    fast_road._state[native.STORE_CACHE // 8 : native.STORE_CACHE // 8 + 3] = rest


@faked
@pytest.mark.parametrize(
    ("options", "split", "limit", "skipped"),
    [
        ({}, 0, 64, None),
        ({"row_bytes": 256}, 0, 64, None),
        ({"row_bytes": 256, "v_row_bytes": 128, "size_limit": 9}, 0, 9, None),
        ({"row_bytes": None, "v_row_bytes": 0}, 0, 64, None),
        ({"num_split": -3, "size_limit": -1, "reserved_skip_index": -1}, 0, 64, None),
        ({"num_split": 1, "reserved_skip_index": -(2**63)}, 1, 64, None),
        ({"reserved_skip_index": 0}, 0, 64, 0),
        ({"size_limit": 64, "reserved_skip_index": 7}, 0, 64, 7),
    ],
    ids=str,
)
def test_store_cache(drop_in, options, split, limit, skipped):
    road, function = drop_in
    kernels = {(0, False): 20, (0, True): 21, (1, False): 22}
    for (num_split, skipping), kernel in kernels.items():
        know(256, 128, split=num_split, skipping=skipping, bands=((LARGEST, kernel),))
    arrays = make_arrays(v_row_bytes=128)
    assert road(*arrays, **options)
    launch = last_launch()
    assert launch["kernel"] == kernels[split, skipped is not None]
    assert launch["parameters"][:5] == [0x10000 * i for i in range(1, 6)]
    assert launch["parameters"][10:] == [4, limit, skipped or 0]
    assert launch["stream"] == 0x7000
    # The Python function's launch is the same, but for the kernel, which it compiles anew.
    fakes.forget_plans()
    assert ask_python(arrays, options, function) == ("launched", {**last_launch(), "kernel": ANY})
    assert {**last_launch(), "kernel": kernel} == {**launch, "kernel": kernel}


@faked
def test_calls_of_store_cache_that_are_given_back(drop_in):
    road, _ = drop_in
    know()
    arrays = make_arrays()
    assert road(*arrays, row_bytes=256, v_row_bytes=256)
    wrong = [
        {name: value} for name in ("row_bytes", "v_row_bytes") for value in (128, 512, -256, 1, 2**64, True, 256.0)
    ]
    wrong += [{name: None} for name in ("num_split", "size_limit", "reserved_skip_index")]
    wrong += [{"stream": 5}, {"skip_index": 1}, {"k": arrays[0]}, {"num_split": 8}, {"size_limit": 65}]
    for options in wrong:
        assert not road(*arrays, **options), options
    assert not road(*arrays, 0)  # all but the arrays is named
    assert not road(*arrays[:4], row_bytes=256)
    assert control[fakes.LAUNCHES] == 1


@faked
def test_the_names_of_store_cache_are_not_those_of_store_kvcache(road):
    know()
    for name in ("row_bytes", "v_row_bytes", "reserved_skip_index"):
        assert not road(*make_arrays(), **{name: 0})
    assert road(*make_arrays(), 0, 0)


@faked
@pytest.mark.parametrize("seed", range(2))
def test_random_calls_of_store_cache(drop_in, seed):
    """As test_random_calls, in that function's words."""
    road, function = drop_in
    rng = random.Random(seed)
    seen = Counter()

    def reword(call):
        call.numba = False
        call.options.pop("stream", None)
        if "skip_index" in call.options:
            call.options["reserved_skip_index"] = call.options.pop("skip_index")
        for side in ("k", "v"):
            array = call.arrays[side]
            width = math.prod(array["shape"][1:]) * fakes.dtypes[array["dtype"]].itemsize
            name = "row_bytes" if side == "k" else "v_row_bytes"
            if name not in call.options and rng.random() < 0.6:
                call.options[name] = rng.choice((width, width, width, 0, width // 2, 2 * width, -width, width + 2**70))

    for _ in range(2500):
        if len(dispatch._plans) > 200:
            fakes.forget_plans()
        call = Call(rng)
        reword(call)
        seen[("as made", *ask_both(road, call, function))] += 1
        mutation = rng.choice(MUTATIONS)
        mutation(call)
        reword(call)
        seen[(mutation.__name__, *ask_both(road, call, function))] += 1
    assert seen["as made", "launched", True] > 500
    assert seen["as made", "refused", False] > 500
    assert {name for name, verdict, served in seen if served} > {"num_split", "size_limit", "skip_index", "batch"}


# ----------------------------------------------------------------------------------------------------------------------
# Numba's arrays


def numba_arrays(batch=4, slots=64, **options):
    return [
        *(numba_array((rows, 128), (256, 2), "float16", 0x10000 * (i + 1), **options)
          for i, rows in enumerate((batch, batch, slots, slots))),
        numba_array((batch,), (8,), "int64", 0x50000, **options),
    ]  # fmt: skip


@pytest.fixture
def numba_road(road):
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    fast_road.remember_type(DeviceNDArray, writable=True)
    know()
    return road


@faked
@pytest.mark.parametrize("pointer", [ctypes.c_size_t, ctypes.c_void_p])
def test_numba_arrays(numba_road, pointer):
    assert numba_road(*numba_arrays(pointer=pointer))
    assert last_launch()["stream"] == 0
    assert last_launch()["parameters"] == [*range(0x10000, 0x60000, 0x10000), 256, 256, 256, 256, 8, 4, 64, 0]
    mixed = [n if i % 2 else t for i, (n, t) in enumerate(zip(numba_arrays(), make_arrays(), strict=True))]
    assert numba_road(*mixed)
    assert last_launch()["stream"] == 0x7000  # k_cache is a tensor


@faked
def test_numba_arrays_on_another_gpu(numba_road):
    """Where there is one GPU only, the driver is not asked which."""
    arrays = numba_arrays()
    arrays[1] = numba_array((4, 128), (256, 2), "float16", 1 << 44 | 0x20000)
    assert not numba_road(*arrays)
    control[fakes.POINTER_STATUS] = 1
    assert not numba_road(*numba_arrays())
    fast_road._write(native.DEVICE_COUNT, 1)
    assert numba_road(*numba_arrays())


def _without(name):
    def spoil(array):
        delattr(array, name)

    return spoil


def _with(**values):
    def spoil(array):
        for name, value in values.items():
            setattr(array, name, value)

    return spoil


def foreign_memory(array):
    array.gpu_data = types.SimpleNamespace(device_ctypes_pointer=ctypes.c_size_t(0x10000))


def null(pointer):
    def spoil(array):
        array.gpu_data.device_ctypes_pointer = pointer(0)

    return spoil


def subclass_of_owned_pointer(array):
    from numba.cuda.cudadrv.driver import OwnedPointer

    array.gpu_data = numba_array((1,), (4,), "int32", 0x10000, owner=type("Managed", (OwnedPointer,), {})).gpu_data


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize(
    "spoil",
    [
        foreign_memory, subclass_of_owned_pointer, null(ctypes.c_size_t), null(ctypes.c_void_p),
        *map(_without, ("shape", "strides", "dtype", "gpu_data")),
        _with(shape=(4, 4, 4)), _with(shape=()), _with(shape=None), _with(shape=("4", "128")),
        _with(shape=(2**70,) * 2), _with(strides=(2**70,) * 2), _with(strides=(256, None)),
        _with(shape=[4, 128]), _with(strides=()),
        _with(dtype=np.dtype("complex64")), _with(dtype=np.dtype(">f2")), _with(dtype=np.dtype("U1")),
        _with(dtype=np.dtype([("x", "f2")])), _with(dtype="float16"), _with(dtype=None), _with(gpu_data=None),
    ],
)  # fmt: skip
@faked
def test_numba_arrays_that_are_given_back(numba_road, spoil, at):
    arrays = numba_arrays()
    assert numba_road(*arrays)
    spoil(arrays[at])
    assert not numba_road(*arrays)
    assert control[fakes.LAUNCHES] == 1


@faked
def test_a_pointer_without_value_is_given_back(numba_road):
    arrays = numba_arrays()
    for pointer in (None, types.SimpleNamespace(value="5"), types.SimpleNamespace()):
        arrays[0].gpu_data.device_ctypes_pointer = pointer
        assert not numba_road(*arrays)


# ----------------------------------------------------------------------------------------------------------------------
# CuPy's arrays


def cupy_arrays(batch=4, slots=64):
    return [
        *(CupyArray((rows, 128), (256, 2), "float16", 0x10000 * (i + 1))
          for i, rows in enumerate((batch, batch, slots, slots))),
        CupyArray((batch,), (8,), "int64", 0x50000),
    ]  # fmt: skip


@pytest.fixture
def cupy_road(road):
    fast_road.remember_type(CupyArray, writable=True)
    know()
    return road


@faked
def test_cupy_arrays(cupy_road):
    assert fast_road.ways[CupyArray] == "native: CuPy's attributes"
    assert cupy_road(*cupy_arrays())
    assert last_launch()["stream"] == 0x9000
    assert last_launch()["parameters"] == [*range(0x10000, 0x60000, 0x10000), 256, 256, 256, 256, 8, 4, 64, 0]
    mixed = [c if i % 2 else t for i, (c, t) in enumerate(zip(cupy_arrays(), make_arrays(), strict=True))]
    assert cupy_road(*mixed)
    assert last_launch()["stream"] == 0x7000  # k_cache is a tensor


@faked
def test_cupy_arrays_on_another_gpu(cupy_road):
    """`data.device_id` is asked for where there is more than one GPU; the stream is that of the current one."""
    know(device=1)
    arrays = cupy_arrays()
    arrays[1].data.device_id = 1
    assert not cupy_road(*arrays)
    for array in arrays:
        array.data.device_id = 1
    assert not cupy_road(*arrays)  # device 0 is current
    control[fakes.CONTEXT] = CONTEXTS[1]
    assert cupy_road(*arrays)
    assert last_launch()["stream"] == 0x9001
    fast_road._write(native.DEVICE_COUNT, 1)
    del arrays[1].data.device_id
    control[fakes.CONTEXT] = CONTEXTS[0]
    assert cupy_road(*arrays)


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize(
    "spoil",
    [
        *map(_without, ("shape", "strides", "dtype", "data")),
        _with(shape=()), _with(shape=None), _with(strides=(256, None)), _with(dtype=np.dtype(">f2")), _with(data=None),
        lambda array: delattr(array.data, "ptr"),
        lambda array: setattr(array.data, "ptr", 0),
        lambda array: setattr(array.data, "ptr", "16"),
        lambda array: delattr(array.data, "device_id"),
        lambda array: setattr(array.data, "device_id", None),
    ],
)  # fmt: skip
@faked
def test_cupy_arrays_that_are_given_back(cupy_road, spoil, at):
    arrays = cupy_arrays()
    assert cupy_road(*arrays)
    spoil(arrays[at])
    assert not cupy_road(*arrays)
    assert control[fakes.LAUNCHES] == 1


@faked
def test_a_cupy_stream_that_cannot_be_found_is_given_back(cupy_road):
    fakes.cupy_streams[0] = ValueError("no stream")
    assert not cupy_road(*cupy_arrays())
    assert control[fakes.LAUNCHES] == 0
    assert cupy_road(*cupy_arrays(), stream=3)


@pytest.mark.parametrize("handle", [np.uint64(0x9000), None])
@faked
def test_a_cupy_stream_whose_handle_is_no_plain_int_is_given_back(cupy_road, handle):
    """`cupy.cuda.ExternalStream` keeps what it is given, NumPy's integers too; the Python road reads them."""
    fakes.cupy_streams[0] = handle
    assert not cupy_road(*cupy_arrays())
    assert control[fakes.LAUNCHES] == 0


# ----------------------------------------------------------------------------------------------------------------------
# Pages of slots, rows of heads


def shaped(rows, row, strides=None, at=0x10000):
    """A tensor of float16 with these leading and row dimensions, dense unless strides (in elements) are given."""
    shape = (*rows, *row)
    dense = [1]
    for extent in reversed(shape[1:]):
        dense.insert(0, dense[0] * extent)
    return Tensor(shape, strides or tuple(dense), "float16", at)


@pytest.mark.parametrize(
    ("row", "leading", "k_strides", "cache_strides", "served"),
    [
        ((128,), (4, 16), None, None, True),
        ((2, 64), (64,), None, None, True),
        ((2, 64), (4, 16), None, None, True),
        ((2, 64), (4, 16), (384, 64, 1), None, True),  # a slice of a fused projection
        ((2, 64), (4, 16), None, (4096, 256, 64, 1), True),  # slots apart, pages that follow
        ((2, 64), (4, 16), None, (8192, 128, 64, 1), False),  # K and V pages by turns
        ((2, 64), (4, 1), None, (8192, 5, 64, 1), True),  # one slot a page: its stride is not looked at
        ((2, 64), (1, 16), None, (5, 128, 64, 1), True),
        ((2, 64), (4, 16), (256, 128, 1), None, False),  # heads apart
        ((1, 128), (4, 16), (128, 7, 1), None, True),
        ((128, 1), (64,), (128, 1, 9), None, True),
        ((128,), (-2, -32), None, None, False),
    ],
)
@faked
def test_pages_and_heads(road, row, leading, k_strides, cache_strides, served):
    know()
    k, v = (shaped((4,), row, k_strides, at) for at in (0x10000, 0x20000))
    caches = [shaped(leading, row, cache_strides, at) for at in (0x30000, 0x40000)]
    assert road(k, v, *caches, make_arrays()[4]) is served
    if served:
        slots = math.prod(leading)
        steps = caches[0].stride()
        stride = steps[1] if len(leading) == 2 and leading[1] > 1 else steps[0]  # from slot to slot
        assert last_launch()["parameters"][5:] == [
            2 * k.stride()[0], 2 * v.stride()[0], 2 * stride, 2 * stride, 8, 4, slots, 0,
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("k_row", "cache"),
    [
        ((128,), (4, 4, 4, 128)),
        ((128,), (64, 2, 64)),
        ((2, 64), (64, 128)),
        ((64, 2), (64, 2, 64)),
        ((2, 2, 32), (64, 2, 2, 32)),
        ((0, 64), (64, 0, 64)),
        ((2**31, 2**32), (64, 2**31, 2**32)),
        ((2**16, 2**15), (64, 2**16, 2**15)),
    ],
)
@faked
def test_shapes_that_are_given_back(road, k_row, cache):
    know()
    rest = make_arrays()
    assert not road(shaped((4,), k_row), rest[1], shaped(cache, ()), *rest[3:])
    assert not road(rest[0], shaped((4,), k_row), rest[2], shaped(cache, ()), rest[4])
    assert control[fakes.LAUNCHES] == 0


# ----------------------------------------------------------------------------------------------------------------------
# References and threads


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@faked
@pytest.mark.parametrize("kind", ["tensors", "numba", "given back", "cannot be read"])
def test_a_million_calls_leave_no_trace(numba_road, kind):
    """Counts of references, blocks and pages; half a million of each kind."""
    arrays = numba_arrays() if kind != "tensors" else make_arrays()
    if kind == "cannot be read":
        arrays[4] = make_arrays()[4]
        arrays[4].fails = 1
    limit, handle = int("5000000000") if kind == "given back" else int("60"), int("123456789")
    values = (*arrays, limit, handle)
    names = ("size_limit", "stream")
    array = (ctypes.c_uint64 * 7)(*map(id, values))
    entry, function, at = numba_road.entry, len, ctypes.addressof(array)
    watched = [*values, names, None, 256, int, np.dtype("float16"), Ellipsis]
    for a in arrays:
        if kind != "tensors" and not isinstance(a, Tensor):
            watched += [a.shape, a.strides, a.gpu_data, a.gpu_data.device_ctypes_pointer]
    entry(function, at, 5, id(names))  # warm
    gc.collect()

    def counts():
        return [sys.getrefcount(thing) for thing in watched]

    before, blocks, pages = counts(), sys.getallocatedblocks(), resident_bytes()
    result = None
    for _ in range(500_000):
        result = entry(function, at, 5, id(names))
    served = kind in ("tensors", "numba")
    assert result == (id(None) if served else id(Ellipsis))
    assert control[fakes.LAUNCHES] == (500_001 if served else 0)
    after = counts()
    assert [b - a for a, b in zip(before, after, strict=True) if abs(b - a) > 5] == []
    assert abs(sys.getallocatedblocks() - blocks) < 200
    assert resident_bytes() - pages < 4 << 20


@faked
def test_threads_do_not_mix(numba_road):
    """The launch, which the GIL does not guard, reads its parameters late; each must be its own thread's."""
    control[fakes.THREADED] = 1
    threads, calls = range(1, 9), 3000
    failures = []

    def work(thread):
        arrays = make_arrays(batch=thread, row_bytes=256 * thread, at=1)
        for array in arrays:
            array.data = thread << 32 | array.data << 8
        for _ in range(calls):
            if not numba_road(*arrays, stream=thread):
                failures.append(thread)

    fakes.forget_plans()
    for thread in threads:
        know(256 * thread, bands=((LARGEST, 1000 + thread),))
    workers = [threading.Thread(target=work, args=(thread,)) for thread in threads]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    assert fakes.per_thread[1:9].tolist() == [[calls, 0]] * 8


# ----------------------------------------------------------------------------------------------------------------------
# The tables


def wide_arrays(row_bytes):
    arrays = make_arrays(row_bytes=256)
    for array in arrays[:4]:
        array.extents[1] = array.steps[0] = row_bytes // 2
    return arrays


@faked
def test_256_plans_are_remembered_and_no_more(road):
    for i in range(1, 301):
        know(16 * i, bands=((LARGEST, i),))
    for i in range(1, 301):
        assert road(*wide_arrays(16 * i)) is (i <= 256), i
        if i <= 256:
            assert last_launch()["kernel"] == i


@faked
@pytest.mark.parametrize("home", [3, native.MAX_PLANS - 1], ids=["middle", "wraps around"])
def test_colliding_keys_are_found(road, home):
    second = fast_road._key_words(16, 16, 16, 16, 0, 64, 0, False)[1]
    widths = [
        width
        for width in range(16, 16 * 20_000, 16)
        if fast_road._python_plan_home(width | width << 32, second) == home
    ][:12]
    assert len(widths) == 12
    for width in widths[:11]:
        know(width, bands=((LARGEST, width),))
    for width in widths[:11]:
        assert road(*wide_arrays(width))
        assert last_launch()["kernel"] == width
    assert not road(*wide_arrays(widths[11]))


@faked
def test_too_many_bands_are_not_remembered(road):
    know(bands=tuple((i, i) for i in range(1, 6)))
    assert not road(*make_arrays())


@faked
def test_a_full_table_of_types(road):
    kinds = [type(f"Kind{i}", (Tensor,), {}) for i in range(20)]
    for kind in kinds:
        fast_road.remember_type(kind, writable=True)
    know()
    for i, kind in enumerate(kinds):
        arrays = make_arrays()
        arrays[2].__class__ = kind
        known = i < native.MAX_TYPES - 1  # Tensor has a row of its own
        assert road(*arrays) is known
        assert fast_road.ways[kind].startswith("native: DLPack 1.3" if known else "Python road: more array types")


@faked
def test_ways_of_types(road):
    def kind(capsule):
        return type("Kind", (Tensor,), {"__dlpack_c_exchange_api__": capsule})

    old, lame = fakes.exchange_table(version=2), fakes.exchange_table(current_stream=0)
    new = ctypes.pythonapi.PyCapsule_New
    ways = {
        kind(None): "has no __dlpack_c_exchange_api__",
        kind(old[0]): "DLPack 2.0's exchange table lacks",
        kind(lame[0]): "DLPack 1.3's exchange table lacks",
        kind(new(1, b"another name", None)): "Python road: PyCapsule_GetPointer",
        kind(5): "Python road: PyCapsule_GetPointer",
        np.ndarray: "has no __dlpack_c_exchange_api__",
    }
    know()
    for i, (what, reason) in enumerate(ways.items()):
        fast_road.remember_type(what, writable=True)
        assert reason in fast_road.ways[what]
        if i < 5:
            arrays = make_arrays()
            arrays[0].__class__ = what
            assert not road(*arrays)


# ----------------------------------------------------------------------------------------------------------------------
# In force


@pytest.fixture
def in_force(road):
    """`store_kvcache` itself takes the fast road."""
    api = ctypes.pythonapi
    fast_road._install(native.STORE, store_kvcache, road.address)
    yield store_kvcache
    api.PyFunction_SetVectorcall(store_kvcache, int(fast_road._state[PYTHON_ROAD // 8]))


def outcome(function, positional, keywords):
    try:
        return function(*positional, **keywords)
    except Exception as error:
        return type(error), str(error)


@needs_vectorcall
def test_the_first_call_teaches_the_second(in_force):
    arrays = make_arrays()
    for kernel in (range(FAST), range(FAST, 2 * FAST), range(FAST, 2 * FAST)):
        assert in_force(*arrays) is None
        assert last_launch()["kernel"] in kernel
    assert control[fakes.LAUNCHES] == 3


@needs_vectorcall
def test_malformed_calls_raise_pythons_own_errors(in_force):
    in_force(*make_arrays())
    for positional, keywords in malformed(make_arrays()):
        error = outcome(in_force, positional, keywords)
        assert error == outcome(python_road, positional, keywords)
        assert error[0] is TypeError


@needs_vectorcall
def test_refused_calls_raise_the_python_roads_errors(in_force):
    rng, errors = random.Random(9), 0
    for _ in range(1000):
        if len(dispatch._plans) > 200:
            fakes.forget_plans()
        call = Call(rng)
        in_force(*call.build(), **call.options)
        rng.choice(MUTATIONS)(call)
        arguments = call.build()
        error = outcome(in_force, arguments, call.options)
        assert error == outcome(python_road, arguments, call.options)
        errors += error is not None
    assert errors > 300


@needs_vectorcall
def test_a_failed_launch_reports_the_drivers_error(in_force):
    in_force(*make_arrays())
    control[fakes.LAUNCH_STATUS] = 700
    with pytest.raises(RuntimeError, match="launching the store failed: status 700"):
        in_force(*make_arrays())


@needs_vectorcall
def test_a_call_site_that_was_hot_before_takes_the_road(road, monkeypatch):
    """CPython specialises a hot call of a Python function; that must end when the vectorcall changes."""
    arrays = make_arrays()

    def hot(times):
        for _ in range(times):
            store_kvcache(*arrays)
            store_kvcache(arrays[0], arrays[1], arrays[2], arrays[3], arrays[4])
            store_kvcache(arrays[0], arrays[1], arrays[2], arrays[3], indices=arrays[4])

    hot(1000)
    assert last_launch()["kernel"] < FAST
    fast_road._install(native.STORE, store_kvcache, road.address)
    try:
        python_launches = []
        monkeypatch.setattr(dispatch, "launch", lambda *arguments: python_launches.append(arguments))
        hot(100)
        assert python_launches == []
        assert last_launch()["kernel"] >= FAST
    finally:
        ctypes.pythonapi.PyFunction_SetVectorcall(store_kvcache, int(fast_road._state[PYTHON_ROAD // 8]))
        monkeypatch.undo()
    store_kvcache(*arrays)
    assert last_launch()["kernel"] < FAST


def vectorcall_of(function):
    find = ctypes.pythonapi.PyVectorcall_Function
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.py_object]
    return find(function)


@needs_vectorcall
def test_store_cache_in_force(drop_in, monkeypatch):
    """Its module may be imported before the road is built, or after."""
    road, function = drop_in
    monkeypatch.setattr(fast_road, "_functions", {})
    monkeypatch.setattr(fast_road, "_entry", 0)
    cpythons = vectorcall_of(function)
    fast_road.attach(native.STORE_CACHE, function)
    assert vectorcall_of(function) == cpythons
    assert fast_road._functions == {native.STORE_CACHE: function}
    monkeypatch.setattr(fast_road, "_entry", road.address)
    fast_road.attach(native.STORE_CACHE, function)
    assert vectorcall_of(function) == road.address
    fast_road.attach(native.STORE_CACHE, function)  # again, which changes nothing
    arrays = make_arrays()
    for kernels in (range(FAST), range(FAST, 2 * FAST)):
        function(*arrays, row_bytes=256, size_limit=64)
        assert last_launch()["kernel"] in kernels
    with pytest.raises(ValueError, match=r"^row_bytes must be the bytes of a row of k, 256, or 0, got 128"):
        function(*arrays, row_bytes=128)
    python = fakes.store_cache()
    for positional, keywords in [*malformed(arrays), ((*arrays, 256), {}), (arrays, {"stream": 0})]:
        error = outcome(function, positional, keywords)
        assert error == outcome(python, positional, keywords)
        assert error[0] is TypeError
    assert control[fakes.LAUNCHES] == 2
    reloaded = fakes.store_cache()
    fast_road.attach(native.STORE_CACHE, reloaded)
    assert (vectorcall_of(function), vectorcall_of(reloaded)) == (cpythons, road.address)


@faked
def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(road, monkeypatch):
    monkeypatch.setattr(fast_road, "_lock", threading.RLock())  # given back afterwards
    held, done = threading.Event(), threading.Event()

    def hold(lock):
        with lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold, args=(fast_road._lock,))
    thread.start()
    try:
        assert held.wait(60)
        fast_road._forget_plans()  # what runs in the child
        assert fast_road._lock.acquire(blocking=False)
    finally:
        done.set()
        thread.join()


@needs_vectorcall
def test_it_is_still_the_python_function(in_force):
    assert [*inspect.signature(in_force).parameters] == [name for name in native.PARAMETERS[native.STORE] if name]
    assert inspect.isfunction(in_force)
    assert "Write row i of `k` and `v`" in pydoc.render_doc(in_force)
    assert pickle.loads(pickle.dumps(in_force)) is in_force
    assert in_force.__name__ == "store_kvcache"
    assert in_force.__module__ == "numba_kvcache.dispatch"


@needs_vectorcall
def test_every_way_to_call_a_function(in_force):
    arrays = make_arrays()
    k, v, k_cache, v_cache, indices = arrays
    in_force(*arrays)  # learns
    named = dict(zip(REQUIRED, arrays, strict=True))
    calls = (
        functools.partial(in_force, k, v, size_limit=9),
        functools.partial(in_force, k, v),
        functools.partial(types.MethodType(in_force, k), v),
        lambda *rest: in_force(k, v, *rest),
        lambda *rest: in_force(**named),
        lambda *rest: list(map(in_force, [k], [v], *[[a] for a in rest])),
        lambda *rest: in_force.__call__(k, v, *rest),
        lambda *rest: type("Holder", (), {"store": staticmethod(in_force)})().store(k, v, *rest),
    )
    for call in calls:
        control[fakes.LAUNCHES], records_before = 0, fakes.records.copy()
        fakes.records[:] = 0
        call(k_cache, v_cache, indices)
        assert control[fakes.LAUNCHES] == 1
        assert last_launch()["kernel"] >= FAST
        assert last_launch()["parameters"][:11] == records_before[8:19].tolist()


# ----------------------------------------------------------------------------------------------------------------------
# When it is in force, and when not


@pytest.fixture
def not_built(monkeypatch, compiled):
    """The module as it is before anything has been built, with the true `start`."""
    fakes.reset()
    monkeypatch.setattr(fast_road, "start", fakes.real_start)
    for name, value in {"_builder": None, "_status": fast_road._status, "_entry": 0}.items():
        monkeypatch.setattr(fast_road, name, value)
    monkeypatch.delenv("NUMBA_KVCACHE_NATIVE", raising=False)
    settings._switches.cache_clear()
    yield monkeypatch
    settings._switches.cache_clear()
    fakes.reset()


def check_python_road_serves():
    for _ in range(3):
        store_kvcache(*make_arrays())
        fast_road.wait()
        assert last_launch()["kernel"] < FAST
    assert control[fakes.LAUNCHES] == 3


def replace_sys(patch, **values):
    patch.setattr(
        fast_road,
        "sys",
        types.SimpleNamespace(
            **{
                "implementation": sys.implementation,
                "version_info": (3, 12, 0, "final", 0),
                "maxsize": sys.maxsize,
                "intern": sys.intern,
                "modules": sys.modules,
                **values,
            }
        ),
    )


def switch_off(patch):
    patch.setenv("NUMBA_KVCACHE_NATIVE", "0")


def on_the_simulator(patch):
    patch.setattr(settings, "SIMULATED", True)


def on_another_python(patch):
    replace_sys(patch, implementation=types.SimpleNamespace(name="pypy"))


def on_an_old_python(patch):
    replace_sys(patch, version_info=(3, 11, 9, "final", 0))


def on_32_bits(patch):
    replace_sys(patch, maxsize=2**31 - 1)


def without_the_gil(patch):
    replace_sys(patch)
    patch.setattr(fast_road, "sysconfig", types.SimpleNamespace(get_config_var=lambda name: name == "Py_GIL_DISABLED"))


def in_a_sub_interpreter(patch):
    replace_sys(patch)
    api = types.SimpleNamespace(PyInterpreterState_Main=lambda: 1, PyInterpreterState_Get=lambda: 2)
    patch.setattr(fast_road, "ctypes", types.SimpleNamespace(**{**vars(ctypes), "pythonapi": Api(api)}))


class Api:
    """ctypes.pythonapi, but for some functions."""

    def __init__(self, replaced):
        vars(self).update(vars(replaced))

    def __getattr__(self, name):
        return getattr(ctypes.pythonapi, name)


def with_a_failing_compiler(patch):
    replace_sys(patch)

    def fail():
        raise NotImplementedError("no such lowering")

    patch.setattr(fast_road, "compile_entry", fail)


@faked
@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        (switch_off, "NUMBA_KVCACHE_NATIVE is 0"),
        (on_the_simulator, "the simulator"),
        (on_another_python, "pypy has no vectorcall"),
        (on_an_old_python, "lacks PyFunction_SetVectorcall"),
        (on_32_bits, "a 64-bit Python"),
        (without_the_gil, "free-threaded"),
        (in_a_sub_interpreter, "sub-interpreters"),
        (with_a_failing_compiler, "NotImplementedError: no such lowering"),
    ],
)
def test_obstacles(not_built, obstacle, reason):
    obstacle(not_built)
    fast_road.wait()
    assert fast_road.status().startswith("off: ")
    assert reason in fast_road.status()
    check_python_road_serves()


@faked
def test_this_python(not_built):
    """The whole way: the first call builds, whoever waits finds the road in force, or hears why it cannot be."""
    arrays = make_arrays()
    store_kvcache(*arrays)
    assert last_launch()["kernel"] < FAST
    fast_road.wait()
    try:
        store_kvcache(*arrays)
        if sys.version_info >= (3, 12):
            assert fast_road.status() == "on"
            assert last_launch()["kernel"] >= FAST
        else:
            assert "new in 3.12" in fast_road.status()
            assert last_launch()["kernel"] < FAST
    finally:
        if fast_road.status() == "on":
            ctypes.pythonapi.PyFunction_SetVectorcall(store_kvcache, int(fast_road._state[PYTHON_ROAD // 8]))
