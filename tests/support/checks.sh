# checks.sh, sourced: what the scripts in tests/ share. Every check prints one line, "ok - ...", "not ok - ..." or
# "skip - ...", the output of a failed one behind "#". Ends with the exit code in finish().

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/moe-tests.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
failures=0

# check DESCRIPTION COMMAND...
check() {
  description=$1
  shift
  if "$@" >"$work/check.log" 2>&1; then
    echo "ok - $description"
  else
    echo "not ok - $description"
    echo "# $*"
    tail -n 25 "$work/check.log" | sed 's/^/# /'
    failures=$((failures + 1))
    return 1
  fi
}

skip() { echo "skip - $1"; }

have() { command -v "$1" >/dev/null 2>&1; }

# The instruction sets of a tree, by their names.
isas() { # root
  sed -n '/define MOE_ISA_LIST/,/[^\\]$/s/^ *X(\([a-z0-9]*\),.*/\1/p' "$1/moe/api/context.h"
}

# gcc and every clang there is, one name per version.
compilers() {
  seen=
  for compiler in gcc clang clang-14 clang-16 clang-19; do
    have "$compiler" || continue
    version=$("$compiler" --version | head -n 1)
    case "$seen" in *"<$version>"*) continue ;; esac
    seen="$seen<$version>"
    echo "$compiler"
  done
}

# What the library is to be compiled with, and what is excused: clang 19 finds -Ofast old-fashioned, and what its own
# -march=native says of some CPUs inconsistent, whatever it compiles.
strict="-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror"
tolerate() {
  case $("$1" --version) in
  *clang*) echo "-Wno-unknown-warning-option -Wno-deprecated-ofast -Wno-invalid-feature-combination" ;;
  esac
}

has_openmp() { # compiler
  printf '#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n' >"$work/omp.c"
  "$1" -fopenmp "$work/omp.c" -o "$work/omp" >/dev/null 2>&1
}

# The C++ compiler that belongs to a C compiler.
cxx_of() {
  case $1 in
  gcc*) echo "g++${1#gcc}" ;;
  clang*) echo "clang++${1#clang}" ;;
  esac
}

# The names of all functions that moe.h declares.
declared() {
  printf '#include "moe.h"\n' | gcc -E -P -I"$root" -xc - | tr '\n' ' ' | tr ';' '\n' |
    sed -n 's/.*[ *]\(moe_[a-z0-9_]*\)(.*/\1/p' | grep -v '^moe_task$' | sort -u
}

finish() { [ "$failures" -eq 0 ]; }
