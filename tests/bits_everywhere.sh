#!/bin/sh
# bits_everywhere.sh: the library compiles without warnings, and the hashes of bits_hash are the same, with every
# compiler, optimisation level, instruction set, thread count and machine; and tests hold under -Ofast.
. "$(dirname "$0")/support/checks.sh"

support=$root/tests/support
problem="$support/problem.c $support/problem_ops.c"
sources="$root/tests/bits_hash.c $problem $support/moe_impl.c"
export OMP_WAIT_POLICY=passive # other tests run meanwhile
first=$work/first first_large=$work/first_large

# build OUTPUT COMPILER FLAGS...
build() {
  output=$1
  shift
  "$@" -I"$root" -I"$root/tests" $sources -o "$output" -lm
}

# The same in two steps, the first under warnings: the library, and what uses it.
build_library() { # compiler, flags
  "$1" $2 $(tolerate "$1") $strict -I"$root" -c "$support/moe_impl.c" -o "$work/library.o"
}
build_hash() { # compiler, flags
  "$1" $2 -I"$root" -I"$root/tests" "$root/tests/bits_hash.c" $problem "$work/library.o" -o "$work/program" -lm
}

# same REFERENCE COMMAND...: runs the command and compares; the first to succeed makes the reference.
same() {
  reference=$1
  shift
  "$@" >"$work/hashes" || return 1
  [ "$(wc -l <"$work/hashes")" -gt 30 ] || { echo "too few hashes" && return 1; }
  if [ -f "$reference" ]; then
    diff "$reference" "$work/hashes"
  else
    cp "$work/hashes" "$reference"
  fi
}

# The same, and of --more. Builds that merely optimise less or more compare the plain hashes only, which is quicker.
all_same() {
  same "$@" || return 1
  more=$1.more
  shift
  same "$more" "$@" --more
}

# Every instruction set of this CPU and a few ways to use threads, with one build.
check_native() { # name program
  for isa in $(isas "$root"); do
    "$2" --isa $isa --probe
    if [ $? -eq 77 ]; then
      skip "$1, $isa (not on this CPU)"
    else
      check "$1, $isa" all_same "$first" "$2" --isa $isa
    fi
  done
  check "$1, 3 threads" all_same "$first" "$2" --threads 3
  check "$1, 64 threads, high/low" all_same "$first" "$2" --threads 64 --schedule 1
  check "$1, 8 threads, shuffled" all_same "$first" "$2" --threads 8 --schedule 2
}

# Flags that break careless code, for the library (the tests themselves need their NaNs).
passes_under() { # test
  gcc -O1 -D_DEFAULT_SOURCE -I"$root" -I"$root/tests" "$root/tests/$1.c" $problem "$work/library.o" -o "$work/test" \
    -lcmocka -lm -lpthread && MOE_TEST_QUICK=1 "$work/test"
}

for compiler in $(compilers); do
  for flags in "-std=c11 -O2" "-O0" "-O3 -march=native" "-std=c11 -O3 -march=native" "-Ofast" "-Ofast -march=native" \
    "-O2 -fopenmp"; do
    name="$compiler $flags"
    case $flags in *openmp*)
      has_openmp "$compiler" || { skip "$name (no OpenMP library for it)" && continue; }
      ;;
    esac
    check "$name: the library, without warnings" build_library "$compiler" "$flags" || continue
    check "$name builds" build_hash "$compiler" "$flags" || continue
    case $flags in
    "-std=c11 -O2")
      check_native "$name" "$work/program"
      check "$name, large shapes, scalar" same "$first_large" "$work/program" --isa scalar --large
      check "$name, large shapes, best" same "$first_large" "$work/program" --large --threads 5
      check "$name, real threads, builds" \
        build_hash "$compiler" "$flags -D_DEFAULT_SOURCE -pthread -DBITS_HASH_THREADS" &&
        check "$name, real threads, 3, shuffled" all_same "$first" "$work/program" --threads 3 --schedule 2
      continue
      ;;
    esac
    case $flags in *fast | *openmp*) as=all_same ;; *) as=same ;; esac
    check "$name" $as "$first" "$work/program"
    check "$name, scalar" same "$first" "$work/program" --isa scalar
    case $flags in
    *openmp*) check "$name, 3 threads, shuffled" all_same "$first" "$work/program" --threads 3 --schedule 2 ;;
    -Ofast)
      check "$name, large shapes" same "$first_large" "$work/program" --large
      for test in test_exact test_bounds test_memory test_errors test_elements test_mx; do
        check "$name, $test" passes_under $test
      done
      ;;
    esac
  done
done

# With floats that nobody set being NaN, what pads an operand is seen where it should be zero.
if have clang; then
  check "clang, unset floats are NaN, builds" build_library clang "-O1 -ftrivial-auto-var-init=pattern" &&
    for test in test_exact test_quantized; do
      check "clang, unset floats are NaN, $test" passes_under $test
    done
else
  skip "unset floats are NaN (needs clang)"
fi

# Other machines, scalar kernels: big-endian s390x and aarch64.
for machine in s390x aarch64; do
  cross=$machine-linux-gnu-gcc
  if ! have "$cross" || ! have "qemu-$machine"; then
    skip "$machine (needs $cross and qemu-$machine)"
    continue
  fi
  for flags in "-O2" "-Ofast"; do
    check "$cross $flags builds" build "$work/cross" "$cross" $flags -static || continue
    case $flags in -Ofast) as=same ;; *) as=all_same ;; esac
    check "$cross $flags, under qemu" $as "$first" "qemu-$machine" "$work/cross"
  done
done

# As on MinGW, whose fmaf rounds twice.
for flags in "-O2" "-Ofast"; do
  check "gcc $flags, fmaf in double, builds" build "$work/double" gcc "$flags" -DMOE_FMAF_IN_DOUBLE=1 &&
    check "gcc $flags, fmaf in double, scalar" all_same "$first" "$work/double" --isa scalar
done

# A CPU with AVX-512 that has no VBMI.
if build "$work/no_vbmi" gcc -O2 -DMOE_CPU_VBMI=0 && "$work/no_vbmi" --isa avx512 --probe; then
  check "AVX-512 without VBMI" all_same "$first" "$work/no_vbmi" --isa avx512
else
  skip "AVX-512 without VBMI (not on this CPU)"
fi

# A plain x86-64 CPU without AVX, and one with AVX2 only. (qemu 7.2 reads all of a vector where a masked load takes some
# of it, and faults at the guard pages of --more.)
if have qemu-x86_64 && build "$work/static" gcc -O2 -static >/dev/null 2>&1; then
  check "x86-64 without AVX, under qemu" same "$first" qemu-x86_64 -cpu qemu64 "$work/static"
  check "x86-64 with AVX2, under qemu" same "$first" qemu-x86_64 -cpu max "$work/static" --isa avx2
else
  skip "x86-64 without AVX (needs qemu-x86_64)"
fi

finish
