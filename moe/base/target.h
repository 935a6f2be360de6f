/* Compiler switches: regions compiled for an instruction set, regions with exact floating point, inlining and
   unrolling. */
#ifndef MOE_BASE_TARGET_H
#define MOE_BASE_TARGET_H

#define MOE_CAT_(a, b) a##b
#define MOE_CAT(a, b) MOE_CAT_(a, b)
#define MOE_PRAGMA_(x) _Pragma(#x)
#define MOE_PRAGMA(x) MOE_PRAGMA_(x)

#define MOE_UNUSED       __attribute__((unused))
#define MOE_LINE_ALIGNED __attribute__((aligned(64)))
/* Functions. clang would inline a function with one caller, and compile it twice: that takes a tenth of its time. So
   MOE_FN is not inlined there, and MOE_EITHER is for small functions in loops, where the compiler decides. */
#define MOE_EITHER static MOE_UNUSED
#ifdef __clang__
#define MOE_FN MOE_EITHER __attribute__((noinline))
#else
#define MOE_FN MOE_EITHER
#endif
#define MOE_INLINE static inline __attribute__((always_inline, unused))
/* The large ones: a compiler that does not optimise gives the variables of every copy places of their own, hundreds of
   KiB of stack. */
#ifdef __OPTIMIZE__
#define MOE_INLINE_LARGE MOE_INLINE
#else
#define MOE_INLINE_LARGE MOE_FN
#endif

/* gcc for Win64 takes 16 bytes for the most that the stack can be aligned to, yet stores wider vectors there by aligned
   moves (its bug 54412). Here the assembler takes those for the unaligned ones, which are as fast. Under -flto it may
   be given functions without this, so kernels check that it is there. */
#if defined(__SEH__) && !defined(__clang__)
#define MOE_MOVE_(aligned, unaligned) ".macro " #aligned " operands:vararg\n" #unaligned " \\operands\n.endm\n"
__asm__(".ifndef moe_moves_\n.set moe_moves_, 1\n"
        MOE_MOVE_(vmovaps, vmovups) MOE_MOVE_(vmovapd, vmovupd) MOE_MOVE_(vmovdqa, vmovdqu)
        MOE_MOVE_(vmovdqa32, vmovdqu32) MOE_MOVE_(vmovdqa64, vmovdqu64)
        ".endif\n");
#define MOE_MOVES_ ".ifndef moe_moves_\n.error \"moe.h: compile the implementation with -fno-lto\"\n.endif"
#else
#define MOE_MOVES_ ""
#endif

/* MOE_EXACT_BEGIN .. END: floating point as written, even if the user compiles with -ffast-math or -ffp-contract. clang
   attaches these flags to the code of its intrinsics as well, so immintrin.h is first included in such a region. */
#if defined(__clang__)
#ifdef __FAST_MATH__ /* the pragmas do not undo all of it (selects, sqrt, fma without hardware) unless operations may
                        trap */
#define MOE_EXACT_TRAPS MOE_PRAGMA(clang fp exceptions(maytrap))
#else
#define MOE_EXACT_TRAPS
#endif
#define MOE_EXACT_BEGIN                                                                                     \
  MOE_PRAGMA(float_control(push)) MOE_PRAGMA(float_control(precise, on)) MOE_PRAGMA(STDC FP_CONTRACT OFF)   \
  MOE_EXACT_TRAPS
#define MOE_EXACT_END MOE_PRAGMA(float_control(pop)) MOE_PRAGMA(STDC FP_CONTRACT DEFAULT)
#define MOE_TARGET_BEGIN(features) \
  MOE_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define MOE_TARGET_END MOE_PRAGMA(clang attribute pop)
#define MOE_UNROLL     MOE_PRAGMA(clang loop unroll(full))
#define MOE_UNROLL_FEW MOE_PRAGMA(clang loop unroll_count(2)) /* fully, if the loop has two iterations */
#elif defined(__GNUC__)
#define MOE_EXACT_BEGIN                                                                                       \
  MOE_PRAGMA(GCC push_options)                                                                                \
  MOE_PRAGMA(GCC optimize("no-fast-math", "no-associative-math", "no-reciprocal-math", "no-finite-math-only", \
                          "signed-zeros", "no-unsafe-math-optimizations", "fp-contract=off"))
#define MOE_EXACT_END MOE_PRAGMA(GCC pop_options)
/* Passes that find next to nothing in this code. */
#if __GNUC__ >= 11
#define MOE_OPTIMIZE_NO_MODREF_ "no-ipa-modref",
#else
#define MOE_OPTIMIZE_NO_MODREF_
#endif
#define MOE_OPTIMIZE_LESS_                                                                                  \
  MOE_OPTIMIZE_NO_MODREF_ "no-tree-dse", "no-dse", "no-ipa-pure-const", "no-ipa-ra", "no-ipa-cp", "no-ipa-sra", \
      "no-early-inlining"
