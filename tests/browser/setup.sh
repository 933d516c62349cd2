#!/bin/sh
# A browser for tests/browser: the one that is there, else Debian's or Ubuntu's package.
set -eu
for name in chromium chromium-browser google-chrome google-chrome-stable; do
  if command -v "$name" >/dev/null; then exit 0; fi
done
as_root=
if [ "$(id -u)" -ne 0 ]; then as_root="sudo -n"; fi
if ! command -v apt-get >/dev/null; then
  echo "tests/browser needs Chromium; install it with this system's package manager" >&2
  exit 1
fi
echo "installing Chromium with apt-get: a minute, or some where the network is slow"
$as_root apt-get update -qq
DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
