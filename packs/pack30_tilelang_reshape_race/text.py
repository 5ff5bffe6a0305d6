"""What is wrong with the text of a pipelined kernel of two operands that TMA loads, as TileLang writes it from 0.1.6 on."""

import re

#: The index of a barrier, which may have brackets of its own: mbarrier[((i & 1) + 2)].
BARRIER = r"mbarrier\[(.+?)\]"


def fault(source):
    """ "" where each stage has its buffer and its signal; "not understood" where this cannot be read.

    Only barriers and the addresses that are loaded to are read, not what is multiplied.
    """
    source = re.sub(
        r"\bi_\d+\b", "i", source
    )  # the same loop is numbered apart in the warps that load and in those that multiply
    signalled = set(re.findall(rf"{BARRIER}\.arrive", source)) | set(re.findall(rf"arrive\w*\({BARRIER}", source))
    if set(re.findall(rf"{BARRIER}\.wait", source)) - signalled:
        return "nobody gives the signal"
    loads = re.findall(rf"tma_load\S*\(\w+, {BARRIER}, \(&\(.*?\[(.*?)\]\)", source)
    own = [changes(to) for barrier, to in loads if changes(barrier)]
    return "" if own == [True, True] else "one buffer" if False in own else "not understood"


def changes(index):
    """Whether an index is another one in the next iteration."""
    return re.search(r"\bi\b", index) is not None
