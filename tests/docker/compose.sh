#!/usr/bin/env bash
# Makes sure that there is a Docker Compose of version 2. Where none is, Debian's package is unpacked into build/compose:
# that of trixie, because bookworm has version 1 only; the program needs nothing of the release that it is made for.
# Nothing is installed. Prints the program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=$PWD/build/compose
program=$here/usr/libexec/docker/cli-plugins/docker-compose

for found in "$(command -v docker-compose || true)" /usr/{libexec,lib}/docker/cli-plugins/docker-compose "$program"; do
    if [ -x "$found" ] && "$found" version --short 2>/dev/null | grep -qE '^v?(2\.(2[4-9]|[3-9])|[3-9])'; then
        echo "$found"
        exit 0
    fi
done
if ! command -v apt-get >/dev/null; then
    echo "compose.sh: install Docker Compose 2.24 or newer; this is no Debian." >&2
    exit 1
fi
echo "unpacking Docker Compose (Debian's package) into $here" >&2
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Component: main' | head -n 1)
rm -rf "$here.part"
mkdir -p "$here.part/lists/partial" "$here.part/cache/archives/partial"
cd "$here.part"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >sources.list
options=(-qq -o "APT::Sandbox::User=$(id -un)" -o "Dir::Etc::sourcelist=$PWD/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::lists=$PWD/lists" -o "Dir::Cache=$PWD/cache")
apt-get "${options[@]}" update >&2
apt-get "${options[@]}" download docker-compose >&2
dpkg-deb --extract docker-compose_*.deb root
rm -rf "$here"
mv root "$here"
rm -rf "$here.part"
echo "$program"
