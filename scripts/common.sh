# Shared by the scripts, which source it first. It leaves the shell in the root of the source tree.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() { printf '==> %s\n' "$*"; }

fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Prints the comment at the head of the script.
help() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "scripts/$(basename "$0")"; }

# quietly WHAT command...: runs the command with its output in a log, of which it shows the end when the command fails.
quietly() {
  local what=$1 log
  shift
  step "$what"
  log=$(mktemp)
  if ! "$@" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    rm -f "$log"
    fail "failed: $what"
  fi
  rm -f "$log"
}

# How many compilers may run at once: one a core, and 1.5 GB of memory for each.
jobs_for_machine() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable/ { print int($2 / 1500000) }' /proc/meminfo)
  [ "$memory" -ge 1 ] || memory=1
  echo $((cores < memory ? cores : memory))
}

# build_preset PRESET [target...]
build_preset() {
  local preset=$1
  shift
  quietly "configure build/$preset" cmake --preset "$preset"
  step "build build/$preset"
  cmake --build --preset "$preset" --parallel "$(jobs_for_machine)" ${1:+--target "$@"}
}
