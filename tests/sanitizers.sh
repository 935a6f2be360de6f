#!/bin/sh
# sanitizers.sh: the whole suite with fewer iterations under AddressSanitizer and UndefinedBehaviorSanitizer, and the
# thread tests under ThreadSanitizer: no report.
. "$(dirname "$0")/support/checks.sh"
export MOE_TEST_QUICK=1
export ASAN_OPTIONS=handle_segv=0:detect_leaks=1:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1

silent() {
  "$@" >"$work/report" 2>&1
  code=$?
  cat "$work/report"
  [ $code -eq 0 ] && ! grep -q -e 'runtime error:' -e 'ERROR: .*Sanitizer' -e 'WARNING: .*Sanitizer' "$work/report"
}

# sanitize NAME FLAGS TEST...: a build of its own, then every test.
sanitize() {
  name=$1 flags=$2
  shift 2
  directory=$work/$name
  check "$name: builds" build_with "$directory" "$flags" "$@" || return 1
  for test in "$@"; do
    check "$name: $test" silent "$directory/tests/$test"
  done
}

build_with() { # directory, flags, tests
  directory=$1 flags=$2
  shift 2
  targets=
  for test in "$@"; do targets="$targets tests/$test"; done
  meson setup "$directory" "$root" -Db_lundef=false -Dexamples=disabled -Dbench=disabled \
    -Ddebug=false -Doptimization=1 -Dc_args="-g1 -fno-sanitize-recover=all" $flags &&
    ninja -C "$directory" $targets
}

tests=
for file in "$root"/tests/test_*.c; do tests="$tests $(basename "$file" .c)"; done
sanitize address,undefined "-Db_sanitize=address,undefined" $tests
sanitize thread "-Db_sanitize=thread" test_bits test_neuron
finish
