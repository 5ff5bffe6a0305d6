"""What the hunt found, written as a pack: a script that shows it beside the plainest case, which is right."""

from __future__ import annotations

import hashlib
import json
import pprint
import re
from pathlib import Path

from common.files import write_atomically
from common.packs import reportblock
from common.packs.pack import Pack
from common.run.hunt import Find

_SCRIPT = '''\
# /// script
# requires-python = ">=3.10"
# dependencies = {dependencies}
# ///
"""{package}: {title}.

Found by a hunt (seed {seed}) for what differs from a definition in fp64{where}. The trigger is the least case that was found; the control is the plainest
one. Exits with 10 (BUG_REPRODUCED), 0 (BUG_ABSENT) or 125 (neither).
"""

{adapter}

{case}

PLAIN = {plain}
FOUND = {{**PLAIN, {differs}}}


{main}

{report}
if __name__ == "__main__":
    main()
'''
_MAIN = """\
def main():
    function = release()
    for role, options in (("control", PLAIN), ("trigger", FOUND)):
        told = case(function, **options)
        if told["ok"] is None:
            print(f"The release does not take this case: {told['how']}.")
            finish("UNTESTABLE", "no-api")
        check(role, f"{'the plainest case' if options is PLAIN else 'the case that was found'}: {told['how'] or 'right'}", told["ok"])
    finish()
"""
_DYING = """\
def main():
    if "--case" in sys.argv:
        print(json.dumps(case(release(), **FOUND)))
        return
    told = case(release(), **PLAIN)
    check("control", f"the plainest case: {told['how'] or 'right'}", told["ok"])
    done = subprocess.run([*sys.orig_argv, "--case"], stdout=subprocess.PIPE, text=True)  # it may die
    last = (done.stdout.splitlines() or [""])[-1]
    told = json.loads(last) if done.returncode == 0 else {"ok": False, "how": f"dies with exit {done.returncode}"}
    check("trigger", f"the case that was found: {told['how'] or 'right'}", told["ok"] is not False)
    finish()
"""
_README = """\
# {name}: {title}

**{package} {version}: {title}, found by a hunt (seed {seed}){where}.**

## Trigger

{options}

The plainest case, which is right, has none of them.

## Fix

None is known.

## Scope claimed

* {package} {version}, the case above.

## Scope NOT claimed

* Other releases, sizes and machines; that the release promises what the definition does.
"""


def title(find: Find) -> str:
    how = find.how.partition(":")[0]
    words = ", ".join(f"{name} {value}" for name, value in find.differs.items()) or "the plainest case"
    return f"{how} with {words}".replace('"', "'")


def write(find: Find, pack: Pack, version: str, seed: int, folder: Path, number: int, file: Path | None = None) -> Path:
    """The folder of the new pack, below ``folder``. ``file`` is the wheel that was hunted, where it is not the index's."""
    assert pack.hunt is not None
    slug = re.sub(r"[^a-z0-9]+", "_", " ".join([pack.package, *find.differs]).lower()).strip("_")[:40].strip("_")
    place = folder / f"pack{number:02}_{slug}"
    own = pack.script.read_text(encoding="utf-8")
    header = re.search(r"^# dependencies = (\[.*\])$", own, re.MULTILINE)
    end = min(own.index(mark) for mark in ("# --- contract/1", "def main(") if mark in own)
    adapter = own[own.index('"""\n', own.index('"""') + 3) + 4 : end].strip()
    dies = find.how.startswith(("dies", "hangs"))
    for module in ("threading", *["subprocess"] * (not dies)):  # what the other script needs alone
        adapter = adapter.replace(f"import {module}\n", "")
    adapter = adapter.replace("handed(", "(")  # the contract's note of what was given, which the other script does not have
    case = (pack.folder / pack.hunt).read_text(encoding="utf-8").partition("# --- case ---\n")[2].strip()
    named = title(find)
    where = ""
    if file is not None:  # of which the release of that number is not to be accused
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        where = f", in {file.name} of sha256 {digest[:16]}, which was not compared with the index: run the release itself before you say anything of it"
    text = _SCRIPT.format(
        dependencies=re.sub(rf"{re.escape(pack.package)}==[^\"]+", f"{pack.package}=={version}", header[1] if header else "[]"),
        package=pack.package,
        title=named,
        seed=seed,
        where=where,
        adapter=adapter,
        case=case,
        plain=pprint.pformat(dict(find.plain), width=120, sort_dicts=False),
        differs=", ".join(f"{name!r}: {value!r}" for name, value in find.differs.items()),
        main=_DYING if dies else _MAIN,
        report=reportblock.TEXT,
    )
    toml = (pack.folder / "pack.toml").read_text(encoding="utf-8").partition("[expected]")[0]
    toml = re.sub(
        r"^(title|kind|matters|workaround|threads|fixed|validate|validate_lane|hunt|pinned) = .*\n",
        "",
        toml,
        flags=re.MULTILINE,
    ).rstrip()
    kind = "crash" if dies or find.how.startswith("raises") else "wrong-result"
    top = f'title = {json.dumps(named)}\nkind = "{kind}"\npinned = ["{version}"]\n'
    verdict = '{ verdict = "REPRODUCED", why = "found by a hunt" }'
    place.mkdir(parents=True, exist_ok=True)
    write_atomically(place / "repro.py", text)
    write_atomically(place / "pack.toml", f'{top}{toml}\n\n[expected]\n"=={version}" = {verdict}\n')
    options = "\n".join(f"* `{name}`: {json.dumps(value)}" for name, value in find.differs.items()) or "* nothing"
    words = {
        "name": place.name.partition("_")[0],
        "title": named,
        "package": pack.package,
        "version": version,
        "seed": seed,
        "where": where,
    }
    write_atomically(place / "README.md", _README.format(options=options, **words))
    return place
