"""What pip-audit found, from its JSON (`make audit`): `vulnerabilities.py FILE EXIT_CODE`. The exit code is 1 for a
known vulnerability. pip-audit itself calls a package that its service does not know of, or not answer for, no finding:
here such packages are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(report: Path, code: str) -> int:
    text = report.read_text()
    if not text:
        print(f"NOT AUDITED: the vulnerability service did not answer (exit code {code} of pip-audit).")
        return 0
    packages = json.loads(text)["dependencies"]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    found = [(package, flaw) for package in packages for flaw in package.get("vulns", ())]
    for package, flaw in found:
        fixed = ", ".join(flaw["fix_versions"]) or "no version"
        print(f"{package['name']} {package['version']} has {flaw['id']}, mended in {fixed}.")
    if skipped:
        print(f"NOT AUDITED: {len(skipped)} of {len(packages)} packages, such as {', '.join(skipped[:3])}.")
    print(f"{len(found)} known vulnerabilities in the {len(packages) - len(skipped)} packages that were audited.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
