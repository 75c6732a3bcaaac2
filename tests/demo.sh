#!/usr/bin/env bash
# `make demo`: train the demo model and compare its answers, in a temporary home. Argument: folder of warmd.
set -euo pipefail
export PATH="$1:$PATH"
WARMD_HOME=$(mktemp -d "${TMPDIR:-/tmp}/warmd-demo.XXXXXX")
export WARMD_HOME

finish() {
    warmd stop --now >/dev/null 2>&1 || true
    rm -rf "$WARMD_HOME"
}
trap finish EXIT

show() {
    printf '\n$ %s\n' "$*"
    "$@"
}

show warmd start
show warmd submit grpo --samples 80 --eval-samples 200 --wait
show warmd jobs
show warmd result
show warmd compare - "17+58=" "36+47=" "25+68="
show warmd stop
