"""pack30's reading of a kernel's text, on texts made up here."""

import ast
import re

import pytest
from helpers import ROOT

SCRIPT = ROOT / "packs/pack30_tilelang_reshape_race/repro.py"


def fault(text):
    """The script's own function, without what the script imports."""
    (function,) = (n for n in ast.parse(SCRIPT.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == "fault")

    def finish(verdict, reason):
        raise ValueError(reason)

    room = {"re": re, "finish": finish}
    exec(compile(ast.Module([function], []), str(SCRIPT), "exec"), room)
    return room["fault"](text)


WAITS = "mbarrier[((i & 1) + 2)].wait(1);\nmbarrier[(i_2 & 1)].wait(0);\nmbarrier[((i_2 & 1) + 2)].arrive();\n"
SIGNAL = "mbarrier[(i & 1)].arrive_and_expect_tx(8192);\n"


def load(name, to, barrier="(i & 1)", call="tl::tma_load"):
    return f"{call}({name}_desc, mbarrier[{barrier}], (&(((bfloat16_t*){name.lower()})[{to}])), 0, (i * 64));\n"


def read(q, k, call="tl::initialize_wgmma_descriptor<1, 1, 64>"):
    return "".join(f"{call}(desc_{n}, (&(((bfloat16_t*)q)[{at}])));\n" for n, at in (("a", q), ("b", k)))


OWN, SAME, ODD = "((i & 1) * 4096)", "0", "((i_2 & 1) * 4096)"
MOVED = "".join(f"tl::increase_descriptor_offset<int>(desc_{n}, ((i_2 & 1) * 8192));\n" for n in "ab")
START = WAITS + SIGNAL
RIGHT = load("Q", OWN) + load("K", OWN)


@pytest.mark.parametrize(
    "text, found",
    [
        (START + RIGHT + read(ODD, ODD), ""),
        (START + RIGHT + read(SAME, SAME) + MOVED, ""),
        (START + RIGHT + read(ODD, ODD, "tl::gemm_ss<64, 64, 64>"), ""),
        (START + RIGHT + read(SAME, ODD), "one buffer"),
        (START + RIGHT + read(SAME, SAME), "one buffer"),
        (START + load("Q", SAME) + load("K", OWN) + read(ODD, ODD), "one buffer"),
        (START + load("Q", "((i & 2) * 4096)") + load("K", OWN) + read(ODD, ODD), "one buffer"),
        (START + load("Q", OWN) + load("K", "((i & 1) * 0)") + read(ODD, ODD), "one buffer"),
        (START + load("Q", SAME, call="tl::tma_load<1>") + load("K", OWN) + read(ODD, ODD), "one buffer"),
        ((START + load("Q", SAME) + load("K", SAME) + read(ODD, ODD)).replace("& 1", "% 2"), "one buffer"),
        (WAITS + RIGHT + read(ODD, ODD), "nobody gives the signal"),
        (WAITS + "tl::mbarrier_cp_async_arrive_noinc(mbarrier[(i & 1)]);\n" + RIGHT + read(ODD, ODD), ""),
    ],
)
def test_a_text_is_read(text, found):
    assert fault(text) == found


@pytest.mark.parametrize("text", ["", START, START + load("Q", OWN), START + RIGHT, START + RIGHT + read(ODD, ODD) * 2])
def test_what_is_not_understood_is_said(text):
    with pytest.raises(ValueError, match="not understood"):
        fault(text)
