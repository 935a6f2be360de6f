#!/bin/sh
# fuzz_layouts.sh: random arguments to the converters of layouts, here and on a big-endian machine; with MOE_TEST_LONG=1
# also a minute of libFuzzer under AddressSanitizer and UndefinedBehaviorSanitizer.
. "$(dirname "$0")/support/checks.sh"
source=$root/tests/fuzz_layouts.c
count=4000
[ -z "${MOE_TEST_QUICK-}" ] || count=500

driver() { # output, compiler and flags
  output=$1
  shift
  "$@" -DFUZZ_MAIN -I"$root" -I"$root/tests" "$source" -o "$output" -lm
}

fuzz() { # seconds
  clang-14 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I"$root" -I"$root/tests" "$source" \
    -o "$work/fuzzer" -lm && cd "$work" && "$work/fuzzer" -max_total_time="$1" -max_len=64 -timeout=20 -rss_limit_mb=2048
}

if check "random arguments: builds" driver "$work/native" gcc -O2; then
  check "random arguments" "$work/native" $count
fi
if have s390x-linux-gnu-gcc && have qemu-s390x; then
  if check "random arguments, s390x: builds" driver "$work/s390x" s390x-linux-gnu-gcc -O2 -static; then
    check "random arguments, s390x (big-endian)" qemu-s390x "$work/s390x" $((count / 8))
  fi
else
  skip "random arguments, s390x (no cross compiler or qemu)"
fi
if [ "${MOE_TEST_LONG-0}" != 1 ]; then
  skip "libFuzzer, 60 s (MOE_TEST_LONG=1 runs it)"
elif ! have clang-14; then
  skip "libFuzzer, 60 s (no clang-14)"
else
  check "libFuzzer, 60 s" fuzz 60
fi
finish
