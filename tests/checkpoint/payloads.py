"""Handmade files: pickles that would run code or lie about sizes, and unusual containers."""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
from collections.abc import Iterator
from typing import Any

PROTO = b"\x80\x02"


def op(value: Any) -> bytes:
    """The opcodes that push a plain value."""
    return pickle.dumps(value, 2)[2:-1]


def call(name: str, *args: Any) -> bytes:
    """The opcodes that call a global."""
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + op(args) + b"R"


def tensor(
    numel: Any, size: Any, stride: Any, offset: Any = 0, kind: str = "FloatStorage", key: str = "0"
) -> bytes:
    """The opcodes that build a tensor over record ``data/0``, which has 8 bytes."""
    storage = b"(" + op("storage") + f"ctorch\n{kind}\n".encode() + op(key) + op("cpu") + op(numel) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + op(offset)
        + op(size)
        + op(stride)
        + b"\x89"
        + hooks
        + b"tR"
    )


def archive(data: bytes, **records: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/data/0", b"\0" * 8)
        for name, record in records.items():
            file.writestr(f"archive/{name.replace('__', '/')}", record)
        file.writestr("archive/version", "3\n")
    return buffer.getvalue()


def legacy(data: bytes, keys: list[str] | None = None) -> bytes:
    """A file of torch before 1.6 around a pickle."""
    head = b"".join(pickle.dumps(one, 2) for one in (0x1950A86A20F9469CFC6C, 1001, {}))
    return head + data + pickle.dumps(keys or [], 2)


def in_each_part(value: bytes) -> Iterator[bytes]:
    """Pickles of a state with the value in the model, optimizer, scaler or metadata."""
    for part in ("model", "optimizer", "scaler", "meta"):
        others = {name: {"x": 1} for name in ("model", "optimizer", "scaler", "meta") if name != part}
        yield PROTO + op(others) + op(part) + b"}" + op("x") + value + b"s" + b"s."


CODE = {
    "system": call("os.system", "touch MARKER"),
    "mkdir": call("posix.mkdir", "MARKER"),
    "Popen": call("subprocess.Popen", ["touch", "MARKER"]),
    "eval": call("builtins.eval", "open('MARKER', 'w')"),
    "open": call("builtins.open", "MARKER", "w"),
    "importlib": call("importlib.import_module", "os"),
    "ctypes": call("ctypes.CDLL", "MARKER"),
    "nested pickle": call("pickle.loads", PROTO + call("os.system", "touch MARKER") + b"."),
    "nested torch.load": call("torch.load", "MARKER"),
    "torch extension": call("torch.ops.load_library", "MARKER"),
    "partial": call("functools.partial", "x"),
    "dotted name": call("torch.serialization.os.system", "touch MARKER"),
    "protocol 4 global": op("os") + op("system") + b"\x93" + op(("touch MARKER",)) + b"R",
    "instance": b"(" + op("touch MARKER") + b"ios\nsystem\n",
    "object": b"(cos\nsystem\n" + op("touch MARKER") + b"o",
    "new object": b"csubprocess\nPopen\n" + op((["touch", "MARKER"],)) + b"\x81",
    "build on a class": b"ctorch\nTensor\n" + op({"__init__": 1}) + b"b",
    "tensor of a foreign type": call(
        "torch._tensor._rebuild_from_type_v2", "os.system", "x", ("touch MARKER",), {}
    ),
    "parameter of a string": call("torch._utils._rebuild_parameter", "x", True, None),
    "two more elements": tensor(2, (4,), (1,)),
    "a negative stride": tensor(2, (2,), (-1,)),
    "an offset too far": tensor(2, (2,), (1,), 2**40),
    "4 GiB declared": tensor(2**30, (2**30,), (1,)),
    "a size that overflows": tensor(2, (2**62, 4), (1, 1)),
    "no such record": tensor(2, (2,), (1,), key="7"),
    "a record outside": tensor(2, (2,), (1,), key="../../../etc/passwd"),
    "an unknown persistent id": op(("path", "MARKER")) + b"Q",
    "stack underflow": b"a" * 50,
    "string of 4 GiB": b"X\xff\xff\xff\xff",
    "memo of nothing": b"h\x63",
}
"""Values that every loader must refuse."""

OTHER_TYPES = {
    "set": call("builtins.set", [1]),
    "counter": b"ccollections\nCounter\n" + op(({"a": 1},)) + b"R",
    "bytearray": call("builtins.bytearray", b"x"),
    "meta tensor": call("torch._utils._rebuild_meta_tensor_no_storage", "x", (2**40,), (1,), False),
    "itself": b"]q\x01h\x01a",
    "deep": b"]" * 50_000 + b"a" * 199_999,
    "tuple key": b"}" + op((1,)) + op(1) + b"s",
}
"""Values that torch reads as plain data, but ``save()`` does not write."""


def containers() -> dict[str, bytes]:
    """Files that are none of ``torch.save``, or strange ones."""
    system, harmless = PROTO + CODE["system"] + b".", PROTO + op({"x": 1}) + b"."
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as file:
        for name in ("pickle", "tensors", "storages"):
            entry = tarfile.TarInfo(name)
            entry.size = len(system)
            file.addfile(entry, io.BytesIO(system))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", harmless)
        file.writestr("archive/data/0", b"\0" * 1_000_000)
    return {
        "bare pickle": system,
        "before torch 1.6": legacy(system),
        "before torch 1.6, 4 GiB declared": legacy(PROTO + tensor(2**30, (2**30,), (1,)) + b".", ["0"])
        + bytes(16),
        "tar": tar.getvalue(),
        "TorchScript": archive(harmless, **{"constants.pkl": system}),
        "compressed": packed.getvalue(),
        "two pickles": archive(harmless, **{"DATA.PKL": system}),
        "bytes after": archive(harmless) + b"\0",
        "zip of something else": archive(harmless).replace(b"data.pkl", b"data.pkx"),
        "endless pickle": archive(PROTO + b"N" * 1000),
        "nothing": b"",
    }


def several(value: bytes, count: int) -> bytes:
    """The opcodes of a list of one value many times."""
    return b"](" + value * count + b"e"


def twins(levels: int) -> bytes:
    """The opcodes of ``levels`` nested tuples, each of the inner one twice: a walk meets 2**levels values."""
    return b")" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(levels))


