"""The deep check of pack01's fix: what eager code gives and refuses is what the release's own gives and refuses, and what zigzag order means.

Runs after repro.py on the patched side, on CPU tensors with values, on a GPU's besides where there is one; three ranks talk through gloo.
"""

import argparse
import ast
import contextlib
import datetime
import importlib
import inspect
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from others import others
from repro import DSA, FACTS, captured, check, finish, helpers, release
from torch.overrides import TorchFunctionMode

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--ranks", metavar="FILE", help=argparse.SUPPRESS)
REAL = bool(torch.version.cuda)
INF = float("inf")
#: cu_seqlens of 64 sequences, 131,072 rows in all, while a graph is captured and when it is replayed.
WIDE = ([*range(0, 126001, 2000), 131072], [0, *range(2064, 126065, 2000), 131072])
SIZES = (*itertools.product((2, 3, 8), (1, 3, 64)), (6, 5), (16, 130))


def as_released():
    """The release's own modules: what hides them on sys.path is left out for once."""
    file = FACTS["file"]
    overlay = file.split("/megatron/core/")[0]
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "megatron"}
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(overlay).resolve()]
    importlib.invalidate_caches()
    own = release()
    assert FACTS["file"] != file
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.path.insert(0, overlay)
    sys.modules.update(hidden)
    FACTS["file"] = file
    return own


def outcome(function, *args, **options):
    """What a call gives, as nested lists with dtypes, or what it raises."""
    try:
        found = function(*args, **options)
    except Exception as error:  # what it refuses is compared, too
        return type(error).__name__, str(error).splitlines()[:1]
    many = found if isinstance(found, tuple) else (found,)
    return [(str(t.dtype), t.tolist()) if isinstance(t, torch.Tensor) else t for t in many]


def lengths(cp, sequences):
    """cu_seqlens of sequences whose lengths are multiples of 2 * cp, some of them empty."""
    chosen = random.Random(cp * sequences)
    each = [2 * cp * chosen.choice((0, 1, 2, 17, 1500 if sequences < 10 else 3)) for _ in range(sequences - 1)] + [2 * cp]
    return [0, *itertools.accumulate(each)]


def zigzag(cu, cp, rank, rows):
    """Positions of a rank's rows by the definition: of each sequence one of 2 * cp chunks from the front and its mirror; then padding."""
    found = []
    for first, last in itertools.pairwise(cu):
        chunk = (last - first) // (2 * cp)
        found += [
            *range(first + rank * chunk, first + (rank + 1) * chunk),
            *range(last - (rank + 1) * chunk, last - rank * chunk),
        ]
    return found + [cu[-1] + rank * rows + i for i in range(rows - len(found))]


def packed(layout, device):
    """Name -> whether positions of packed rows and the order of gathered keys are right."""
    local = layout.build_packed_allgather_cp_local_positions
    order = layout.build_packed_allgather_cp_query_positions_and_key_reorder
    pads = "cu_seqlens_cover_output" in inspect.signature(local).parameters
    for cp, sequences in SIZES:
        cu = lengths(cp, sequences)
        tensor, full = torch.tensor(cu, dtype=torch.int32, device=device), cu[-1] // cp
        for more, rows in itertools.product((0, 6), (False, True) if pads else (None,)):
            size = full + more
            if (rows and more) or (rows is None and more):
                continue  # it says that there is no padding
            given = {} if rows is None else {"cu_seqlens_cover_output": rows}
            found = [local(tensor, cp, rank, tensor.device, output_size=size, **given).tolist() for rank in range(cp)]
            name = f"cp={cp}, {sequences} sequences, {cu[-1]} rows and {more * cp} of padding, covered={rows}"
            yield f"{name}: order", found == [zigzag(cu, cp, rank, size) for rank in range(cp)]
            mirrored = [cu[-1] - at for at in reversed(cu)]
            keys_cu = torch.tensor(mirrored, dtype=torch.int32, device=device)
            held = local(tensor, cp, 1, tensor.device, output_size=size, **given)
            others = [local(keys_cu, cp, rank, tensor.device, output_size=size, **given).tolist() for rank in range(cp)]
            yield f"{name}: what a call gave stays when others are made", held.tolist() == found[1]
            both = {f"{which}_{key}": value for which in ("query", "key") for key, value in given.items()}
            same = tensor.clone()  # whose memory gets other lengths
            local(same, cp, 0, same.device, output_size=size, **given)
            same.copy_(keys_cu)
            later = [local(same, cp, rank, same.device, output_size=size, **given).tolist() for rank in range(cp)]
            yield f"{name}: other lengths in the same memory", later == others
            _, keys = order(tensor, tensor, cp, 1, tensor.device, size, **both)
            gathered = torch.tensor([*itertools.chain(*found)], device=device)
            yield f"{name}: gathered keys are put in order", gathered[keys].tolist() == sorted(gathered.tolist())
            positions, keys = order(tensor, keys_cu, cp, 1, tensor.device, size, **both)
            gathered = torch.tensor([*itertools.chain(*others)], device=device)
            right = gathered[keys].tolist() == sorted(gathered.tolist())
            yield f"{name}: keys of other lengths than the queries", right and positions.tolist() == found[1]
    if pads:
        zeros, size = torch.zeros(4, dtype=torch.int32, device=device), 32
        for covered in (False, True):
            found = [local(zeros, 2, rank, zeros.device, output_size=size, cu_seqlens_cover_output=covered) for rank in (0, 1)]
            right = [zigzag([0, 0, 0, 0], 2, rank, size) for rank in (0, 1)]
            yield (
                f"cu_seqlens of zeros, covered={covered}: all rows are padding",
                [f.tolist() for f in found] == right,
            )
        found = [local(zeros[:1], 2, rank, zeros.device, output_size=size).tolist() for rank in (0, 1)]
        yield "cu_seqlens of one zero: all rows are padding", found == [zigzag([0], 2, rank, size) for rank in (0, 1)]