/* Without these passes inner loops of kernels have at most two instructions more. `optimize` must precede `target`: gcc
   drops it where it follows within a macro. */
#define MOE_TARGET_BEGIN(features)                                                                  \
  MOE_PRAGMA(GCC push_options)                                                                      \
  MOE_PRAGMA(GCC optimize("no-tree-pre", "no-gcse", "no-rerun-cse-after-loop", "no-tree-vectorize", \
                          "no-tree-bit-ccp", "no-tree-loop-distribute-patterns",                    \
                          MOE_OPTIMIZE_LESS_))                                                      \
  MOE_PRAGMA(GCC target(features))
#define MOE_TARGET_END MOE_PRAGMA(GCC pop_options)
#define MOE_UNROLL     MOE_PRAGMA(GCC unroll 64)
#define MOE_UNROLL_FEW MOE_PRAGMA(GCC unroll 2)
#else
#error "moe.h needs gcc or clang"
#endif

/* MOE_QUICK_BEGIN .. END: code that only calls kernels. It runs as fast if it is compiled with less effort, which takes
   half the time: gcc at -O1 without the passes that cost most, clang without unrolling or inlining on its own. In
   MOE_QUICK_CALLS functions loop over rows, pairs and blocks at most, not over elements: nothing is optimised there. */
#if defined(__clang__) && defined(__OPTIMIZE__)
#define MOE_QUICK_BEGIN      MOE_PRAGMA(clang attribute push(__attribute__((minsize)), apply_to = function))
#define MOE_QUICK_WIDE_BEGIN MOE_QUICK_BEGIN
#define MOE_QUICK_CALLS_BEGIN MOE_PRAGMA(clang attribute push(__attribute__((optnone)), apply_to = function))
#define MOE_QUICK_END        MOE_PRAGMA(clang attribute pop)
#elif defined(__GNUC__) && defined(__OPTIMIZE__)
#define MOE_QUICK_BEGIN                                                                                      \
  MOE_PRAGMA(GCC push_options)                                                                               \
  MOE_PRAGMA(GCC optimize("O1", "no-thread-jumps", "no-guess-branch-probability", MOE_OPTIMIZE_LESS_,        \
                          "no-tree-ccp", "no-tree-dominator-opts", "no-tree-loop-optimize", "no-tree-pta",   \
                          "no-tree-fre", "no-tree-ch", "no-forward-propagate", "no-split-wide-types",        \
                          "no-reorder-blocks", "no-tree-sink", "no-ivopts", "ira-region=one"))
#define MOE_QUICK_WIDE_BEGIN                                                                      \
  MOE_PRAGMA(GCC push_options)                                                                    \
  MOE_PRAGMA(GCC optimize("O1", "no-thread-jumps", "no-guess-branch-probability", MOE_OPTIMIZE_LESS_, \
                          "expensive-optimizations"))
#define MOE_QUICK_CALLS_BEGIN MOE_PRAGMA(GCC push_options) MOE_PRAGMA(GCC optimize("O0"))
#define MOE_QUICK_END         MOE_PRAGMA(GCC pop_options)
#else
#define MOE_QUICK_BEGIN
#define MOE_QUICK_WIDE_BEGIN
#define MOE_QUICK_CALLS_BEGIN
#define MOE_QUICK_END
#endif

/* x, as if it were computed here, in a register. gcc would otherwise load a vector again for each use. */
#if defined(__x86_64__) || defined(__i386__)
#define MOE_IN_REGISTER(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__) || defined(__arm__)
#define MOE_IN_REGISTER(x) __asm__("" : "+w"(x))
#elif defined(__riscv) || defined(__s390x__) || defined(__powerpc64__)
#define MOE_IN_REGISTER(x) __asm__("" : "+f"(x))
#else
#define MOE_IN_REGISTER(x) __asm__("" : "+m"(x))
#endif

/* Under -ffp-contract=fast (part of -ffast-math) clang's backend fuses a product with a following sum, in spite of the
   pragmas. This hides the product from it; every product in moe/simd/ goes through it. */
#ifdef __clang__
#define MOE_OPAQUE(x) MOE_IN_REGISTER(x)
#else
#define MOE_OPAQUE(x) ((void)0)
#endif

/* Without it gcc keeps many addresses derived from a pointer, most of them in memory. */
#define MOE_OPAQUE_POINTER(p) __asm__(MOE_MOVES_ : "+r"(p))

#if (defined(__x86_64__) || defined(__i386__)) && defined(__SSE2__)
#define MOE_X86 1
#ifdef __clang__
MOE_EXACT_BEGIN
#include <immintrin.h>
MOE_EXACT_END
#else
#include <immintrin.h>
#endif
#else
#define MOE_X86 0
#endif

#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0 && __FLT_EVAL_METHOD__ != 16
#error "moe.h needs float arithmetic in float: no -std=c11 on s390x, -msse2 -mfpmath=sse on 32-bit x86"
#endif

#endif
