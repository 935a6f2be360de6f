/* What a narrow element is. */
#ifndef MOE_QUANT_FORMAT_H
#define MOE_QUANT_FORMAT_H

/* A narrow element format: see MOE_ELEMENT_LIST; and what follows from it for decoding. */
typedef struct moe_element_format_ {
  int bits, fraction, bias;
  uint32_t max, infinity, nan;                      /* codes; 0: there is none */
  uint32_t first_normal, first_infinity, first_nan; /* the smallest such magnitudes */
  int shift;                                        /* from a code's fraction to a float's */
  uint32_t rebias;                                  /* to add to a float's bits, for the exponent */
  uint32_t magic;                                   /* a float whose last bit is the smallest subnormal */
} moe_element_format_;

#endif