class OnCPU(TorchFunctionMode):
    """Tensors for a GPU are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        given = dict(kwargs or {})
        if getattr(given.get("device"), "type", "cpu") != "cpu":
            given["device"] = "cpu"
        return function(*args, **given)


class OnGPU(TorchFunctionMode):
    """Tensors say that they are on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function == torch.Tensor.is_cuda.__get__ or function(*args, **(kwargs or {}))


def cases(dsa, layout, masking, device, on_gpu=False):
    """(function, name of a case) -> what eager code gives or refuses."""
    on = lambda data, dtype=torch.int64: torch.tensor(data, dtype=dtype, device=device)  # noqa: E731
    local = layout.build_packed_allgather_cp_local_positions
    covers = (
        ({"cu_seqlens_cover_output": True}, {}) if "cu_seqlens_cover_output" in inspect.signature(local).parameters else ({},)
    )
    for cp, sequences in ((1, 3), *SIZES):
        cu = lengths(cp, sequences)
        for rank, cover in itertools.product((0, cp - 1), covers):
            yield local, f"cp={cp} rank={rank}, {sequences} sequences", outcome(local, on(cu), cp, rank, on(0).device, **cover)
        for function, args in (
            (masking.generate_varlen_mask_params, (on(cu),)),
            (masking.generate_varlen_mask_params_for_positions, (on(cu), on([0, 1, cu[-1] - 1]))),
        ):
            yield function, f"{cu[-1]} rows", outcome(function, *args)
    if device == "cpu" and not on_gpu:  # where the release does not look
        for cu in ([0, 3, 8], [0, 2, 4], [0, 6, 12]):
            yield local, f"cu_seqlens {cu}", outcome(local, on(cu), 2, 0, on(0).device)
    for cu in (
        [16, 32, 64],
        [0, 16, 32, 0, 0],
        [0, 2 * 33000, 2 * 33016],
    ):  # from the middle; a shorter list in a longer buffer
        for size in (None, (max(cu) - cu[0]) // 2):
            given = on(cu, torch.int32), 2, 1, on(0).device, size
            yield local, f"cu_seqlens {cu}, output_size {size}", outcome(local, *given)
    yield local, "no rows", outcome(local, on([0, 0, 0]), 2, 0, on(0).device)
    extract, up = layout.extract_query_positions_from_position_ids, torch.arange(8, device=device)
    ids = {
        "none": None,
        "flat": up,
        "one row": up[None],
        "same rows": torch.stack([up, up]),
        "other rows": torch.stack([up, up + 1]),
    }
    for name, given in {**ids, "three": up.view(2, 2, 2), "int32": up.int(), "too few": up[:4]}.items():
        yield extract, name, outcome(extract, given, 8, up.device)
    scatter = masking.scatter_topk_into_index_mask
    for rows, dtype, kind, size in itertools.product((8, 300), (torch.int64, torch.int32), ("some", "all", "none"), (4, 256)):
        torch.manual_seed(1)
        mask = torch.full((2, rows, 64), -INF, device=device)
        mask[:, :4, ::3] = -1.0  # an additive mask
        picked = torch.stack([torch.randperm(64, device=device)[:16] for _ in range(2 * rows)]).view(2, rows, 16)
        picked[..., :: {"some": 3, "all": 1, "none": 99}[kind]] = -1
        picked[..., 0] = -1 if kind == "all" else 5
        said = outcome(scatter, mask, picked.to(dtype), seq_chunk_size=size)
        yield scatter, f"{rows} rows of {dtype}, -1 in {kind}, chunks of {size}", [said, mask.tolist()]
    bounds, none = (
        masking.build_fused_indexer_varlen_bounds,
        dict.fromkeys(("mask", "varlen_starts", "varlen_ends", "key_positions")),
    )
    causal = torch.zeros(8, 8, device=device).masked_fill(up[None] > up[:, None], -INF)
    holes = causal.clone()
    holes[5, 2] = -INF
    for name, given in {
        "causal": {},
        "mask": {"mask": causal},
        "masks": {"mask": torch.stack([causal, causal])},
        "other masks": {"mask": torch.stack([causal, holes])},
        "holes": {"mask": holes},
        "a finite bias": {"mask": causal - 1},
        "bounds": {"varlen_starts": 0 * up, "varlen_ends": up + 1},
        "no ends": {"varlen_starts": 0 * up},
        "mask and bounds": {"mask": causal, "varlen_starts": 0 * up, "varlen_ends": up},
        "keys": {"varlen_starts": 0 * up, "varlen_ends": up + 1, "key_positions": up},
        "other keys": {"varlen_starts": 0 * up, "varlen_ends": up + 1, "key_positions": up.flip(0)},
    }.items():
        yield bounds, name, outcome(bounds, sq=8, skv=8, device=up.device, **{**none, **given})
    if hasattr(dsa, "_validate_nonpacked_cp_uniform_length"):
        uniform, group = dsa._validate_nonpacked_cp_uniform_length, torch.distributed.group.WORLD
        for skv, cp in ((8, 1), (16, 1), (7, 2), (16, 2), (8, 2)):
            yield uniform, f"keys {skv}, cp={cp}", outcome(uniform, 8, skv, cp, group, torch.device(device))


def changed(modules, originals, compared):
    """Of the three modules what is not the release's, but for functions that are compared; and other files that are not."""
    for both in zip(modules, originals, strict=True):
        bodies = [ast.parse(Path(module.__file__).read_text()).body for module in both]
        known = {getattr(part, "name", "") for part in bodies[1]}
        bodies[0] = [
            part for part in bodies[0] if not isinstance(part, ast.FunctionDef) or part.name in known
        ]  # new ones may be
        ours, theirs = ([ast.dump(part) for part in body if getattr(part, "name", None) not in compared] for body in bodies)
        if ours != theirs:
            yield Path(both[0].__file__).name
    own, released = (Path(each[0].__file__.split("/core/")[0]) for each in (modules, originals))
    known = {Path(module.__file__) for module in modules}
    for file in released.rglob("*.py"):
        same = own / file.relative_to(released)
        if same not in known and (not same.is_file() or same.read_bytes() != file.read_bytes()):
            yield str(file.relative_to(released))


def wide(dsa, layout, masking):
    """Name -> a call, and WIDE's cu_seqlens: 131,072 rows of 64 sequences, on the last of 8 ranks."""
    order = layout.build_packed_allgather_cp_query_positions_and_key_reorder

    def scattered(cu):
        mask, picked = torch.full((1, 512, WIDE[0][-1]), -INF, device=cu.device), torch.arange(2048, device=cu.device)
        masking.scatter_topk_into_index_mask(mask, torch.where(picked < 9, -1, picked).int().expand(1, 512, 2048))
        return mask

    return {
        "64 sequences of 131,072 rows, cp=8: positions and keys": (
            lambda cu: torch.cat(order(cu, cu, 8, 7, cu.device, WIDE[0][-1] // 8)),
            WIDE,
        ),
        "131,072 position ids": (
            lambda cu: layout.extract_query_positions_from_position_ids(
                torch.arange(WIDE[0][-1], device=cu.device).expand(2, -1), WIDE[0][-1], cu.device
            ),
            WIDE,
        ),
        "top 2048 of 131,072 keys for 512 queries": (scattered, WIDE),
    }


def asked(capturing, nothing=False):
    """torch.cuda.is_current_stream_capturing() says so; with ``nothing`` it raises, as in a build of torch for CPUs."""
    said = {"side_effect": RuntimeError("Tried to instantiate dummy base class")} if nothing else {"return_value": capturing}
    return mock.patch.object(torch.cuda, "is_current_stream_capturing", **said)


def of_ranks(file):
    """What each of three ranks is told of equal and of unequal lengths, on the CPU, as if on a GPU, as if while a graph is captured, and after that."""
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    dsa, group, rank = importlib.import_module(f"{DSA}.dsa"), torch.distributed.group.WORLD, torch.distributed.get_rank()
    uniform, told = dsa._validate_nonpacked_cp_uniform_length, {}
    for way in ("cpu", "cuda", "capture", "after a capture"):
        device = torch.device("cpu" if way == "cpu" else "cuda")
        with asked(way == "capture", way == "cpu"), OnCPU():
            later = 8 + 2 * (1 - rank)  # lengths that have the sum, and on one rank the length, of those that were equal
            for name, sq, skv in (
                ("equal", 8, 24),
                ("later", later, 24),
                ("unequal", 6 + 2 * (rank == 2), 18),
                ("keys", 8, 23),
            ):
                told[f"{way}, {name}"] = str(outcome(uniform, sq, skv, 3, group, device))
    Path(f"{file}.{rank}").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()  # whose thread may otherwise end after what it uses, which aborts the process


def three_ranks():
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--no-python"]
        words = [sys.executable, *sys.orig_argv[1:], "--ranks", f"{folder}/found"]
        done = subprocess.run([*run, *words], capture_output=True, text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})
        if done.returncode:
            print(done.stderr[-4000:], file=sys.stderr)
            return []
        return [json.loads(Path(folder, f"found.{rank}").read_text()) for rank in range(3)]


def main():
    modules = release()
    originals = as_released()
    dsa = modules[0]
    check("control", "the release's modules are others", modules[1].__file__ != originals[1].__file__)
    tested = set()
    ways = ("cpu", ""), ("cpu", "on a GPU"), ("cpu", "a graph were captured"), ("cpu", "a graph were captured on a GPU")
    for device, way in (*ways, *[("cuda:0", "")] * REAL):
        worst, count = {}, {}
        on_gpu, capturing = "on a GPU" in way, "captured" in way
        said = OnGPU() if on_gpu else contextlib.nullcontext()
        with said, asked(capturing, not way and device == "cpu"):
            found = list(cases(*modules, device, on_gpu))
        with said:
            right = list(cases(*originals, device, on_gpu))
        for ours, theirs in zip(found, right, strict=True):
            name = ours[0].__name__
            tested.add(name)
            if on_gpu and capturing and (isinstance(theirs[2], tuple) or name == "build_fused_indexer_varlen_bounds"):
                continue  # where values are looked at, they may not be while a graph is captured
            count[name] = count.get(name, 0) + 1
            if ours[1:] != theirs[1:]:
                worst.setdefault(name, ours[1])
        for name, number in count.items():
            said = f", but for {worst[name]}" if name in worst else ""
            where = f"{device}{', as if ' * bool(way)}{way}"
            check("trigger", f"{name}, {number} cases, {where}: as the release's{said}", name not in worst)
        if way:
            continue
        right = list(packed(modules[1], device))
        wrong = [name for name, good in right if not good]
        said = f"wrong: {wrong[0]}" if wrong else "right"
        check("trigger", f"packed rows by the definition of zigzag order, {len(right)} cases, {device}: {said}", not wrong)
    other = sorted(set(changed(modules, originals, tested)))
    check("trigger", f"nothing is changed but functions that are compared: {other or 'nothing'}", not other)
    if hasattr(dsa, "_validate_nonpacked_cp_uniform_length"):
        ran = three_ranks()
        check("trigger", "three ranks ran to the end", len(ran) == 3)
        for rank, told in enumerate(ran):
            for way, said in told.items():
                where, _, what = way.partition(", ")
                lengths = {"later": "[10, 8, 6]", "unequal": "[6, 6, 8]", "keys": "key length 23"}
                right = said == "[None]" if what == "equal" else lengths[what] in said
                if where == "capture" and what in ("later", "unequal"):
                    continue  # what the others have is not looked at
                check("trigger", f"rank {rank} of 3, {way} lengths: {said[:90]}", right)
    for made in (helpers, others, wide):
        released = made(*originals)
        for name, (call, lengths) in made(*modules).items():
            said = captured(call, lengths, released[name][0])
            check(
                "trigger",
                f"{name}: {said or 'captured, and replayed as the release does it eagerly' if REAL else 'captured'}",
                said is None,
            )
    finish()


if __name__ == "__main__":
    options = parser.parse_args()
    if options.ranks:
        of_ranks(options.ranks)
    else:
        main()
