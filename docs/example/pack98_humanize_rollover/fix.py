"""The number is rounded in the unit that was chosen; where that gives the base itself, the next unit is taken."""

from common.transforms import replace

FIX = {
    "humanize/filesize.py": (
        replace(
            "loop-goes-on",  # up to 4.12.3; up to 0.5 the format was always the same
            r"^ +unit = base ?\*\* ?(\(i ?\+ ?2\)|i)\n",
            lambda match: (
                match[0]
                + '        shown = format if isinstance(format, str) else "%.1f"\n'
                + "        if shown % (base * abs(float(value)) / unit) == shown % base:\n            continue\n"
            ),
            optional=True,
        ),
        replace(
            "next-exponent",  # from 4.13 on; log(1000**5 - 1, 1000) is 5.0
            r"^    exp = int\(min\(log\(abs_bytes, base\), len\(suffix\)\)\)\n",
            lambda match: (
                match[0]
                + "    exp -= abs_bytes < base**exp\n"
                + "    if exp < len(suffix) and format % (abs_bytes / base**exp) == format % base:\n        exp += 1\n"
            ),
            optional=True,
        ),
    )
}
