#!/usr/bin/env bash
# Run ci/smoke.sh and ci/test.sh as on a new machine: in a fresh Debian system, in a folder,
# with a clone of the last commit.
#
#   sudo bash ci/fresh.sh [SUITE] [COMMAND]
#
# SUITE is trixie (Debian 13, Python 3.13; the default), bookworm (Debian 12, Python 3.11), or
# another that Debian's mirror has. COMMAND runs in place of the two. The system stays in
# build/fresh/SUITE, to look at; delete it to start anew.
set -euo pipefail
cd "$(dirname "$0")/.."
suite="${1:-trixie}"
command="${2:-time bash ci/smoke.sh && du -sh .venv && time bash ci/test.sh && du -sh .venv}"
root="$PWD/build/fresh/$suite"
mirror=http://deb.debian.org/debian

refuse() {
  echo "ci/fresh.sh: $1" >&2
  exit 1
}
[ "$(uname)" = Linux ] || refuse "runs on Linux, found $(uname)."
[ "$(id -u)" = 0 ] || refuse "needs root, to make a system of its own. Run it with sudo."
command -v debootstrap >/dev/null ||
  refuse "needs debootstrap. On Debian and Ubuntu: sudo apt-get install debootstrap"
python3 -c "import urllib.request as u; u.urlopen('$mirror/dists/$suite/Release', timeout=30)" ||
  refuse "$mirror has no $suite, or can't be reached from here."

if [ ! -e "$root/ready" ]; then
  rm -rf "$root"
  mkdir -p "$root"
  script="/usr/share/debootstrap/scripts/$suite"
  [ -e "$script" ] || script="${script%/*}/sid" # for a suite that is newer than debootstrap
  debootstrap --variant=minbase --include=ca-certificates,git,python3,python3-venv \
    "$suite" "$root" "$mirror" "$script" >"$root.log" || refuse "failed: see $root.log"
  # What this machine trusts, such as a proxy's certificate
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  touch "$root/ready"
fi
cp /etc/hosts "$root/etc/" # with this machine's name
rm -rf "$root/root/clone"
git -c safe.directory=* clone --quiet --no-hardlinks . "$root/root/clone"

# The mounts are this process's own, and go when it ends.
export root command
exec unshare --mount --pid --fork bash -euo pipefail -c '
  mount --bind "$root" "$root" # so that its root is a mount, as `unshare --mount` needs
  cd "$root"
  mount --bind /sys "$root/sys"
  mount --rbind /dev "$root/dev"
  mount -t proc proc "$root/proc"
  mount -t tmpfs -o size=4g tmpfs "$root/dev/shm"
  exec env -i HOME=/root TERM="${TERM:-dumb}" LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    ${CI:+CI="$CI"} ${http_proxy:+http_proxy="$http_proxy"} \
    ${https_proxy:+https_proxy="$https_proxy"} \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
    chroot "$root" bash -c "cd /root/clone && $command"
'
