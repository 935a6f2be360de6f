/* Names inside the templates. MOE_V(add) is the vocabulary's operation, MOE_K(pack) this instruction set's kernel,
   MOE_KF(pack) this instruction set's kernel for the format of the current inclusion, MOE_KC(pack) that for
   codes of its MOE_CODES_BITS. */
#ifndef MOE_SIMD_NAMES_H
#define MOE_SIMD_NAMES_H

#define MOE_V(op)        MOE_CAT(moe_##op##_, MOE_VOCABULARY)
#define MOE_B(op)        MOE_CAT(moe_##op##_, avx512vbmi) /* an operation or kernel with tables of bytes */
#define MOE_W            MOE_CAT(MOE_W_, MOE_VOCABULARY) /* elements in a vector */
#define MOE_K(name)      MOE_CAT(moe_##name##_, MOE_ISA)
#define MOE_KF(name)     MOE_CAT(MOE_CAT(moe_##name##_, MOE_FORMAT), MOE_CAT(_, MOE_ISA))
#define MOE_KC(name)     MOE_CAT(MOE_CAT(moe_##name##_, MOE_CODES_BITS), MOE_CAT(_, MOE_ISA))
#define MOE_VF(op)       MOE_CAT(MOE_CAT(moe_##op##_, MOE_FORMAT), MOE_CAT(_, MOE_VOCABULARY))

/* The storage type of the current inclusion: 2 bytes, or f32; and whether it is the upper 16 bits of a float. */
#define MOE_FORMAT_TYPE  MOE_CAT(MOE_CAT(moe_format_, MOE_FORMAT), _)
#define MOE_FORMAT_UPPER MOE_IS_UPPER_((moe_dtype)MOE_CAT(MOE_CAT(MOE_FORMAT_, MOE_FORMAT), _))
#define MOE_FORMAT_OF_(name, type, NAME)            \
  typedef type moe_format_##name##_;                \
  enum { MOE_FORMAT_##name##_ = MOE_DTYPE_##NAME }; \
  _Static_assert(sizeof(type) == 2 || MOE_DTYPE_##NAME == MOE_DTYPE_F32, #name " does not have 2 bytes");
MOE_DTYPE_LIST(MOE_FORMAT_OF_)
#undef MOE_FORMAT_OF_
#define MOE_IS_UPPER_(dtype) ((dtype) == MOE_DTYPE_BF16) /* a macro: what is not for a format, is not compiled */

/* An instruction set's blocking numbers (gemm/blocking.h), and its vocabulary's. */
#define MOE_N(name)          MOE_CAT(MOE_##name##_, MOE_ISA)
#define MOE_VN(name)         MOE_CAT(MOE_##name##_, MOE_VOCABULARY)
#define MOE_NR_VECTORS       MOE_VN(NR_VECTORS)
#define MOE_PACKED_A         MOE_VN(PACKED_A)
#define MOE_KC_BYTES         MOE_N(KC_BYTES)
#define MOE_KC_SHORT_ROWS    MOE_N(KC_SHORT_ROWS)
#define MOE_SMALL_M_ONE_DEEP MOE_VN(SMALL_M_ONE_DEEP)

#endif
