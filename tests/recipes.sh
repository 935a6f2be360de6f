#!/bin/sh
# recipes.sh: "Where do I add ..." of moe/README.md, tried. Each file of tests/recipes/ is an addition to the library
# and to the tables that tests take their cases from. It is applied to a copy of the tree, which must then compile
# without warnings, pass tests, and give the same bits on every instruction set.
#
# A recipe consists of blocks. A block begins with a line that says where the lines after it go:
#   @list NAME           at the end of the X-list NAME, wherever that is defined
#   @enum NAME           after the last value of the enum that NAME_COUNT_ ends
#   @before FILE: TEXT   before the only line of FILE that contains TEXT; @after likewise
#   @file FILE           in a new file
#   @from FILE: NEW SED  none: NEW is FILE with all of it edited by sed
#   @tests NAME ...      none: the tests to run; @flags ...: and what to compile them with
. "$(dirname "$0")/support/checks.sh"
export MOE_TEST_QUICK=1
common="-O1 -fsanitize=bounds -fno-sanitize-recover=all -I. -Itests -D_DEFAULT_SOURCE"

only() { # what, files: there must be one
  [ $# -eq 2 ] || { echo "$1: $(($# - 1)) places" && return 1; }
  echo "$2"
}

# The block's lines go into $file where awk's program $1 says so: n counts the places, `lines` are the block's.
edit() {
  awk -v body="$work/body" 'BEGIN { while ((getline line < body) > 0) lines = lines (count++ ? "\n" : "") line }
    '"$1"'
    END { exit n != 1 }' "$file" >"$work/edited" || { echo "not one place in $file: $head" && return 1; }
  cp "$work/edited" "$file"
}

block() { # word, the rest of the head
  case $1 in
  list)
    file=$(only "$2" $(grep -rl "#define $2(" moe.h moe tests/support)) || return 1
    sed '$!s/$/ \\/' "$work/body" >"$work/continued" && mv "$work/continued" "$work/body"
    name=$2 edit 'index($0, "#define " ENVIRON["name"] "(") { in_list = 1 }
      in_list && !/\\$/ { print $0 " \\"; print lines; in_list = 0; n++; next } { print }'
    ;;
  enum)
    file=$(only "$2" $(grep -rl "^ *$2_COUNT_" moe/api)) || return 1
    name=$2 edit 'match($0, "^ *" ENVIRON["name"] "_COUNT_") { print lines; n++ } { print }'
    ;;
  before | after)
    file=${2%%: *} text=${2#*: } where=$1
    where=$where text=$text edit 'BEGIN { after = ENVIRON["where"] == "after" }
      { here = index($0, ENVIRON["text"]) > 0; n += here }
      here && !after { print lines } { print } here && after { print lines }'
    ;;
  file) cp "$work/body" "$2" ;;
  from)
    rest=${2#*: }
    sed "${rest#* }" "${2%%: *}" >"${rest%% *}"
    ;;
  tests) tests=$2 ;;
  flags) flags="$common $2" ;;
  *) echo "what is @$1?" && return 1 ;;
  esac
}

apply() { # recipe
  rm -rf "$work/copy" "$work/blocks" && mkdir "$work/copy" "$work/blocks" || return 1
  cp -R "$root/moe.h" "$root/moe" "$root/tests" "$work/copy" && cd "$work/copy" || return 1
  awk -v to="$work/blocks/" '/^@/ { file = sprintf("%s%03d", to, ++n); print substr($0, 2) >file; next }
    n { print >(file ".body") }' "$1" || return 1
  tests= flags=$common
  for at in "$work"/blocks/???; do
    head=$(cat "$at")
    if [ -f "$at.body" ]; then cp "$at.body" "$work/body"; else : >"$work/body"; fi
    block "${head%% *}" "${head#* }" || return 1
  done
}

# How much of it belongs to the library, in how many places.
size() {
  awk '/^@/ { ours = $2 !~ /^tests/ && $1 !~ /tests/ && $2 !~ /^EACH_/; places += ours; next } ours { lines++ }
    END { printf "%d lines in %d places", lines, places }' "$1"
}

build() {
  cd "$work/copy" || return 1
  gcc $flags $strict -c tests/support/moe_impl.c -o impl.o &
  gcc $flags -c tests/support/problem.c -o problem.o && gcc $flags -c tests/support/problem_ops.c -o problem_ops.o &&
    gcc $flags -c tests/bits_hash.c -o bits_hash.o
  built=$?
  wait $! && [ $built -eq 0 ] && gcc $flags bits_hash.o problem.o problem_ops.o impl.o -o bits_hash -lm
}

compile_and_run() { # test
  gcc $flags "tests/$1.c" problem.o problem_ops.o impl.o -o "$1" -lcmocka -lm -lpthread && "./$1"
}

# Two tests at a time, each to a log, its exit code beside it.
run_tests() { # test...
  cd "$work/copy" || return 1
  first= second=
  for test in "$@"; do
    last=$second second="$first $test" first=$last
  done
  for list in "$first" "$second"; do
    for test in $list; do
      compile_and_run "$test" >"$test.log" 2>&1
      echo $? >"$test.code"
    done &
  done
  wait
}

passed() { # test
  cat "$work/copy/$1.log"
  return "$(cat "$work/copy/$1.code")"
}

same_bits() {
  cd "$work/copy" && ./bits_hash --isa scalar >scalar.hashes && [ "$(wc -l <scalar.hashes)" -gt 30 ] || return 1
  for isa in $(isas .); do
    ./bits_hash --isa "$isa" --probe
    [ $? -ne 77 ] || continue
    ./bits_hash --isa "$isa" >"$isa.hashes" && cmp scalar.hashes "$isa.hashes" || return 1
  done
}

for recipe in "$root"/tests/recipes/*.recipe; do
  name=$(sed -n '1s/^# //p' "$recipe")
  apply "$recipe" >"$work/apply.log" 2>&1 || { check "$name: applies" sh -c "cat $work/apply.log; exit 1"; continue; }
  check "$name, $(size "$recipe"): builds" build || continue
  check "$name: the same bits on every instruction set" same_bits
  (run_tests $tests)
  for test in $tests; do check "$name: $test" passed "$test"; done
done
finish