def grown() -> dict[str, bytes]:
    """Values of a few bytes or megabytes for which a careless reader would need unbounded time or memory."""
    deep = b"N" + b"\x85" * 100_000
    many = b"(" + b"K\x01" * 100_000 + b"tq\x00"
    pairs = {n: b"\x8a\x0a" + (1 + n * (2**61 - 1)).to_bytes(10, "little") + b"N" for n in range(11_000)}
    return {
        "a deep tuple as a key": b"}" + deep + b"Ns",
        "a deep tuple as a value": deep,
        "a deep tuple in a set": b"c__builtin__\nset\n](" + deep + b"e\x85R",
        "a deep tuple as a persistent id": b"(" + deep + b"NNNNtQ",
        "twins as a key": b"}" + twins(100) + b"Ns",
        "a tensor of any size": b"ctorch\nTensor\n" + op(2**30) + b"\x85R",
        "a tensor without memory": call("torch._utils._rebuild_wrapper_subclass", 1, 2, 3, 4, 5, 6, 7),
        "a bytearray of any size": call("builtins.bytearray", 2**33),
        "a slow codec": b"c_codecs\nencode\n"
        + op("".join(map(chr, range(1000, 20000))))
        + op("punycode")
        + b"\x86R",
        "deep states": b"cx\ny\n)R" + b"cx\ny\n)R" * 20_000 + b"b" * 20_000,
        "one long tuple in many sizes": b"](%bctorch\nSize\nq\x01%be"
        % (many, several(b"h\x01h\x00\x85R", 20_000)),
        "a list that grows after its use": b"](]q\x00"
        + several(b"h\x00", 10)
        + b"h\x00("
        + b"N" * 10
        + b"ee",
        "integers whose hashes collide": b"}(" + b"".join(pairs.values()) + b"u",
        "tuples as keys": b"}(" + b"".join(op((n, n)) + b"N" for n in range(11_000)) + b"u",
        "a memo index of 2**62": b"Np%d\n" % 2**62,
        "a long integer": b"\x8b" + (100_000).to_bytes(4, "little") + b"\x11" * 100_000,
    }


def dense(count: int) -> dict[str, bytes]:
    """Values of about ``count`` bytes that need the most memory and time per byte, and are read."""
    shape = (
        b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n"
        + op((2**40,))
        + op((1,))
        + b"\x89tR"
    )
    return {
        "many empty dicts": several(b"}", count),
        "many keys": b"}(" + b"".join(b"M%bN" % (n % 65536).to_bytes(2) for n in range(count // 4)) + b"u",
        "many huge shapes": several(shape, count // 80),
        "many views of one number": several(tensor(2, (2**40,), (0,)), count // 160),
    }
