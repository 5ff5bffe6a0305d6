"""Lane ``fake-cuda``: the release's own Python on fake CUDA tensors, which have a shape and no values. Evidence: ``source``.

What it replaces:

* ``torch.cuda.is_available`` and what asks for a device, by answers of one GPU; ``torch.cuda.Stream`` and ``CUDAGraph`` do nothing, and
  ``torch.cuda.synchronize`` nothing but while a graph is captured;
* ``torch.cuda.stream``: inside, CUDA tensors are fake ones of `torch._subclasses.fake_tensor.FakeTensorMode`, and a question for a value
  is answered with True, or with `NUMBER`;
* ``torch.cuda.graph``: likewise, and at its end each operation that would have waited for the GPU is an error, as it is while a real
  stream is captured: file, line and code of each, of the package under test;
* ``torch.distributed.init_process_group("nccl")``: the group is one of torch's fake backend, whose collectives send nothing.

Branches that only other answers reach are not run, and no value is computed: what a graph gives is not known here. The device has to be called "cuda:0": ``.to("cuda")`` does nothing in a CPU build of torch.
"""

import ctypes
import traceback
from pathlib import Path
from typing import Any

NUMBER = 48


def prepare() -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    if not torch.version.cuda:
        # Indexing asks for a device guard, which only a CUDA build registers: the CPU's, which does nothing, stands in for it.
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
        registry = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
        registry[1] = registry[0]
    mode = FakeTensorMode()
    capturing: list[Any] = []
    really = torch.cuda.is_available

    class Waits(TorchDispatchMode):  # type: ignore[misc]
        """Notes what would wait for the GPU, and answers in its place."""

        def __init__(self, kept: bool) -> None:
            super().__init__()
            self.kept, self.found = kept, list[str]()

        def note(self, what: str) -> None:
            here = Path(torch.__file__).parent
            frames = [f for f in traceback.extract_stack() if here not in Path(f.filename).parents and f.filename != __file__]
            self.found.append(f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {what}: {frames[-1].line}")

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name, places = op.overloadpacket, [a.device.type for a in args if isinstance(a, torch.Tensor)]
            if "cuda" in places:
                if name is aten._local_scalar_dense:
                    self.note(".item()")
                    return args[0].dtype == torch.bool or NUMBER
                if name is aten.equal:
                    self.note("torch.equal")
                    return True
                if name is aten.nonzero:
                    self.note("boolean index")
                    return args[0].new_zeros((args[0].numel(), args[0].dim()), dtype=torch.int64)
                if name in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
                    kinds = [i for i in args[1] if i is not None]
                    if any(i.dtype in (torch.bool, torch.uint8) for i in kinds):
                        number = name is not aten.index and args[2].numel() == 1 and args[2].device.type == "cpu"
                        if number and len(kinds) == 1 and not (args[3] if len(args) > 3 else kwargs.get("accumulate")):
                            return args[0]  # ATen's masked_fill_ takes x[mask] = 0, and waits for nothing
                        self.note("boolean index")
                        return args[0].clone() if name is aten.index else args[0]
                    if any(i.device.type == "cpu" for i in kinds):
                        self.note("index on the CPU")
                if name in (aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive):
                    self.note(str(name))
                    return args[0].flatten()
                if op is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
                    self.note("repeat_interleave without output_size")
                    return args[0].new_zeros(NUMBER)
            if name is aten._to_copy and kwargs.get("device"):
                places.append(torch.device(kwargs["device"]).type)
            # Without waiting only pinned memory is copied, which torch refuses to leave out while a stream is captured.
            flag = kwargs.get("non_blocking") or (name is aten.copy_ and len(args) > 2 and args[2])
            pinned = flag and all(a.is_pinned() for a in args[:2] if isinstance(a, torch.Tensor) and a.device.type == "cpu")
            if name in (aten._to_copy, aten.copy_) and set(places) == {"cpu", "cuda"} and not (pinned and places[-1] != "cpu"):
                self.note("copy between CPU and GPU")
            return op(*args, **kwargs)

        def __enter__(self) -> Any:
            capturing.extend([self] * self.kept)
            torch.cuda.is_available = really  # which the mode asks: told of a GPU, it has CUDA make its tensors
            mode.__enter__()
            return super().__enter__()

        def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
            super().__exit__(kind, error, trace)
            mode.__exit__(kind, error, trace)
            torch.cuda.is_available = lambda: True
            if self.kept:
                capturing.pop()
                if self.found and error is None:
                    raise RuntimeError(
                        "operation not permitted when stream is capturing: " + "; ".join(dict.fromkeys(self.found))
                    )

    class Nothing:
        def __init__(self, *given: object, **named: object) -> None:
            pass

    group = torch.distributed.init_process_group
    fake = {"backend": "fake", "store": FakeStore()}
    torch.distributed.init_process_group = lambda backend, **given: group(
        **{"backend": backend, **given, **(fake if backend == "nccl" else {})}
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda *given: "fake"
    torch.cuda.get_device_capability = lambda *given: (9, 0)
    torch.cuda.synchronize = lambda *given: capturing[-1].note("torch.cuda.synchronize") if capturing else None
    torch.cuda.is_current_stream_capturing = lambda: bool(capturing)
    torch.cuda.Stream = torch.cuda.CUDAGraph = Nothing
    torch.cuda.stream = lambda stream: Waits(kept=False)
    torch.cuda.graph = lambda graph, stream=None: Waits(kept=True)
