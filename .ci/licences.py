"""The licence of every package that llm-dissect stands on, run and developed (`make audit`): one line each. The exit
code is 1 when one has a licence that is not allowed here, or names none.

Read from the metadata of what is installed, from llm-dissect along its requirements, so that nothing else that lies in
the environment counts.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT, EXTRAS = "llm-dissect", frozenset(("dev",))
# Anybody may use, change and pass on what is under these; MPL asks for its own files alone.
ALLOWED = re.compile(r"\b(MIT|0?BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla Public|Zlib|CC0)\b")
# Tests may import this too: it asks for its own files alone as well, and nothing that only tests use is passed on.
IN_TESTS = re.compile(r"\bLGPL|Lesser General Public")


def installed(name: str, extras: frozenset[str], found: dict[str, Distribution]) -> None:
    """Adds a package and what it requires here."""
    try:
        package = distribution(name)
    except PackageNotFoundError:  # for another platform or Python
        return
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found and not extras:
        return
    found[key] = package
    for line in package.requires or ():
        needed = Requirement(line)
        environments = [{**default_environment(), "extra": extra} for extra in ("", *extras)]
        if needed.marker is None or any(map(needed.marker.evaluate, environments)):
            installed(needed.name, frozenset(needed.extras), found)


def licence(package: Distribution) -> str:
    """What its metadata says: an expression, else its classifiers, else its free text."""
    fields = package.metadata
    classifiers = [line.rpartition(" :: ")[2] for line in fields.get_all("Classifier") or () if "License ::" in line]
    free_text = (fields.get("License") or "").split("\n")[0]
    return fields.get("License-Expression") or ", ".join(classifiers) or free_text


def allowed(text: str, *, passed_on: bool) -> bool:
    """Whether one of the choices (`OR`) is allowed with all of its parts (`AND`)."""
    parts = (re.split(r"\bAND\b|,", choice) for choice in re.split(r"\bOR\b", text))
    return any(all(ALLOWED.search(part) or (not passed_on and IN_TESTS.search(part)) for part in of) for of in parts)


def main() -> int:
    stood_on: dict[str, Distribution] = {}
    installed(ROOT, frozenset(), stood_on)
    found: dict[str, Distribution] = {}
    installed(ROOT, EXTRAS, found)
    refused = []
    for name, package in sorted(found.items()):
        text = licence(package)
        print(f"{name}=={package.version}: {text or 'none named'}")
        if not allowed(text, passed_on=name in stood_on):
            refused.append(name)
    if refused:
        print(f"not allowed, or none named: {', '.join(refused)}; see .ci/licences.py.", file=sys.stderr)
    return bool(refused)


if __name__ == "__main__":
    sys.exit(main())
