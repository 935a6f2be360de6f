#!/bin/sh
# fuzz.sh: random arguments to every converter and to layers of quantised weights, here and on a big-endian machine;
# with MOE_TEST_LONG=1 also a minute of libFuzzer under AddressSanitizer and UndefinedBehaviorSanitizer.
. "$(dirname "$0")/support/checks.sh"
count=12000
[ -z "${MOE_TEST_QUICK-}" ] || count=600

compile() { # output, compiler and flags
  output=$1
  shift
  "$@" -I"$root" -I"$root/tests" "$root/tests/fuzz/fuzz.c" "$root/tests/support/moe_impl.c" \
    "$root/tests/support/problem.c" "$root/tests/support/problem_ops.c" -o "$output" -lm
}

# The newest clang that brings libFuzzer, or nothing.
fuzzing_clang() {
  echo 'int LLVMFuzzerTestOneInput(const char *x, unsigned long n) { return x[0] && n > 9; }' >"$work/probe.c"
  for compiler in clang-19 clang-16 clang-14 clang; do
    have "$compiler" || continue
    "$compiler" -fsanitize=fuzzer,address,undefined "$work/probe.c" -o "$work/probe" >/dev/null 2>&1 || continue
    echo "$compiler"
    return
  done
}

# From the start inputs are as long as a layer's description.
fuzz() { # compiler, seconds
  compile "$work/fuzzer" "$1" -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all && cd "$work" &&
    "$work/fuzzer" -max_total_time="$2" -max_len=96 -len_control=0 -timeout=20 -rss_limit_mb=2048
}

if check "random arguments: builds" compile "$work/native" gcc -O2 -DFUZZ_MAIN; then
  check "random arguments" "$work/native" $count
fi
if have s390x-linux-gnu-gcc && have qemu-s390x; then
  if check "random arguments, s390x: builds" compile "$work/s390x" s390x-linux-gnu-gcc -O2 -DFUZZ_MAIN -static; then
    check "random arguments, s390x (big-endian)" qemu-s390x "$work/s390x" $((count / 8))
  fi
else
  skip "random arguments, s390x (no cross compiler or qemu)"
fi
if [ "${MOE_TEST_LONG-0}" != 1 ]; then
  skip "libFuzzer, 60 s (MOE_TEST_LONG=1 runs it)"
elif compiler=$(fuzzing_clang) && [ -z "$compiler" ]; then
  skip "libFuzzer, 60 s (no clang with libFuzzer)"
else
  check "libFuzzer, 60 s" fuzz "$compiler" 60
fi
finish
