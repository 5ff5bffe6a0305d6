"""pack30's reading of a kernel's text, on texts made up here."""

import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "packs/pack30_tilelang_reshape_race"))
from text import fault

WAITS = "mbarrier[((i & 1) + 2)].wait(1);\nmbarrier[(i_2 & 1)].wait(0);\nmbarrier[((i_2 & 1) + 2)].arrive();\n"
SIGNAL = "mbarrier[(i & 1)].arrive_and_expect_tx(8192);\n"


def load(name, to, barrier="(i & 1)", call="tl::tma_load"):
    return f"{call}({name}_desc, mbarrier[{barrier}], (&(((bfloat16_t*){name.lower()})[{to}])), 0, (i * 64));\n"


OWN, SAME = "((i & 1) * 4096)", "0"


@pytest.mark.parametrize(
    "text, found",
    [
        (WAITS + SIGNAL + load("Q", OWN) + load("K", OWN), ""),
        (WAITS + SIGNAL + load("Q", SAME) + load("K", OWN), "one buffer"),
        (WAITS + SIGNAL + load("Q", OWN) + load("K", SAME), "one buffer"),
        (WAITS + SIGNAL + load("Q", SAME, call="tl::tma_load<1>") + load("K", OWN), "one buffer"),
        (
            WAITS.replace("& 1", "% 2")
            + SIGNAL.replace("& 1", "% 2")
            + load("Q", SAME, "(i % 2)")
            + load("K", SAME, "(i % 2)"),
            "one buffer",
        ),
        (WAITS + load("Q", OWN) + load("K", OWN), "nobody gives the signal"),
        (WAITS + "tl::mbarrier_cp_async_arrive_noinc(mbarrier[(i & 1)]);\n" + load("Q", OWN) + load("K", OWN), ""),
        (WAITS + SIGNAL + load("Q", OWN), "not understood"),
        (WAITS + SIGNAL, "not understood"),
        ("", "not understood"),
    ],
)
def test_a_text_is_read(text, found):
    assert fault(text) == found
